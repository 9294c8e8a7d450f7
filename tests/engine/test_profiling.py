"""An engine that measures itself, on vLLM's own scheduler and a clock of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import BLOCK, Engine
from vllm_tetri.engine import profiling
from vllm_tetri.engine.own import is_own
from vllm_tetri.engine.profile import profile_folder, read_file
from vllm_tetri.policy.cost import CurvePoint, StepCost
from vllm_tetri.types import Role

SIZES = (16, 32, 64, 128, 256, 512, 1024)
TRUTH = StepCost(
    tuple(CurvePoint(n, 0.005 + 0.0006 * n) for n in SIZES),
    context_s=3.5e-7,
    base_s=0.013,
    request_s=0.0006,
    token_s=2.9e-6,
    shared_s=0.004,
)


class Clock:
    """Time that only passes when an engine computes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Computing(Engine):
    """An engine whose steps take what `TRUTH` says, `slower` times."""

    def __init__(self, folder: Path, role: Role, clock: Clock, **options: Any) -> None:
        self.clock = clock
        self.slower = 1.0
        self.steps: list[dict[str, int]] = []
        super().__init__(folder, role, num_blocks=600, **options)

    def _forward(self, output: Any) -> None:
        decodes = context = prefill = prefill_context = 0
        self.steps.append(dict(output.num_scheduled_tokens))
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            before = self.scheduler.requests[request_id].num_computed_tokens - num_tokens
            if num_tokens == 1:
                decodes += 1
                context += before
            else:
                prefill, prefill_context = prefill + num_tokens, before
        self.clock.now += self.slower * TRUTH.step_s(decodes, context, prefill, prefill_context)

    @property
    def is_measuring(self) -> bool:
        return self.instance.profiling is not None

    def measure(self) -> None:
        self.run_until(lambda: not self.is_measuring)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profiling, "time", clock)
    monkeypatch.setattr(profiling, "undisturbed_s", clock.monotonic)
    monkeypatch.setenv("TETRI_CACHE", str(tmp_path / "cache"))
    return clock


@pytest.fixture
def prefill(tmp_path: Path, clock: Clock) -> Iterator[Computing]:
    engine = Computing(tmp_path, Role.PREFILL, clock, chunk_size="auto")
    yield engine
    engine.close()


@pytest.fixture
def both(tmp_path: Path, clock: Clock) -> Iterator[Computing]:
    engine = Computing(tmp_path, Role.BOTH, clock, tbt_slo_s=0.1)
    yield engine
    engine.close()


def remembered() -> list[Path]:
    return list(profile_folder().glob("*"))


def test_auto_takes_the_chunk_that_saturates(prefill: Computing) -> None:
    assert prefill.scheduler.has_requests()  # so that vLLM steps at once
    prefill.measure()
    chunk = prefill.scheduler.max_num_scheduled_tokens
    assert chunk / TRUTH.prefill_s(chunk) >= 0.9 * 1024 / TRUTH.prefill_s(1024)
    assert chunk % BLOCK == 0
    assert chunk < 128
    assert not prefill.scheduler.has_requests()
    assert prefill.is_at_rest


def test_requests_wait_until_it_is_over_and_are_then_served(prefill: Computing) -> None:
    prefill.step()
    prefill.add("real", list(range(100)), max_tokens=1)
    while prefill.is_measuring:
        assert all(map(is_own, prefill.steps[-1]))
        prefill.step()
    prefill.run_until(lambda: "real" in prefill.finished)
    assert prefill.outputs == {"real": [7]}
    assert prefill.is_at_rest


def test_nobody_knows_the_instance_before_it_is_over(prefill: Computing) -> None:
    prefill.step()
    assert prefill.instance._agent._thread is None
    prefill.measure()
    assert prefill.instance._agent._thread is not None


def test_no_prompt_can_hit_what_was_computed_for_it(prefill: Computing) -> None:
    seen: dict[str, list[int]] = {}
    while prefill.is_measuring:
        prefill.step()
        for name, request in prefill.scheduler.requests.items():
            seen[name] = list(request.prompt_token_ids)
    longest = max(seen.values(), key=len)
    request = prefill.add("real", longest, max_tokens=1)
    assert prefill.scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 0


def test_the_second_start_measures_nothing(
    prefill: Computing, tmp_path: Path, clock: Clock
) -> None:
    prefill.measure()
    again = Computing(tmp_path, Role.PREFILL, clock, chunk_size="auto")
    again.measure()
    assert again.steps in ([], [{}])
    assert again.scheduler.max_num_scheduled_tokens == prefill.scheduler.max_num_scheduled_tokens
    assert again.instance._agent._thread is not None
    again.close()


