"""The instances of one view, as decisions read them. Pure.

A `ClusterTable` is made once per view and never changes, so all who decide by the same view share
it. `ledger.ClusterState` shows it together with what one of them sent since.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from vllm_tetri.policy.step_cost import context_sum
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceView,
    Role,
    StepCoefficients,
)

_ARRIVES_S = 0.01  # from sending a prompt to the step that begins it, and for its response
_DEFAULT_CHUNK_TOKENS = 512


class Need(NamedTuple):
    """What a request needs."""

    prompt_tokens: int  # to be computed, or handed over
    output_tokens: float  # expected to be written
    num_bytes: int = 0  # size of its KV in a receive arena
    reserved_tokens: float | None = None  # output to reserve for; None for the expected output
    cached_tokens: int = 0  # of the prompt, in the prefix cache where it is computed
    heavy_part: float = 1.0  # the probability of a heavy output (paper section 5.1.1)

    @property
    def work(self) -> tuple[int, float]:
        """The prompt tokens to compute, and their `context_sum`."""
        new_tokens = self.prompt_tokens - self.cached_tokens
        return new_tokens, context_sum(new_tokens, self.prompt_tokens)

    @property
    def total_tokens(self) -> float:
        """Prompt and reserved output."""
        reserved = self.output_tokens if self.reserved_tokens is None else self.reserved_tokens
        return self.prompt_tokens + reserved


class InstanceRow:
    """A ready instance: its last report, and in a `ClusterState` what was sent to it since."""

    __slots__ = (
        "alone", "arena_tokens", "base_blocks", "block_size", "busy_others", "chunk_tokens", "cost",
        "decodes", "device", "free_bytes", "free_tokens", "heavy", "id", "key", "kv_endpoint",
        "left_tokens", "light", "num_requests", "others", "prompt_share", "queued_context",
        "queued_tokens", "remaining_tokens", "reported_s", "request_s", "role", "step_s", "view",
    )  # fmt: skip

    def __init__(
        self, view: InstanceView, cost: StepCoefficients, key: int, share: float, now: float
    ) -> None:
        load, info = view.load, view.info
        self.view = view
        self.id: InstanceId = info.id
        self.role: Role = info.role
        self.device = info.device
        self.kv_endpoint = info.kv_endpoint
        self.block_size = max(1, info.block_size)
        self.arena_tokens = info.arena_tokens
        self.alone = info.alone  # why it exchanges no KV with others; its role means nothing then
        self.key = key  # a small number, equal where KV may travel
        self.cost, self.prompt_share = cost, share  # the share of its time that prompts take
        self.reported_s = now - view.age_s
        self.chunk_tokens = load.next_chunk_tokens or load.chunk_tokens or _DEFAULT_CHUNK_TOKENS
        self.queued_tokens = load.queued_prefill_tokens
        self.queued_context = load.queued_context
        self.heavy, self.light = load.heavy, load.light
        self.decodes = round(load.heavy + load.light)  # requests that decode there, or will
        self.num_requests = load.running + load.waiting  # as reported
        self.remaining_tokens = float(load.remaining_tokens)
        self.base_blocks = load.blocks_total - load.blocks_used - load.reserved_blocks
        self.free_bytes = load.arena_total_bytes - load.arena_used_bytes
        self.others = self.busy_others = 0  # on its device: decodes, and instances with work
        decodes = max(1, self.decodes)
        self.left_tokens = load.remaining_tokens / decodes  # mean output that a decode has left
        self.free_tokens = float(self.block_size * self.base_blocks)  # less what was sent since
        context = load.context_tokens / decodes
        self.request_s = cost.request_s + context * cost.token_s  # a decode of usual context
        self.step_s = cost.base_s + self.decodes * self.request_s  # without prompts

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither held nor reserved."""
        return int(self.free_tokens // self.block_size)

    def has_capacity(self, need: Need) -> bool:
        """Whether it can hold the whole request (the paper's α), as far as is known."""
        num_blocks = -(-need.total_tokens // self.block_size)
        return self.free_blocks >= num_blocks and self.free_bytes >= need.num_bytes

    def computing_s(self, tokens: float, work_s: float) -> float:
        """Return the time to compute so many tokens of prompts, which take `work_s` together,
        decodes and the step's base aside."""
        steps = -(-tokens // self.chunk_tokens)
        if self.decodes:
            steps += 0.5  # what is left of the one that runs
        return (work_s + steps * self.step_s) * (1 + self.busy_others)

    def computed_s(self, now: float, new_tokens: float = 0.0, context: float = 0.0) -> float:
        """Return when its queue, and so many more tokens, should be computed."""
        work_s = self.queued_s() + new_tokens * self.cost.prompt_s + context * self.cost.context_s
        return now + _ARRIVES_S + self.computing_s(self.queued_tokens + new_tokens, work_s)

    def token_s(self, prompt_tokens: float, cached_tokens: float = 0.0) -> float:
        """Return the time per token of a prompt that is not cached, decodes and the step's base
        aside."""
        cost = self.cost
        return cost.prompt_s + (cached_tokens + prompt_tokens) / 2 * cost.context_s

    def queued_s(self) -> float:
        """Return how long its queue takes, decodes and the step's base aside."""
        cost = self.cost
        return self.queued_tokens * cost.prompt_s + self.queued_context * cost.context_s

    def copy(self) -> InstanceRow:
        """Return a row that can be changed."""
        at_s = self.reported_s + self.view.age_s
        row = InstanceRow(self.view, self.cost, self.key, self.prompt_share, at_s)
        row.role, row.others, row.busy_others = self.role, self.others, self.busy_others
        row.heavy, row.light, row.decodes = self.heavy, self.light, self.decodes
        row.queued_tokens, row.queued_context = self.queued_tokens, self.queued_context
        row.step_s = self.step_s
        row.remaining_tokens, row.left_tokens = self.remaining_tokens, self.left_tokens
        row.free_tokens, row.free_bytes = self.free_tokens, self.free_bytes
        return row

    def add_decode(self, need: Need) -> None:
        """Count one more request that will decode there."""
        self.heavy += need.heavy_part
        self.light += 1 - need.heavy_part
        self.decodes += 1
        self.step_s += self.request_s
        self.remaining_tokens += need.output_tokens
        self.left_tokens = self.remaining_tokens / max(1, self.decodes)
        self.free_tokens -= need.total_tokens
        self.free_bytes -= need.num_bytes


class Takers(NamedTuple):
    """Instances that may take KV over, in three orders."""

    by_name: list[InstanceRow]
    by_blocks: list[InstanceRow]  # by free blocks
    by_bytes: list[InstanceRow]  # by free arena


class Usual(NamedTuple):
    """The usual lengths of requests of a model; 0 where they are not known."""

    prompt_tokens: int
    output_tokens: int


class ClusterTable:
    """The ready instances of one view. Never changed, and so shared by all who read the view."""

    def __init__(self, view: ClusterView, at_s: float, rows: Sequence[InstanceRow]) -> None:
        self.view, self.at_s = view, at_s
        self.by_id = {row.id: row for row in rows}
        self.spared = frozenset(row.id for row in rows if row.role is not row.view.info.role)
        self.least_arena_tokens = min((row.arena_tokens for row in rows), default=0)
        self.by_model: dict[str, list[InstanceRow]] = {}
        self.devices: dict[str, list[InstanceRow]] = {}
        self._takers: dict[tuple[int, bool], Takers] = {}
        self._usual: dict[str, Usual] = {}
        self._kinds = {row.key: row.view.info.identity for row in rows}
        for row in rows:
            if row.device:
                self.devices.setdefault(row.device, []).append(row)
            for model in row.view.info.names:
                self.by_model.setdefault(model, []).append(row)
        for together in self.devices.values():
            count_neighbours(together)
        # The size of the largest receive arena of those that take KV over, by model.
        self.most_arena_tokens = {
            model: max(
                (row.arena_tokens for row in each if row.role is not Role.PREFILL), default=inf
            )
            for model, each in self.by_model.items()
        }

    def usual(self, model: str) -> Usual:
        """Return the usual lengths of requests of a model, of any if it is not known: of prompts by
        the context of what is decoded or will be, of outputs a mean over instances that have seen
        some end."""
        found = self._usual.get(model)
        if found is None:
            rows = self.by_model.get(model) or [*self.by_id.values()]
            ended = [row.view.load.usual_tokens for row in rows if row.view.load.usual_tokens]
            output_tokens = round(fmean(ended)) if ended else 0
            decodes = sum([row.decodes for row in rows])
            context_tokens = sum([row.view.load.context_tokens for row in rows])
            prompt_tokens = context_tokens / decodes - output_tokens / 2 if decodes else 0.0
            found = self._usual[model] = Usual(max(0, round(prompt_tokens)), output_tokens)
        return found

    def takers(self, me: InstanceInfo, *, any_role: bool = False) -> Takers:
        """Return the instances that can take KV from one: those that decode, or of `any_role`."""
        key = next((key for key, kind in self._kinds.items() if kind == me.identity), -1)
        found = self._takers.get((key, any_role))
        if found is None:
            kin = [row for row in self.by_id.values() if row.key == key and row.kv_endpoint]
            rows = [row for row in kin if any_role or row.role is not Role.PREFILL]
            orders = map(attrgetter, ("id", "base_blocks", "free_bytes"))
            found = self._takers[key, any_role] = Takers(*(sorted(rows, key=key) for key in orders))
        return found


def count_neighbours(together: Sequence[InstanceRow]) -> None:
    """Set in the rows of one device what the others there do."""
    decodes = sum(row.decodes for row in together)
    busy = {row.id for row in together if row.decodes > 0 or row.queued_tokens > 0}
    for row in together:
        row.others, row.busy_others = decodes - row.decodes, len(busy - {row.id})
