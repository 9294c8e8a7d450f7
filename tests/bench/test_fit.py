"""`vllm-tetri bench fit`: a profile that the simulator reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_tetri import cli
from vllm_tetri.bench import fit
from vllm_tetri.bench.modes.cells import Request
from vllm_tetri.bench.modes.client import Reply
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.cost.step_cost import linear
from vllm_tetri.types import StepCoefficients

TTFT_S, PROMPT_TOKENS, CHUNK_TOKENS = 0.5, 300, 200
COST = StepCoefficients(0.01, 0.0004, 2e-6, 0.0003, 2e-7, confidence=0.9)


class FakeClient:
    def __init__(self, error: str) -> None:
        self.error = error
        self.sizes: list[int] = []

    def play(self, schedule: Any, _: str) -> list[Request]:
        self.sizes.append(len(schedule))
        reply = Reply(ttft_s=TTFT_S, jct_s=1.0, error=self.error)
        return [Request(0.0, PROMPT_TOKENS, 1, reply) for _ in schedule]


def measured(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cost: StepCoefficients, error: str = ""
) -> tuple[int, FakeClient]:
    client = FakeClient(error)

    @contextmanager
    def serve(*_: Any) -> Iterator[tuple[FakeClient, str]]:
        yield client, "http://nowhere"

    monkeypatch.setattr(fit, "serve", serve)
    monkeypatch.setattr(fit, "_cost", lambda _: (cost, CHUNK_TOKENS))
    status = cli.main(["bench", "fit", "model", "--cores", "1", "--output", str(folder)])
    return status, client


def test_what_was_fitted_is_a_profile_of_the_simulator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, client = measured(monkeypatch, tmp_path, COST)
    assert status == 0
    assert 1 in client.sizes  # one at a time
    assert max(client.sizes) > 16  # and many
    known = profile(str(tmp_path / "profile.json"))
    found = linear(known.cost)
    assert (found.base_s, found.prompt_s, found.context_s) == (0.01, 0.0003, 2e-7)
    # Two steps of 200 and 100 tokens, behind 99.5 and 249.5 others in the mean.
    steps_s = 2 * 0.01 + 300 * 0.0003 + (200 * 99.5 + 100 * 249.5) * 2e-7
    assert known.front_s == pytest.approx(TTFT_S - steps_s)


def test_steps_that_scatter_are_no_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vague = StepCoefficients(0.01, 0.0004, 2e-6, 0.0003, 2e-7, confidence=0.2)
    status, _ = measured(monkeypatch, tmp_path, vague)
    assert status != 0
    assert "anything else running" in capsys.readouterr().err
    assert not (tmp_path / "profile.json").exists()


def test_a_request_that_fails_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = measured(monkeypatch, tmp_path, COST, error="HTTP 400")
    assert status != 0
    assert "HTTP 400" in capsys.readouterr().err


def test_options_that_it_sets_itself_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "fit", "model", "--", "--max-num-seqs", "4"]) != 0
    assert "--max-num-seqs" in capsys.readouterr().err
