"""Aggregated or split, and where: decided for every request by what it would cost. Pure.

Costs are seconds that requests wait, the own one and others, priced by each instance's own
steps:

- A prompt waits for those queued before it and is computed in chunks, each together with a step
  of the instance's decodes. These wait for it in turn.
- An output takes one step per token, longer the more decodes and prompts there are. The others'
  steps become longer by what it adds.
- Instances on one device (cores or a GPU that they share) slow each other down.

Of all pairs of an instance for the prompt and one for the output, mostly the same one, the pair
with the least cost is taken. Waiting for the first token counts more the shorter it is against
the whole, so that both grow little in proportion. A hand-over costs what hand-overs cost; on
top, splitting must be better by a margin that shrinks as step times become known, so that
requests do not flap between equal choices. Where objectives are given, pairs that are expected
to keep them come before those that are not.

The paper always splits; its loss on heavy prompts with light outputs (HPLD) comes from that.
Mooncake prefills short prompts inline, Splitwise mixes in a pool when it must.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from vllm_tetri.policy.cluster import InstanceRow, Need
from vllm_tetri.policy.ledger import ClusterState, Ranked
from vllm_tetri.types import InstanceId, Role

# Weight of the relative growth of the time to the first token, if that of the whole time has 1.
# Simulated between 0.3 and 1.2; less makes first tokens late, more makes outputs slow.
_FIRST_TOKEN_PART = 0.8
_MAX_WEIGHT = 50.0
_MIN_S = 1e-6
# Part of the cost by which splitting must be better: with guessed step times, and known ones.
_MARGIN_GUESSED, _MARGIN_KNOWN = 0.25, 0.05
# With more instances than this, only these are priced: the best for a usual request, so many for a
# prompt and for an output, and those that hold a part of the prompt's KV.
_ALL = 8
_BEST_PREFILL, _BEST_WHOLE = 1, 2
# Weight of a second beyond its objective.
_LATE_WEIGHT = 20.0


@dataclass(frozen=True, slots=True)
class Objective:
    """Latencies that clients were promised, in seconds; infinite where nothing was."""

    ttft_s: float = inf  # time to the first token
    tpot_s: float = inf  # mean time per token after it


NO_OBJECTIVE = Objective()


class PricedRoute(NamedTuple):
    """Where a request goes, and why."""

    prefill: InstanceId  # computes its prompt
    decode: InstanceId  # writes its output, as far as is known now
    ttft_s: float  # expected, as is `tpot_s`
    tpot_s: float
    cost_s: float  # waiting for it, all together
    reason: str  # for the decision log; never parsed
    waits: bool = True  # whether its first token waits for other requests
    shares: bool = True  # whether its output shares steps with other requests
    confidence: float = 1.0  # how well the steps of both instances are known
    others_tpot_s: float = 0.0  # of outputs that pause for its prompt; 0 without an objective

    @property
    def is_split(self) -> bool:
        return self.prefill != self.decode


def ttft_s(row: InstanceRow, prompt_tokens: float, cached_tokens: float = 0.0) -> float:
    """Return the time to the first token of a prompt that arrives now, of which the instance has
    the KV of `cached_tokens`."""
    new_tokens = prompt_tokens - cached_tokens
    work_s = row.queued_s() + new_tokens * row.token_s(prompt_tokens, cached_tokens)
    return row.computing_s(row.queued_tokens + new_tokens, work_s)


def prefill_harm_s(row: InstanceRow, prompt_tokens: float, cached_tokens: float = 0.0) -> float:
    """Return how long the decodes on its device wait for a prompt, all together."""
    if not (row.decodes or row.others):
        return 0.0
    new_tokens = prompt_tokens - cached_tokens
    steps = new_tokens / row.chunk_tokens
    present = min(1.0, row.left_tokens / (steps if steps > 1 else 1.0)) if row.decodes else 1.0
    waiting = row.decodes * present + row.others
    return waiting * new_tokens * row.token_s(prompt_tokens, cached_tokens)


def paused_tpot_s(row: InstanceRow, prompt_tokens: float, cached_tokens: float = 0.0) -> float:
    """Return the time per token of the outputs that are decoded there, if they pause for a prompt;
    0 if there are none. On average half of an output is written."""
    if not row.decodes:
        return 0.0
    pause_s = (prompt_tokens - cached_tokens) * row.token_s(prompt_tokens, cached_tokens)
    return paced_s(row, row.step_s) + pause_s / max(1.0, 2 * row.left_tokens)


def tpot_s(row: InstanceRow, context_tokens: float) -> float:
    """Return the time per token of one more output of that context, prompts counted in."""
    cost = row.cost
    return paced_s(row, row.step_s + cost.request_s + context_tokens * cost.token_s)


def paced_s(row: InstanceRow, step_s: float) -> float:
    """Return the time from one token of an output to the next where a step of decodes alone takes
    `step_s`: prompts and other instances on its device take their shares."""
    return step_s * (1 + row.busy_others) / (1 - row.prompt_share)


def decode_harm_s(row: InstanceRow, need: Need) -> float:
    """Return how long the decodes on its device wait for one more output."""
    decodes, others, tokens = row.decodes, row.others, need.output_tokens
    if not (decodes or others):
        return 0.0
    own_s = row.cost.request_s + (need.prompt_tokens + tokens / 2) * row.cost.token_s
    harm_s = min(decodes * tokens, row.remaining_tokens) * own_s if decodes else 0.0
    if others:
        own_s += 0.0 if decodes else row.cost.base_s
        harm_s += others * tokens * own_s
    return harm_s / (1 - row.prompt_share)


def hand_over_s(
    row: InstanceRow, prompt_tokens: float, cached_tokens: float = 0.0, cached_there: float = 0.0
) -> float:
    """Return the time until a prompt that is done goes on somewhere else: a request, and the KV
    that does not travel while another chunk is computed. That is the last chunk, and what is
    cached here but not there."""
    load, new_tokens = row.view.load, prompt_tokens - cached_tokens
    moved_tokens = max(1.0, prompt_tokens - cached_there)
    late_tokens = min(new_tokens, row.chunk_tokens) + max(0.0, moved_tokens - new_tokens)
    return load.handover_s + min(moved_tokens, late_tokens) * load.handover_token_s


class PriceCandidates:
    """The instances worth pricing for requests of one model, ordered once per view by what a
    `usual` request costs there. `weight` is that of a second before its first token.

    With `spares_prefill` outputs go to prefill instances only if there is no other: that these are
    free of decodes is what makes them quick. `spares_decode` does so with prompts and decode
    instances."""

    def __init__(
        self,
        state: ClusterState,
        rows: Sequence[InstanceRow],
        usual: Need,
        *,
        spares_prefill: bool = True,
        spares_decode: bool = False,
    ) -> None:
        first_s = partial(ttft_s, prompt_tokens=usual.prompt_tokens)
        self.prefill = _kinds(state, rows, first_s, Role.DECODE if spares_decode else None)
        best = self.prefill[-1].least(1)
        self.weight = 1.0
        if best:
            output_s = _decode_cost(best[0], usual)[0] * usual.output_tokens
            self.weight = _weight(first_s(best[0]), output_s)
        whole_s = partial(_whole_s, usual, self.weight)
        self.whole = _kinds(state, rows, whole_s, Role.PREFILL if spares_prefill else None)


# Functions inside a compiled one keep each other, and all rows, until Python looks for cycles.
def _kinds(
    state: ClusterState,
    rows: Sequence[InstanceRow],
    cost: Callable[[InstanceRow], float],
    spared: Role | None,
) -> list[Ranked]:
    able = [row for row in rows if row.role is not spared or row.alone]
    sets = [able, rows] if len(able) < len(rows) else [rows]
    return [Ranked(state, each, cost) for each in sets]


def _whole_s(usual: Need, weight: float, row: InstanceRow) -> float:
    return weight * ttft_s(row, usual.prompt_tokens) + _decode_cost(row, usual)[1]


def _some_of(
    kinds: list[Ranked], count: int, taken: Collection[InstanceId], holders: Collection[InstanceId]
) -> list[InstanceRow]:
    """Return of the first of `kinds` that has any: all if they are few, else the best and those
    that hold a part of the prompt's KV."""
    for kind in kinds:
        if len(kind.by_id) <= _ALL:
            found = kind.named(kind.by_id, taken)
        else:
            found = kind.least(count, taken)
            found += [row for row in kind.named(holders, taken) if row not in found]
        if found:
            return found
    return []


