"""A simulated instance computes in every step what vLLM's scheduler with this package does.

The real one is played without a model in virtual time, knows what its steps cost, and learns
nothing else. Answers end where the script says, by a token that stops them, so that no scheduler
knows their lengths before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import Request

from tests.engine.harness import Engine
from tests.sim.builders import steps
from vllm_tetri.engine import pacing
from vllm_tetri.engine import scheduler as engine_scheduler
from vllm_tetri.engine.pacing import work_of
from vllm_tetri.handover import DecodeParams
from vllm_tetri.policy.step_cost import StepFit
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, InstanceConfig
from vllm_tetri.sim.workload import GRANULARITY_TOKENS, RequestSpec
from vllm_tetri.types import InstanceId, Prediction, Role, StepCoefficients, TransferId

WINDOW_TOKENS = 2000
_WORD, _STOP = 7, 3


class Clock:
    """What the scheduler takes for `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Played(Engine):
    """A real engine that is like a simulated one."""

    def __init__(self, folder: Path, engine: EngineConfig, specs: Sequence[RequestSpec]) -> None:
        args = {
            "max_model_len": WINDOW_TOKENS,
            "max_num_batched_tokens": WINDOW_TOKENS,
            "max_num_seqs": engine.max_requests,
            "enable_prefix_caching": False,
            "async_scheduling": False,
        }
        super().__init__(
            folder,
            Role.BOTH,
            num_blocks=engine.kv_blocks + 1,  # one is vLLM's null block
            args=args,
            chunk_size="auto" if engine.has_sized_chunks else engine.chunk_tokens,
            tbt_slo_s=engine.tbt_slo_s,
            prefill_policy=engine.order,
            sched_batch=engine.sched_batch,
            decode_policy=engine.admission,
            arena_bytes=16 << 20,
        )
        self._specs = {str(spec.id): spec for spec in specs}

    def sample(self, request: Request) -> int:
        is_last = request.num_output_tokens + 1 == self._specs[request.request_id].output_tokens
        return _STOP if is_last else _WORD

    def play(self, clock: Clock) -> list[dict[int, int]]:
        """Tokens that each step computes, by request."""
        coming, found = list(self._specs.values()), []
        while coming or self.scheduler.has_requests():
            if not self.scheduler.has_requests():
                clock.now = max(clock.now, coming[0].arrival_s)
            while coming and coming[0].arrival_s <= clock.now:
                self._enter(coming.pop(0))
            output, results = self.begin()
            if output.total_num_scheduled_tokens:
                found.append({int(name): num for name, num in output.num_scheduled_tokens.items()})
                clock.now += self.scheduler.clock.fit.cost.step_s(*work_of(output, 0.0)[1:])
            self.update(output, results)
        return found

    def _enter(self, spec: RequestSpec) -> None:
        request = self.add(str(spec.id), [9] * spec.prompt_tokens, max_tokens=WINDOW_TOKENS)
        request.sampling_params.stop_token_ids = [_STOP]
        origin = DecodeParams(TransferId(""), "", predicted=spec.predicted)
        self.endpoint.predictions.keep(str(spec.id), origin)


def assert_same(
    specs: Sequence[RequestSpec], folder: Path, patch: pytest.MonkeyPatch, **changes: Any
) -> None:
    usual = {"cost": StepCoefficients(base_s=1.0), "chunk_tokens": 64, "most_tokens": WINDOW_TOKENS}
    engine = EngineConfig(**{"kv_blocks": 200, "max_requests": 64, **usual, **changes})
    one = InstanceConfig(InstanceId("one"), Role.BOTH, engine)
    simulated = [
        dict(step.prompts) | dict.fromkeys(step.decodes, 1)
        for step in steps(ClusterConfig((one,)), specs)
    ]
    clock = Clock()
    patch.setattr(engine_scheduler, "time", clock)
    patch.setattr(engine_scheduler, "ARRIVAL_WAIT_S", 0.0)
    patch.setenv("TETRI_CACHE", str(folder / "cache"))
    patch.setattr(pacing, "VARIED_EVERY", 1 << 30)  # there is nothing to learn
    for name in ("learn", "refresh"):
        patch.setattr(StepFit, name, lambda *_: None)
    played = Played(folder, engine, specs)
    played.scheduler.clock.fit.cost = engine.cost
    try:
        assert played.play(clock) == simulated
    finally:
        played.close()


def spec(number: int, arrival_s: float, prompt: int, output: int) -> RequestSpec:
    bucket = Prediction.of_bucket(0, GRANULARITY_TOKENS)
    return RequestSpec(number, arrival_s, prompt, output, bucket)


@pytest.mark.parametrize("order", ["fcfs", "sjf", "srtf", "mlfq"])
def test_prompts_in_chunks(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [
        spec(0, 0.1, 200, 20), spec(1, 0.2, 30, 5), spec(2, 0.3, 64, 40), spec(3, 0.4, 1, 9),
        spec(4, 2.5, 10, 1), spec(5, 2.6, 128, 3), spec(6, 2.7, 65, 30), spec(7, 4.5, 15, 12),
    ]  # fmt: skip
    assert_same(specs, tmp_path, monkeypatch, order=order, sched_batch=4)


@pytest.mark.parametrize("slo_s", [None, 1.503])
@pytest.mark.parametrize("order", ["fcfs", "srtf"])
def test_chunks_by_what_steps_cost(
    order: str, slo_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = StepCoefficients(base_s=0.3, request_s=0.02, prompt_s=0.01)
    specs = [spec(number, 0.1 + 0.7 * number, 40 + 61 * number % 300, 30) for number in range(12)]
    assert_same(
        specs, tmp_path, monkeypatch,
        order=order, cost=cost, has_sized_chunks=True, tbt_slo_s=slo_s, kv_blocks=400,
    )  # fmt: skip


@pytest.mark.parametrize("admission", ["greedy", "reserve-dynamic"])
def test_a_small_pool(admission: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [spec(number, 0.1 + number / 4, 50 + 9 * number, 100) for number in range(6)]
    assert_same(specs, tmp_path, monkeypatch, admission=admission, kv_blocks=20)