def test_costs_of_all_kinds_of_steps_are_found(both: Computing) -> None:
    both.measure()
    (path,) = remembered()
    found = read_file(path).profile
    assert found.cost.base_s == pytest.approx(TRUTH.base_s, rel=0.05)
    assert found.cost.request_s == pytest.approx(TRUTH.request_s, rel=0.05)
    assert found.cost.token_s == pytest.approx(TRUTH.token_s, rel=0.05)
    assert found.cost.context_s == pytest.approx(TRUTH.context_s, rel=0.05)
    assert found.cost.shared_s == pytest.approx(TRUTH.shared_s, rel=0.05)
    assert both.scheduler._pace is not None
    assert both.is_at_rest


def test_the_file_explains_itself(both: Computing) -> None:
    both.measure()
    (path,) = remembered()
    conditions = json.loads(path.read_text())["conditions"]
    assert conditions["block_size"] == str(BLOCK)
    assert conditions["scope"] == "steps"
    assert {"vllm", "vllm_tetri", "model", "dtype", "device", "threads"} <= set(conditions)


def test_a_machine_too_slow_stops_at_the_deadline_with_what_it_has(both: Computing) -> None:
    both.slower = 100.0
    both.measure()
    assert both.clock.now - 1000.0 < profiling.DEADLINE_S + 100 * TRUTH.prefill_s(256, 1024)
    assert both.scheduler._pace is not None
    (path,) = remembered()  # it would take as long the next time
    found = read_file(path).profile
    assert found.cost.base_s > 0
    assert both.is_at_rest


def test_an_engine_kept_from_its_core_waits_for_calm(
    both: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Up to a moment somebody else has half of the core, which also spoils what is computed.
    calm_at = both.clock.now + 3.0

    def undisturbed_s() -> float:
        return both.clock.now - min(both.clock.now, calm_at) / 2

    monkeypatch.setattr(profiling, "undisturbed_s", undisturbed_s)
    while both.is_measuring:
        both.slower = 3.0 if both.clock.now < calm_at else 1.0
        both.step()
    (path,) = remembered()
    assert read_file(path).profile.cost.base_s == pytest.approx(TRUTH.base_s, rel=0.05)


def test_a_machine_that_never_calms_down_is_measured_all_the_same(
    both: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "undisturbed_s", lambda: both.clock.now / 2)
    both.measure()
    (path,) = remembered()
    assert read_file(path).profile.cost.base_s == pytest.approx(TRUTH.base_s / 2, rel=0.05)
    assert both.clock.now - 1000.0 < profiling.DEADLINE_S


def test_without_a_single_step_the_usual_chunk_is_taken(prefill: Computing) -> None:
    prefill.slower = 10_000.0
    prefill.measure()
    assert prefill.scheduler.max_num_scheduled_tokens == 16  # all that was measured
    assert prefill.is_at_rest


def test_it_can_be_stopped_at_any_time(both: Computing) -> None:
    for _ in range(7):
        both.step()
    assert both.is_measuring
    both.close()
    assert not remembered()


def test_time_without_a_core_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(profiling, "time", clock)
    monkeypatch.setattr(profiling, "_SCHEDSTAT", tmp_path / "schedstat")
    assert profiling.undisturbed_s() == 1000.0  # a kernel without it
    (tmp_path / "schedstat").write_text("5000000000 2500000000 7")
    assert profiling.undisturbed_s() == 997.5


@pytest.mark.parametrize(
    ("role", "options", "needed"),
    [
        (Role.PREFILL, {"chunk_size": "auto"}, True),
        (Role.PREFILL, {"chunk_size": 64, "tbt_slo_s": 0.1}, True),  # it may become a decode one
        (Role.PREFILL, {"chunk_size": 64}, False),
        (Role.DECODE, {"chunk_size": "auto"}, True),
        (Role.DECODE, {"tbt_slo_s": 0.1}, True),
        (Role.BOTH, {"tbt_slo_s": 0.1}, True),
        (Role.BOTH, {}, False),
    ],
)
def test_only_what_depends_on_it_is_measured(
    role: Role, options: dict[str, Any], needed: bool
) -> None:
    assert profiling.needs_profile(profiling.TetriConfig(role=role, **options)) is needed
