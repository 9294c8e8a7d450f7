"""How many of alike instances with role both are spared outputs, and compute prompts alone. Pure.

Outputs wait for prompts that share their steps, and prompts for outputs. Where that costs more
than what is left idle, as mostly on GPUs, some instances are better spared. The mean times to the
first token and to the end are predicted for every number of spared instances, from the load of the
last seconds, as if it lay evenly on all that share it. The number with the least product of the two
is taken (what `vllm-tetri regret` calls cost), if it is better by a margin for a while. Prompts
that find all spared instances busy go to the others, as often as calls find all lines taken
(Erlang's loss formula). With roles set by hand this would be 1P3D or 2P2D (DistServe, section 4);
here it follows the load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import exp
from statistics import fmean
from typing import NamedTuple

from vllm_tetri.policy.adaptive import hand_over_s
from vllm_tetri.policy.cluster import InstanceRow
from vllm_tetri.types import Role

_MEMORY_S = 5.0  # of the load
_WANTED_S = 2.0  # for so long another number has to be better, each time by the margin
_MARGIN = 0.01  # of the mean of both times
_LEAST_GAIN = 0.02  # by which sparing any has to be better than sparing none
_MOST_LONGER = 0.05  # by which the whole may take longer: requests last many times a first token
_STAYS = 1.02  # times its bounds the number of now may reach, so that none takes turns
_MOST_USED, _MOST_SHARE = 0.8, 0.9  # of KV blocks, and of an instance's time for prompts
_MOST_BUSY, _LEAST_S = 0.99, 1e-9  # whatever costs are reported, nothing is infinite

_Kind = frozenset[tuple[str, str]]  # an identity


class UsualLoad(NamedTuple):
    """The load of alike instances: means over them and the last seconds."""

    decodes: float
    prompt_share: float  # of an instance's time
    used_part: float  # of its KV blocks
    prompt_tokens: float  # of a request
    output_tokens: float  # of a request


def expected_s(row: InstanceRow, load: UsualLoad, count: int) -> list[tuple[float, float]]:
    """Return the mean times to the first token and to the end for each number of the `count`
    instances, all alike `row`, that are spared outputs, from none on."""
    row = row.copy()  # computes prompts alone
    row.chunk_tokens = row.view.load.chunk_tokens or row.chunk_tokens
    cost, tokens = row.cost, load.prompt_tokens
    each_s = cost.request_s + (tokens + load.output_tokens / 2) * cost.token_s
    prompt_s = max(_LEAST_S, tokens * row.token_s(tokens))
    counted_s = max(_LEAST_S, tokens * cost.prompt_s)  # what shares count: no attention
    prompt_share = min(_MOST_SHARE, load.prompt_share * prompt_s / counted_s)
    chunks = max(1.0, tokens / row.chunk_tokens)
    alone_s = prompt_s + chunks * cost.base_s
    moved_s = hand_over_s(row, tokens)
    offered = prompt_share * count * alone_s / prompt_s  # instances that prompts keep busy
    mixed = 1.0  # the part of prompts that is computed beside outputs
    found = list[tuple[float, float]]()
    for spared in range(count):
        if spared:
            mixed = offered * mixed / (spared + offered * mixed)
        more = count / (count - spared)
        decodes, share = more * load.decodes, min(_MOST_SHARE, more * prompt_share * mixed)
        none_idle = (1 - exp(-decodes)) ** (count - spared)  # the probability that all have outputs
        step_s = cost.base_s + none_idle * decodes * each_s
        ttft_s = prompt_s * (1 + share / (2 * (1 - share))) + (chunks + none_idle / 2) * step_s
        if spared:
            busy = min(_MOST_BUSY, offered * (1 - mixed) / spared)
            waits_s = alone_s * busy**spared / (2 * (1 - busy))
            ttft_s = (1 - mixed) * (alone_s + waits_s) + mixed * ttft_s
        pace_s = (cost.base_s + decodes * each_s) / (1 - share)
        whole_s = ttft_s + (1 - mixed) * moved_s + load.output_tokens * pace_s
        found.append((ttft_s, whole_s))
    return found


def number_to_spare(row: InstanceRow, load: UsualLoad, count: int, now_spared: int) -> int:
    """Return how many of `count` instances alike `row` should be spared outputs, if so many are
    now."""
    expected = expected_s(row, load, count)
    latest_s, longest_s = expected[0][0], (1 + _MOST_LONGER) * expected[0][1]

    def may_be(spared: int, ttft_s: float, whole_s: float) -> bool:
        more = _STAYS if spared == now_spared else 1
        is_early = ttft_s <= more * latest_s and whole_s <= more * longest_s
        return is_early and load.used_part * count / (count - spared) <= more * _MOST_USED

    costs = {
        spared: ttft_s * whole_s
        for spared, (ttft_s, whole_s) in enumerate(expected)
        if spared == 0 or may_be(spared, ttft_s, whole_s)
    }
    costs[0] *= (1 - _LEAST_GAIN) ** 2
    best = min(costs, key=costs.__getitem__)
    is_better = now_spared not in costs or costs[best] < (1 - _MARGIN) ** 2 * costs[now_spared]
    return best if is_better else now_spared


class _Seen(NamedTuple):
    """What is known of one kind of instances."""

    load: UsualLoad
    at_s: float
    spared: int = 0
    better_since_s: float | None = None  # since when another number would be better


class Sparing:
    """Chooses the instances that are spared outputs, view by view. Owner: one thread."""

    def __init__(self) -> None:
        self._seen: dict[_Kind, _Seen] = {}

    def apply(self, rows: Sequence[InstanceRow], now: float) -> None:
        """Give those that are spared the role prefill in the rows of a view that is read `now`."""
        kinds: dict[int, list[InstanceRow]] = {}
        shared = Counter(row.device for row in rows if row.device)
        for row in rows:
            kinds.setdefault(row.key, []).append(row)
        before, self._seen = self._seen, {}
        for alike in kinds.values():
            is_able = all(_is_known(row) and shared[row.device] <= 1 for row in alike)
            if len(alike) < 2 or not is_able:
                continue
            kind = frozenset(alike[0].view.info.identity.items())
            if seen := _look(alike, before.get(kind), now):
                self._seen[kind] = seen
                for row in sorted(alike, key=lambda row: row.id)[: seen.spared]:
                    row.role = Role.PREFILL


def _is_known(row: InstanceRow) -> bool:
    return row.role is Role.BOTH and not row.alone and row.cost.confidence > 0


def _look(rows: Sequence[InstanceRow], seen: _Seen | None, now: float) -> _Seen | None:
    """Return what is known of alike instances with one more look at them."""
    loads = [row.view.load for row in rows]
    decodes = sum(row.decodes for row in rows)
    output_tokens = max(load.usual_tokens for load in loads)
    if decodes <= 0 or output_tokens <= 0:
        return seen  # nothing is known of requests
    context_tokens = sum(load.context_tokens for load in loads) / decodes
    load = UsualLoad(
        decodes / len(rows),
        fmean(row.prompt_share for row in rows),
        fmean(load.blocks_used / max(1, load.blocks_total) for load in loads),
        max(1.0, context_tokens - output_tokens / 2),
        output_tokens,
    )
    if seen is None:
        return _Seen(load, now)
    kept = exp((seen.at_s - now) / _MEMORY_S)
    pairs = zip(seen.load, load, strict=True)
    load = UsualLoad(*(kept * old + (1 - kept) * new for old, new in pairs))
    spared = min(seen.spared, len(rows) - 1)
    wanted = number_to_spare(rows[0], load, len(rows), spared)
    if wanted == spared:
        return _Seen(load, now, spared)
    since_s = now if seen.better_since_s is None else seen.better_since_s
    if now - since_s < _WANTED_S:
        return _Seen(load, now, spared, since_s)
    return _Seen(load, now, wanted)
