"""Pick where a request goes first: the global scheduler's decision (paper section 3.2).

Also the phases of a request in a router; they change only by `advance`, along `TRANSITIONS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from vllm_tetri.policy.cluster import InstanceRow
from vllm_tetri.policy.ledger import ClusterState, Ranked
from vllm_tetri.types import ClusterView, InstanceId, InstanceInfo, InstanceState, Role

_LAST_RESORT = {Role.BOTH: 0, Role.DECODE: 1, Role.PREFILL: 2}


class Route(NamedTuple):
    """One instance for all, or `prefill` computes the prompt and names the decode instance itself:
    one of that role, or with `anywhere` any, itself included."""

    prefill: InstanceId
    decode: InstanceId  # expected; empty if that is not known
    reason: str
    anywhere: bool = False
    ttft_s: float = 0.0  # expected; 0: not priced

    @property
    def is_split(self) -> bool:
        return self.prefill != self.decode


class AllAtLimit(NamedTuple):
    """All `instances` that the request could go to are at their limits; `who` they are."""

    instances: tuple[InstanceId, ...]
    who: str


class RouteCandidates:
    """The instances that requests for one model can go to first, ordered once per view. A `state`
    adds what was sent to them since."""

    def __init__(self, state: ClusterState, rows: Sequence[InstanceRow]) -> None:
        self._state, self._rows = state, rows
        self.decodes = [row for row in rows if row.role is not Role.PREFILL]
        takers = Counter(row.key for row in self.decodes)
        able = (
            row
            for row in rows
            if row.role is not Role.DECODE and takers[row.key] > (row.role is Role.BOTH)
        )
        self.prefills = Ranked(state, able, lambda row: (row.queued_tokens, row.role is Role.BOTH))
        last = min((_LAST_RESORT[row.role] for row in rows), default=0)
        able = (row for row in rows if _LAST_RESORT[row.role] == last or row.alone)
        self.wholes = Ranked(state, able, lambda row: (row.queued_tokens, row.num_requests))

    def without(self, excluded: Collection[InstanceId]) -> RouteCandidates:
        """Return the candidates without some instances, which may change what others are for."""
        if not excluded:
            return self
        return RouteCandidates(self._state, [row for row in self._rows if row.id not in excluded])


def choose_route(
    candidates: RouteCandidates,
    *,
    may_split: bool,
    excluded: Collection[InstanceId] = (),
    refused: Collection[InstanceId] = (),
    at_limit: Collection[InstanceId] = (),
    cached: Mapping[InstanceId, int] = MappingProxyType({}),
    reach: Callable[[InstanceRow], float] | None = None,
) -> Route | AllAtLimit | None:
    """Choose the prefill instance with the fewest tokens to compute, those of the prompt that it
    has not `cached` included, if two instances may share the request, else one instance; None when
    there is none. Overload never sends a request to instances of another kind,
    where it would disturb what they do; those that exchange KV with none serve all that is not
    split. Of the `candidates`, `excluded` ones already failed this request, `refused` ones just had
    no capacity for it, and those `at_limit` have as many requests in flight as they may. `reach`
    tells how many tokens of the prompt one need not compute, fetched ones included, always fewer
    than the holder has; only the one with the shortest queue is asked, and where that matters."""
    candidates = candidates.without(excluded)
    splits = may_split and bool(candidates.prefills.by_id)
    kind = candidates.prefills if splits else candidates.wholes
    if not kind.by_id:
        return None
    taken = {*refused, *at_limit} if refused else at_limit
    able = kind.least(1, taken)
    if not able:
        who = "prefill instances" if splits else "instances that could serve it alone"
        return AllAtLimit(tuple(kind.by_id), who)
    best = able[0]
    if cached:
        queued_tokens, most = best.queued_tokens, max(cached.values())
        least_tokens = float(queued_tokens - cached.get(best.id, 0))
        for row in kind.named(cached, taken):
            left_tokens = float(row.queued_tokens - cached[row.id])
            if reach and queued_tokens - most < left_tokens < least_tokens:
                least_tokens = min(least_tokens, queued_tokens - reach(able[0]))
            if left_tokens < least_tokens:
                best, least_tokens = row, left_tokens
    words = f"{best.queued_tokens} tokens queued"
    words += f", {cached[best.id]} cached" if cached.get(best.id) else ""
    if not splits:
        why = "no pair to split over" if may_split else "not split"
        why = f"{why}, since {best.alone}" if best.alone else why
        return Route(best.id, best.id, f"{why}: {best.role} with {words}")
    if at_limit and all(row.id in at_limit for row in candidates.decodes):
        return AllAtLimit(tuple(row.id for row in candidates.decodes), "decode instances")
    return Route(best.id, InstanceId(""), f"least of {len(kind.by_id)}: {words}")


def choose_keeper(
    view: ClusterView,
    model: str,
    *,
    excluded: Collection[InstanceId] = (),
    at_limit: Collection[InstanceId] = (),
) -> Route | AllAtLimit | None:
    """Choose the instance that keeps what clients may ask for again (vLLM's stored responses);
    None when no ready instance serves the model. Every router chooses the same one while it is
    ready, without anything to remember."""
    keepers = [
        (_LAST_RESORT[each.info.role], each.info.id)
        for each in view.instances
        if each.state in (InstanceState.READY, InstanceState.FLIPPING)
        and model in each.info.names
        and each.info.id not in excluded
    ]
    if not keepers:
        return None
    _, keeper = min(keepers)
    if keeper in at_limit:
        return AllAtLimit((keeper,), "instances that may store the output")
    return Route(keeper, keeper, "stores outputs")


def apart(infos: Iterable[InstanceInfo]) -> dict[InstanceId, str]:
    """Say of every instance that differs from most of those that serve the same model why the two
    exchange no KV, and of one that exchanges none at all why. Instances that share no model name
    are not compared."""
    found: dict[InstanceId, str] = {}
    groups: dict[str, dict[frozenset[tuple[str, str]], list[InstanceInfo]]] = {}
    for each in sorted(infos, key=lambda info: info.id):
        if each.alone:
            found[each.id] = f"{each.id} exchanges no KV, since {each.alone}"
            continue
        for name in each.models:
            kinds = groups.setdefault(name, {})
            kinds.setdefault(frozenset(each.identity.items()), []).append(each)
    for kinds in groups.values():
        usual = max(kinds.values(), key=len)
        others = (each for kind in kinds.values() if kind is not usual for each in kind)
        found |= {each.id: _difference(usual[0], each) for each in others}
    return found


def _difference(one: InstanceInfo, other: InstanceInfo) -> str:
    pairs = {
        key: (one.identity.get(key, "none"), other.identity.get(key, "none"))
        for key in sorted({*one.identity, *other.identity})
    }
    if "weights" in pairs:  # digests alone tell an operator nothing
        weights = zip(pairs["weights"], (one.checkpoint, other.checkpoint), strict=True)
        first, second = (f"{digest} ({source})" for digest, source in weights)
        pairs["weights"] = first, second
    words = [f"{key} {_left(a, b)} and {_left(b, a)}" for key, (a, b) in pairs.items() if a != b]
    return f"{one.id} and {other.id} exchange no KV, since they differ in {'; '.join(words)}"


def _left(value: str, other: str) -> str:
    """Return the parts of a list that the other one lacks, else the value itself."""
    parts = set(other.split("; "))
    return "; ".join(part for part in value.split("; ") if part not in parts) or value


class Phase(StrEnum):
    """Where a request is, as the router sees it."""

    __hash__ = str.__hash__  # that of an Enum is Python
    ARRIVED = "arrived"
    PREFILLING = "prefilling"
    HANDING_OVER = "handing_over"  # the prompt is computed, decode has not responded yet
    DECODING = "decoding"
    SERVING = "serving"  # one instance does both
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Event(StrEnum):
    """What can happen to a request."""

    __hash__ = str.__hash__
    PREFILL_SENT = "prefill_sent"
    PREFILLED = "prefilled"
    WHOLE_SENT = "whole_sent"  # to one instance, at first or as the way out
    ANSWERING = "answering"  # the first byte of the response came
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


ENDED = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})

TRANSITIONS = {
    (Phase.ARRIVED, Event.PREFILL_SENT): Phase.PREFILLING,
    (Phase.ARRIVED, Event.WHOLE_SENT): Phase.SERVING,
    (Phase.PREFILLING, Event.PREFILL_SENT): Phase.PREFILLING,
    (Phase.PREFILLING, Event.PREFILLED): Phase.HANDING_OVER,
    (Phase.PREFILLING, Event.WHOLE_SENT): Phase.SERVING,
    (Phase.PREFILLING, Event.ANSWERING): Phase.SERVING,  # the first token was the last
    (Phase.HANDING_OVER, Event.ANSWERING): Phase.DECODING,
    (Phase.HANDING_OVER, Event.WHOLE_SENT): Phase.SERVING,
    (Phase.SERVING, Event.WHOLE_SENT): Phase.SERVING,
    (Phase.DECODING, Event.WHOLE_SENT): Phase.SERVING,  # goes on elsewhere, mid-stream
    (Phase.SERVING, Event.ANSWERING): Phase.SERVING,
    (Phase.DECODING, Event.FINISH): Phase.FINISHED,
    (Phase.SERVING, Event.FINISH): Phase.FINISHED,
    **{(phase, Event.FAIL): Phase.FAILED for phase in Phase if phase not in ENDED},
    **{(phase, Event.CANCEL): Phase.CANCELLED for phase in Phase if phase not in ENDED},
}


def advance(phase: Phase, event: Event) -> Phase:
    """Return the phase after an event; ValueError if that cannot happen in this phase."""
    try:
        return TRANSITIONS[phase, event]
    except KeyError:
        raise ValueError(f"event {event} cannot happen to a request in phase {phase}") from None
