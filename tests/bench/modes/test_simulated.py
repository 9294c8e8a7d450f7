import pytest

from vllm_tetri.bench.modes.cells import Cell, Request
from vllm_tetri.bench.modes.client import Reply
from vllm_tetri.bench.modes.simulated import Profiles, beside, markdown
from vllm_tetri.sim.cost.profiles import Profile
from vllm_tetri.types import StepCoefficients

COST = StepCoefficients(base_s=0.01, prompt_s=0.001, confidence=1.0)


def alike(front_s: float = 0.0) -> Profiles:
    known = Profile("test", COST, "a test", is_estimate=False, front_s=front_s)
    return Profiles(known, known)


def test_cells_are_simulated_with_the_same_requests() -> None:
    # One request at a time: what is simulated follows from the step costs alone.
    profiles = alike()
    requests = [Request(10.0 * place, 100, 3, Reply(0.2, 0.3, [0, 0], "")) for place in range(2)]
    cells = [
        Cell(name, "lpld", "light", 0, 1.0, 11.0, 0.5, 0.0, requests)
        for name in ("stock", "replicas", "split", "adaptive")
    ]
    found = {each.cell.system: each for each in beside(cells, profiles)}
    for name in ("stock", "replicas", "adaptive"):
        assert found[name].ttft_s == (pytest.approx(0.2), pytest.approx(0.11))
        assert found[name].jct_s == (pytest.approx(0.3), pytest.approx(0.13))
        assert found[name].ttft_error == pytest.approx(0.11 / 0.2 - 1)
    assert found["split"].jct_s[1] > 0.13  # the hand-over
    text = markdown(list(found.values()))
    assert "| stock | -45% | -45% | -57% | -57% |" in text


def test_cells_with_failed_requests_are_not_simulated() -> None:
    failed = Request(0.0, 100, 3, Reply(0.0, 0.0, [], "HTTP 503"))
    cell = Cell("stock", "lpld", "light", 0, 1.0, 1.0, 0.5, 0.0, [failed])
    assert beside([cell], alike()) == []


def test_what_a_request_takes_outside_the_engine_counts() -> None:
    request = Request(0.0, 100, 3, Reply(0.2, 0.3, [0, 0], ""))
    cell = Cell("stock", "lpld", "light", 0, 1.0, 1.0, 0.5, 0.0, [request])
    (found,) = beside([cell], alike(front_s=0.02))
    assert found.ttft_s[1] == pytest.approx(0.11 + 0.02)
    assert found.jct_s[1] == pytest.approx(0.13 + 0.02)
