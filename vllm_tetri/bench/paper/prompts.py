"""Figure 16: in which order prompts are computed, simulated on one instance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean

from vllm_tetri.bench.paper.case import Case, Size, at_once, played, shape_of
from vllm_tetri.bench.report.read import QUEUE
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.sim.engine.kinds import PromptsFirst
from vllm_tetri.sim.setting import Setting, Shape, places

_BATCHES = (16, 32, 64, 128)
_FIXED_BATCH = 16
_ANY_TOKENS = 1 << 20  # a batch is full with 16 prompts, however long


def cases(size: Size) -> Iterator[Case]:
    """vLLM's batch of whole prompts, then chunks in three orders."""
    shape, count = shape_of(), size.requests["e2"]
    fixed = replace(shape, engine=PromptsFirst(_FIXED_BATCH, _ANY_TOKENS))
    yield _case("vllm-2023", fixed, count)
    yield _case("fcfs", replace(shape, order=PrefillPolicy.FCFS), count)
    for order in (PrefillPolicy.SJF, PrefillPolicy.LJF):
        for batch in _BATCHES:
            ordered = replace(shape, order=order, sched_batch=batch)
            yield _case(f"{order} {batch}", ordered, count)


def _case(name: str, shape: Shape, count: int) -> Case:
    return Case("e2", QUEUE, name, partial(_play, shape, count))


def _play(shape: Shape, count: int, seed: int) -> dict[str, float]:
    asks = [replace(ask, output_tokens=1) for ask in at_once("mixed", count, seed)]
    outcome = played(Setting(places(both=1, shape=shape), "whole", seed), asks)
    served = outcome.served
    return {
        "ttft_mean_s": fmean(each.ttft_s for each in served),
        "waiting_s": fmean(each.waited_s for each in served),
        # With others in the same steps.
        "prefill_s": fmean(each.ttft_s - each.waited_s for each in served),
        "total_s": outcome.end_s,
    }
