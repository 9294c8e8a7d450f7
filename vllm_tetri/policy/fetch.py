"""Fetch the KV of a prefix from an instance that holds it, or compute it: by what both cost. Pure.

The holder gets a request that computes one block behind all others of its prompts, so what counts
there are the step that runs and its own one, not the queue; then the KV travels, at what hand-overs
of that instance cost. Mooncake fetches or recomputes by a threshold; here it is a price, so that a
prefix is copied to where a queue is shorter, and hot prefixes lie at several instances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from vllm_tetri.policy.adaptive import margin, ttft_s
from vllm_tetri.policy.cluster import InstanceRow
from vllm_tetri.types import InstanceId

_MAX_HOLDERS = 4  # that are priced
# A fetch is waited for so many times as long as expected, and at least a while; then the prompt is
# computed.
_PATIENCE, _LEAST_WAIT_S = 4.0, 1.0


class FetchPlan(NamedTuple):
    """A prefix of `tokens` that an instance fetches from `holder`, there after `seconds`."""

    holder: InstanceId
    tokens: int
    seconds: float
    worth_tokens: float  # tokens that could be computed in the time that it saves

    @property
    def wait_s(self) -> float:
        """How long the instance shall wait for it."""
        return max(_LEAST_WAIT_S, _PATIENCE * self.seconds)


_Offer = tuple[int, float, float, InstanceRow]


class Prefix:
    """The prompt of one request, of which instances hold tokens in their prefix caches (`cached`):
    what an instance need not compute of it. `holders` are those it may be fetched from, with a row
    each."""

    def __init__(
        self,
        prompt_tokens: int,
        cached: Mapping[InstanceId, int] = MappingProxyType({}),
        holders: Sequence[InstanceRow] = (),
    ) -> None:
        self.cached, self._prompt_tokens = cached, prompt_tokens
        self._plans: dict[InstanceId, FetchPlan | None] = {}
        self._offers: list[_Offer] | None = None
        self._holders = [row for row in holders if row.kv_endpoint and not row.alone]
        self._most_tokens = max(map(self._held, self._holders), default=0)

    def _held(self, row: InstanceRow) -> int:
        """Return how many tokens it holds, the last one aside, which is always computed."""
        held, most = self.cached.get(row.id, 0), self._prompt_tokens - 1
        return held if held < most else most

    def reach(self, row: InstanceRow) -> float:
        """Return how many tokens an instance need not compute: those that it holds, and what a
        fetch is worth to it, which is always less than all that it fetches."""
        here = self.cached.get(row.id, 0)
        plan = self.plan(row) if here < self._most_tokens else None
        return here if plan is None else here + plan.worth_tokens

    def plan(self, row: InstanceRow) -> FetchPlan | None:
        """Return what an instance fetches before it computes the prompt; None if computing all
        that it lacks is not surely dearer."""
        if row.id not in self._plans:
            here = self._held(row)
            is_able = here < self._most_tokens and row.kv_endpoint and not row.alone
            self._plans[row.id] = self._best_plan(row, here) if is_able else None
        return self._plans[row.id]

    def _best_offers(self) -> list[_Offer]:
        """Return what may be fetched: minus the tokens, the time for none and for each of them, and
        from where. One that is slower to fetch than as many or more tokens of its kind is none."""
        if self._offers is not None:
            return self._offers
        found: list[_Offer] = []
        offers = [
            (-self._held(row), fetch_s(row, 0), row.view.load.handover_token_s, row)
            for row in self._holders
        ]
        for offer in sorted(offers, key=itemgetter(0, 1))[:_MAX_HOLDERS]:
            _, none_s, each_s, row = offer
            for _, other_s, other_each_s, other in found:
                if other_s <= none_s and other_each_s <= each_s and other.key == row.key:
                    break
            else:
                found.append(offer)
        self._offers = found
        return found

    def _best_plan(self, row: InstanceRow, here: int) -> FetchPlan | None:
        best: FetchPlan | None = None
        prompt_tokens, compute_s = self._prompt_tokens, 0.0
        for minus_there, none_s, each_s, holder in self._best_offers():
            there = -minus_there
            num_tokens = there - here
            if num_tokens <= 0 or holder.key != row.key:
                continue
            compute_s = compute_s or ttft_s(row, prompt_tokens, here)
            seconds = none_s + num_tokens * each_s
            saved_s = compute_s - ttft_s(row, prompt_tokens, there)
            gain_s = saved_s * (1 - margin(row)) - seconds
            if gain_s <= 0:
                continue
            worth_tokens = gain_s / max(row.token_s(prompt_tokens, here), saved_s / num_tokens)
            if best is None or worth_tokens > best.worth_tokens:
                best = FetchPlan(holder.id, there, seconds, worth_tokens)
        return best


def fetch_s(holder: InstanceRow, num_tokens: float) -> float:
    """Return the time until KV of so many tokens is somewhere else that an instance holds."""
    load, cost = holder.view.load, holder.cost
    step_s = holder.step_s + min(holder.queued_tokens, holder.chunk_tokens) * cost.prompt_s
    is_busy = holder.decodes or holder.queued_tokens
    steps_s = step_s * (1.5 if is_busy else 1.0) + holder.block_size * cost.prompt_s
    moved_s = load.handover_s + num_tokens * load.handover_token_s
    return steps_s * (1 + holder.busy_others) + moved_s