def price_route(
    candidates: PriceCandidates,
    need: Need,
    *,
    may_split: bool,
    prefers_split: bool = False,
    objective: Objective = NO_OBJECTIVE,
    taken: Collection[InstanceId] = (),
    cached: Mapping[InstanceId, int] = MappingProxyType({}),
    reach: Callable[[InstanceRow], float] | None = None,
) -> PricedRoute | None:
    """Choose where a request goes; None if no instance but the `taken` ones can have it. Takes
    microseconds, however many instances there are. If it may be split, `prefers_split` does so
    wherever two can, whatever it costs. `cached` tokens of the prompt lie in an instance's prefix
    cache: they are not sent there. It need not compute these, or as many as `reach` tells
    (`policy.fetch.Prefix`)."""
    wholes = _some_of(candidates.whole, _BEST_WHOLE, taken, cached)
    if not wholes:
        return None
    prefills = _some_of(candidates.prefill, _BEST_PREFILL, taken, cached)
    tokens = need.prompt_tokens
    firsts = _firsts(prefills + wholes, tokens, cached, reach)
    outputs = {row: _decode_cost(row, need, objective) for row in wholes}
    # A second before the first token weighs more than one of the output: both waits count in
    # proportion to what they would be at best. A long prompt's weighs as a usual one's.
    (least_s, _), (each_s, _, _) = min(firsts.values()), min(outputs.values())
    weight = max(candidates.weight, _weight(least_s, each_s * need.output_tokens))
    costs = {
        row: weight * first_s
        + prefill_harm_s(row, tokens, found)
        + _late_cost(row, tokens, first_s, found, objective)
        for row, (first_s, found) in firsts.items()
    }
    cost_s, one = inf, wholes[0]
    for row, (_, output_s, room_s) in outputs.items():
        # On one instance the first token waits for room, too; on two it does not.
        whole_s = costs[row] + output_s + weight * room_s
        if whole_s < cost_s:
            cost_s, one = whole_s, row
    prefill = decode = one
    against = f"of {len(firsts)}"
    if may_split:
        most_s = inf if prefers_split else cost_s * (1 - margin(one))
        if pair := _best_pair(prefills, costs, outputs, need, firsts, cached, most_s):
            against = f"aggregated on {one.id} {cost_s:.3g}"
            prefill, decode, cost_s = pair
    (first_s, found), (each_s, _, room_s) = firsts[prefill], outputs[decode]
    first_s += room_s * (prefill is decode)
    reason = (
        f"{'aggregated' if prefill is decode else 'split'}: costs {cost_s:.3g} s, {against}; "
        f"first token in {first_s:.3g} s, then {each_s * 1e3:.3g} ms each; "
        f"{found:.0f} tokens of {tokens} cached"
    )
    return PricedRoute(
        prefill.id, decode.id, first_s, each_s, cost_s, reason,
        prefill.queued_tokens > 0 or prefill.decodes > 0,
        decode.decodes > 0 or decode.prompt_share > 0,
        min(prefill.cost.confidence, decode.cost.confidence),
        paused_tpot_s(prefill, tokens, found) if objective.tpot_s < inf else 0.0,
    )  # fmt: skip


