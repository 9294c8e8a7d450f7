"""Fetch the KV of a prefix from an instance that holds it, or compute it: by what both cost. Pure.

The holder gets a request that computes one block behind all others of its prompts, so what counts
there are the step that runs and its own one, not the queue; then the KV travels, at what hand-overs
of that instance cost. Mooncake fetches or recomputes by a threshold; here it is a price, so that a
prefix is copied to where a queue is shorter, and hot prefixes lie at several instances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from vllm_tetri.policy.adaptive import margin, token_s, ttft_s
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
        self.cached = cached
        self._prompt_tokens = prompt_tokens
        most = sorted(holders, key=lambda row: cached.get(row.id, 0), reverse=True)
        self._holders = most[:_MAX_HOLDERS]
        self._plans: dict[InstanceId, FetchPlan | None] = {}

    def reach(self, row: InstanceRow) -> float:
        """Return how many tokens an instance need not compute: those that it holds, and what a
        fetch is worth to it."""
        plan = self.plan(row)
        return self.cached.get(row.id, 0) + (plan.worth_tokens if plan is not None else 0.0)

    def plan(self, row: InstanceRow) -> FetchPlan | None:
        """Return what an instance fetches before it computes the prompt; None if computing all
        that it lacks is not surely dearer."""
        if row.id not in self._plans:
            self._plans[row.id] = self._best_plan(row)
        return self._plans[row.id]

    def _best_plan(self, row: InstanceRow) -> FetchPlan | None:
        if row.alone or not row.kv_endpoint:
            return None
        best: FetchPlan | None = None
        here = min(self.cached.get(row.id, 0), self._prompt_tokens - 1)
        compute_s = ttft_s(row, self._prompt_tokens, here)
        for holder in self._holders:
            there = min(self.cached.get(holder.id, 0), self._prompt_tokens - 1)
            can_send = holder.key == row.key and holder.kv_endpoint and not holder.alone
            if there <= here or holder.id == row.id or not can_send:
                continue
            seconds = fetch_s(holder, there - here)
            saved_s = compute_s - ttft_s(row, self._prompt_tokens, there)
            gain_s = saved_s * (1 - margin(row)) - seconds
            each_s = max(token_s(row, self._prompt_tokens, here), saved_s / (there - here))
            worth_tokens = (saved_s - seconds) / each_s
            if gain_s > 0 and (best is None or worth_tokens > best.worth_tokens):
                best = FetchPlan(holder.id, there, seconds, worth_tokens)
        return best


def fetch_s(holder: InstanceRow, num_tokens: float) -> float:
    """Return the time until KV of so many tokens is somewhere else that an instance holds."""
    load, cost = holder.view.load, holder.cost
    step_s = cost.base_s + holder.decodes * holder.request_s
    step_s += min(holder.queued_tokens, holder.chunk_tokens) * cost.prompt_s
    is_busy = holder.decodes or holder.queued_tokens
    steps_s = step_s * (1.5 if is_busy else 1.0) + holder.block_size * cost.prompt_s
    moved_s = load.handover_s + num_tokens * load.handover_token_s
    return steps_s * (1 + holder.busy_others) + moved_s
