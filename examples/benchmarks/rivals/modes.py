"""How requests find instances in Splitwise and Mooncake, without prefix caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective, PricedRoute, tpot_s, ttft_s
from vllm_tetri.policy.cluster import ClusterTable, InstanceRow, Need
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.ledger import ClusterState
from vllm_tetri.policy.lengths import Lengths
from vllm_tetri.policy.overload import Late, expected_late
from vllm_tetri.policy.route import Route
from vllm_tetri.sim.config import MODEL, ClusterConfig
from vllm_tetri.sim.modes import SimMode
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import InstanceId, Role

# Queues of more full batches of prompts than these are too long. The paper names no number.
_MOST_BATCHES = 2
_GRACE_S = 0.1
_RETRY_S = 1  # simulated clients do not retry


class PairedMode(SimMode):
    """Base of modes that choose both instances when a request arrives."""

    def __init__(self, config: ClusterConfig) -> None:
        self._state = ClusterState(_GRACE_S)
        self._lengths = Lengths()  # as before any output
        self._decodes: dict[int, InstanceId] = {}  # of split requests

    def look(self, table: ClusterTable, spec: RequestSpec) -> Need:
        """Read a new table. Returns the expected size of a request."""
        self._state.observe(table)
        tokens, _ = self._lengths.outlook(spec.predicted, 0)
        if spec.predicted is None:
            tokens = table.usual(MODEL).output_tokens or tokens
        return Need(spec.prompt_tokens, tokens)

    @property
    def rows(self) -> list[InstanceRow]:
        """All instances, as of the newest table and of what was sent since."""
        return [self._state.row(row) for row in self._state.table.by_model[MODEL]]

    def send(
        self, prefill: InstanceRow, decode: InstanceRow, priced: Need, spec: RequestSpec, now: float
    ) -> Route:
        """Record the choice and return it as a route."""
        after_s = 0.0 if prefill is decode else ttft_s(prefill, spec.prompt_tokens)
        self._state.record_sent(prefill.id, decode.id, priced, now, decode_after_s=after_s)
        if prefill is decode:
            return Route(prefill.id, prefill.id, "one for both")
        self._decodes[spec.id] = decode.id
        return Route(prefill.id, decode.id, "chosen with its decode instance")

    def dispatch(
        self, request: SimRequest, table: ClusterTable, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        return Dispatch(self._decodes[request.spec.id], "", "chosen at its arrival")

    def ended(self, spec: RequestSpec, now: float) -> None:
        self._decodes.pop(spec.id, None)


class SplitwiseMode(PairedMode):
    """Splitwise: a pool of machines for prompts, one for tokens, and a mixed one.

    Each request gets the machine of either pool with the shortest queue. If either queue is too
    long, a machine of the mixed pool serves the request alone, or one of the other pool moves
    there for it, and back when it has no such request left. So KV is only sent from the prompt
    pool to the token pool.

    Attributes:
        mixed: Machines of the mixed pool, and how many requests each serves alone.
    """

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self.mixed: Counter[InstanceId] = Counter()
        self._guests: dict[int, InstanceId] = {}

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route:
        priced = self.look(table, spec)
        prefill = min(self._pool(Role.PREFILL), key=_prompt_queue)
        decode = min(self._pool(Role.DECODE), key=_decode_queue)
        mixed = None
        if not _is_short(prefill):
            mixed = self._mixed(Role.DECODE, _prompt_queue, _is_short)
        elif decode.free_tokens < spec.prompt_tokens:
            mixed = self._mixed(
                Role.PREFILL, _decode_queue, lambda row: row.free_tokens >= spec.prompt_tokens
            )
        if mixed is None:
            return self.send(prefill, decode, priced, spec, now)
        self.mixed[mixed.id] += 1
        self._guests[spec.id] = mixed.id
        return self.send(mixed, mixed, priced, spec, now)

    def ended(self, spec: RequestSpec, now: float) -> None:
        super().ended(spec, now)
        machine = self._guests.pop(spec.id, None)
        if machine is not None:
            self.mixed[machine] -= 1
            self.mixed = +self.mixed

    def _pool(self, role: Role) -> list[InstanceRow]:
        """Machines of a role that are not mixed now, or if all are, those."""
        own = [row for row in self.rows if row.role in (role, Role.BOTH)] or self.rows
        return [row for row in own if row.id not in self.mixed] or own

    def _mixed(
        self,
        other: Role,
        key: Callable[[InstanceRow], tuple[float, float]],
        is_able: Callable[[InstanceRow], bool],
    ) -> InstanceRow | None:
        """The best mixed machine that is able, else one of the other role that moves there."""
        mixed = [row for row in self.rows if row.id in self.mixed and is_able(row)]
        if mixed:
            return min(mixed, key=key)
        pure = [row for row in self._pool(other) if row.role is other and is_able(row)]
        return min(pure, key=key, default=None)


def _prompt_queue(row: InstanceRow) -> tuple[float, float]:
    return row.queued_tokens, row.decodes


def _decode_queue(row: InstanceRow) -> tuple[float, float]:
    return row.decodes, row.queued_tokens


def _is_short(row: InstanceRow) -> bool:
    return row.queued_tokens <= _MOST_BATCHES * row.chunk_tokens


class MooncakeMode(PairedMode):
    """Mooncake's Conductor: refuse requests that would be late, and compute short prompts where
    they are decoded.

    The prompt goes where its first token is expected first, the rest where a token takes least.
    A prompt stays with its decode instance if it fits into one chunk there and the step keeps the
    TPOT SLO. A request that is expected to be late, or finds no room on any decode instance, is
    refused before anything is computed for it.
    """

    def __init__(self, config: ClusterConfig, objective: Objective = NO_OBJECTIVE) -> None:
        super().__init__(config)
        self.objective = objective

    def route(self, table: ClusterTable, spec: RequestSpec, now: float) -> Route | Late:
        priced = self.look(table, spec)
        tokens = spec.prompt_tokens
        decodes = [row for row in self.rows if row.role is not Role.PREFILL] or self.rows
        able = [row for row in decodes if self.has_room(row, tokens)]
        if not able:
            return Late("no decode instance has room for its KV", _RETRY_S)
        decode = min(able, key=lambda row: tpot_s(row, tokens))
        prefills = [row for row in self.rows if row.role is not Role.DECODE] or self.rows
        prefill = min(prefills, key=lambda row: self.first_s(row, tokens))
        if self._is_inline(decode, tokens):
            prefill = decode
        first_s = self.first_s(prefill, tokens)
        route = PricedRoute(
            prefill.id,
            decode.id,
            ttft_s=first_s,
            tpot_s=self.pace_s(decode, tokens, now + first_s),
            cost_s=0.0,
            reason="",
            waits=prefill.queued_tokens > 0 or prefill.decodes > 0,
            shares=decode.decodes > 0 or decode.prompt_share > 0,
            confidence=min(prefill.cost.confidence, decode.cost.confidence),
        )
        late = expected_late(route, self.objective, priced.output_tokens)
        return late or self.send(prefill, decode, priced, spec, now)

    def has_room(self, decode: InstanceRow, tokens: int) -> bool:
        """Whether an instance may be chosen to decode a prompt of so many tokens."""
        return tokens <= decode.free_tokens or not decode.decodes

    def first_s(self, prefill: InstanceRow, tokens: int) -> float:
        """Return the time to the first token of a prompt of so many tokens."""
        return ttft_s(prefill, tokens)

    def pace_s(self, decode: InstanceRow, tokens: int, first_s: float) -> float:
        """Return the time per token by which an output is refused whose first one comes then."""
        return tpot_s(decode, tokens)

    def _is_inline(self, row: InstanceRow, tokens: int) -> bool:
        """Whether a prompt disturbs the decodes there little enough to stay with them."""
        step_s = row.cost.base_s + row.decodes * row.request_s + tokens * row.token_s(tokens)
        is_one_chunk = row.queued_tokens + tokens <= row.chunk_tokens
        return is_one_chunk and step_s <= self.objective.tpot_s