def _firsts(
    rows: Iterable[InstanceRow],
    prompt_tokens: int,
    cached: Mapping[InstanceId, int],
    reach: Callable[[InstanceRow], float] | None,
) -> dict[InstanceRow, tuple[float, float]]:
    """Return the time to the first token, and of how many tokens of the prompt nothing is computed
    for it."""
    firsts: dict[InstanceRow, tuple[float, float]] = {}
    for row in rows:
        if row not in firsts:
            found = cached.get(row.id, 0) if reach is None else reach(row)
            found = found if found < prompt_tokens else prompt_tokens - 1
            firsts[row] = ttft_s(row, prompt_tokens, found), found
    return firsts


def _late_cost(
    row: InstanceRow, tokens: int, first_s: float, found: float, objective: Objective
) -> float:
    """Return what a first token after its objective costs, and a pace beyond it of the outputs that
    pause for the prompt."""
    cost_s = _LATE_WEIGHT * (first_s - objective.ttft_s) if first_s > objective.ttft_s else 0.0
    if objective.tpot_s < inf:
        late_s = max(0.0, paused_tpot_s(row, tokens, found) - objective.tpot_s)
        cost_s += _LATE_WEIGHT * late_s * 2 * row.remaining_tokens
    return cost_s


def _weight(first_s: float, output_s: float) -> float:
    """Return what a second before the first token counts, if the best waits are these."""
    first_s = max(_MIN_S, first_s)
    return 1 + min(_MAX_WEIGHT, _FIRST_TOKEN_PART * (first_s + output_s) / first_s)


