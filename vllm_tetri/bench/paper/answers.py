"""Figures 18 and 19: admission to a decode instance, and the choice of one, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, pstdev

from vllm_tetri.bench.paper.case import Case, Size, at_once, played, shape_of
from vllm_tetri.bench.report.read import ALL_AT_ONCE, decoders
from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.dispatch import DispatchPolicy
from vllm_tetri.policy.lengths import HEAVY_TOKENS
from vllm_tetri.sim.job import Served
from vllm_tetri.sim.setting import Setting, Shape, places

_ACCURACIES = (0.749, 1.0)  # of the paper's predictor with buckets of 200 tokens, and of none
_DECODES = (2, 4, 8)
_PREFILL = 4  # prompts are not what is measured


def cases(size: Size) -> Iterator[Case]:
    """Policies of admission, then of dispatch."""
    shape = shape_of()
    for policy in DecodePolicy:
        for accuracy in _ACCURACIES:
            is_greedy = policy is DecodePolicy.GREEDY
            if is_greedy and accuracy < 1:
                continue  # it looks at no prediction
            name = str(policy) if is_greedy else f"{policy}, oracle {accuracy:.1%}"
            held = replace(shape, admission=policy)
            yield Case(
                "e5", ALL_AT_ONCE, name, partial(_admit, held, size.requests["e5"], accuracy)
            )
    for count in _DECODES:
        for dispatch in DispatchPolicy:
            play = partial(_dispatch, shape, dispatch, count, size.requests["e6"])
            yield Case("e6", decoders(count), str(dispatch), play)


def _admit(shape: Shape, count: int, accuracy: float, seed: int) -> dict[str, float]:
    # All prompts' KV is to wait for admission, not for room to arrive.
    asks = at_once("mixed", count, seed, accuracy)
    shape = replace(shape, arena_tokens=sum(ask.prompt_tokens for ask in asks) * 2)
    outcome = played(Setting(places(_PREFILL, 1, shape=shape), "split", seed), asks)
    return {
        "jct_mean_s": fmean(each.jct_s for each in outcome.served),
        "total_s": outcome.end_s,
        "preemptions": outcome.preemptions,
    }


def _dispatch(
    shape: Shape, dispatch: DispatchPolicy, decodes: int, count: int, seed: int
) -> dict[str, float]:
    asks = at_once("mixed", count * decodes, seed)
    shape = replace(shape, arena_tokens=sum(ask.prompt_tokens for ask in asks))
    setting = Setting(places(decodes, decodes, shape=shape), "split", seed, dispatch=dispatch)
    served = played(setting, asks).served
    by_place: dict[str, list[Served]] = {}
    for each in served:
        by_place.setdefault(each.decode, []).append(each)
    slowest = max(by_place.values(), key=_end_s)
    heavy = _heavy(slowest)
    counts = [_heavy(each) for each in by_place.values()]
    counts += [0] * (decodes - len(counts))
    return {
        "decode_s": _end_s(served) - min(each.ttft_s for each in served),
        "jct_mean_s": fmean(each.jct_s for each in served),
        "heavy_of_slowest": heavy,
        "light_of_slowest": len(slowest) - heavy,
        "spread_heavy": pstdev(counts),
    }


def _end_s(served: Sequence[Served]) -> float:
    return max(each.jct_s for each in served)


def _heavy(served: Sequence[Served]) -> int:
    return sum(each.ask.output_tokens > HEAVY_TOKENS for each in served)