def price_decode(
    rows: Iterable[InstanceRow],
    need: Need,
    *,
    at: InstanceRow | None,
    cached: Mapping[InstanceId, int] = MappingProxyType({}),
) -> tuple[InstanceId, str] | None:
    """Choose among `rows` with capacity where the output is written, now that part of the prompt
    is computed and its length is predicted. It may stay `at` the instance that has the prompt; of
    the KV that travels else, `cached` tokens are there already. Returns the instance and the
    reason; None if there is none."""

    def cost_s(row: InstanceRow) -> float:
        from_row = at or row
        here, there = cached.get(from_row.id, 0), cached.get(row.id, 0)
        moved_s = hand_over_s(from_row, need.prompt_tokens, here, there)
        return _decode_cost(row, need)[1] + moved_s

    costs = ((cost_s(row), row) for row in rows if at is None or row.id != at.id)
    best_s, best = min(costs, key=itemgetter(0), default=(inf, None))
    if at is not None:
        stay_s = _decode_cost(at, need)[1]
        moved_s = best_s - at.view.load.handover_s  # there is a decode request anyway
        if best is None or moved_s >= stay_s * (1 - margin(at)):
            return at.id, f"stays: {stay_s:.3g} s, elsewhere {moved_s:.3g}"
        return best.id, f"goes: {moved_s:.3g} s, here {stay_s:.3g}"
    return None if best is None else (best.id, f"costs {best_s:.3g} s")


def _best_pair(
    prefills: list[InstanceRow],
    costs: dict[InstanceRow, float],
    outputs: dict[InstanceRow, tuple[float, float, float]],
    need: Need,
    firsts: Mapping[InstanceRow, tuple[float, float]],
    there: Mapping[InstanceId, int],
    most_s: float,
) -> tuple[InstanceRow, InstanceRow, float] | None:
    """Find two instances between which KV may travel, and their cost together; None if it is
    `most_s` or more for all of them."""
    best, tokens = None, need.prompt_tokens
    for row in prefills:
        if costs[row] >= most_s:
            continue
        first_s, here = costs[row] + _capacity_s(row, tokens), firsts[row][1]
        for other, (_, output_s, _) in outputs.items():
            pair_s = first_s + output_s
            if pair_s < most_s and other is not row and other.key == row.key:
                pair_s += hand_over_s(row, tokens, here, there.get(other.id, 0))
                if pair_s < most_s:
                    best, most_s = (row, other, pair_s), pair_s
    return best


def _decode_cost(
    row: InstanceRow, need: Need, objective: Objective = NO_OBJECTIVE
) -> tuple[float, float, float]:
    """Return an output's time per token, its cost, and how much of that is waiting for room."""
    tokens = need.output_tokens if need.output_tokens > 1 else 1.0
    each_s = tpot_s(row, need.prompt_tokens + tokens / 2)
    cost_s = tokens * each_s + decode_harm_s(row, need)
    if each_s > objective.tpot_s:
        cost_s += tokens * _LATE_WEIGHT * (each_s - objective.tpot_s)
    room_s = _capacity_s(row, need.prompt_tokens + tokens, each_s)
    return each_s, cost_s + room_s, room_s


def _capacity_s(row: InstanceRow, tokens: float, each_s: float | None = None) -> float:
    """Return the time until requests have ended whose KV is in the way of that many tokens, if
    theirs take `each_s` each. All that is in use is free after twice the mean output that is left,
    if outputs end evenly."""
    missing_tokens = tokens - row.free_tokens
    if missing_tokens <= 0:
        return 0.0
    used_tokens = max(1.0, row.block_size * row.view.load.blocks_total - row.free_tokens)
    ends = 2 * row.left_tokens * missing_tokens / used_tokens
    each_s = tpot_s(row, tokens) if each_s is None else each_s
    return max(min(row.left_tokens, missing_tokens), ends) * each_s


def margin(row: InstanceRow) -> float:
    """Return the part by which something must be cheaper there to be preferred."""
    return _MARGIN_KNOWN + (1 - row.cost.confidence) * (_MARGIN_GUESSED - _MARGIN_KNOWN)
