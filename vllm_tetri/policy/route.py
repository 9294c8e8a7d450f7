"""Pick where a request goes first: the global scheduler's decision (paper section 3.2).

Also the phases of a request in a router; they change only by `advance`, along `TRANSITIONS`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from vllm_tetri.types import ClusterView, InstanceId, InstanceState, InstanceView, Role

# A prefill instance counts a prompt only some time after its bytes arrived.
GRACE_S = 0.05
_LAST_RESORT = {Role.BOTH: 0, Role.DECODE: 1, Role.PREFILL: 2}


@dataclass(frozen=True, slots=True)
class Split:
    """`prefill` computes the prompt and names the decode instance itself: one of that role,
    or with `anywhere` any, itself included."""

    prefill: InstanceId
    reason: str
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """`instance` does everything."""

    instance: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class AllAtLimit:
    """All `instances` that the request could go to are at their limits; `who` they are."""

    instances: tuple[InstanceId, ...]
    who: str


Route = Split | Whole


def choose_route(
    view: ClusterView,
    *,
    model: str,
    may_split: bool,
    sent_tokens: Mapping[InstanceId, int],
    excluded: Collection[InstanceId] = (),
    refused: Collection[InstanceId] = (),
    at_limit: Collection[InstanceId] = (),
) -> Route | AllAtLimit | None:
    """Choose the least-loaded prefill instance if two instances may share the request, else one
    instance. Overload never sends a request to instances of another kind, where it would disturb
    what they do.

    Args:
        sent_tokens: Prompt tokens sent to an instance that its report does not show yet.
        excluded: Instances that already failed this request.
        refused: Instances that just had no capacity for it.
        at_limit: Instances that have as many requests in flight as they may.

    Returns:
        None when no ready instance serves the model.
    """
    ready = _able(view, model, excluded, InstanceState.READY)
    if not ready:
        return None
    prefills = _prefills(ready) if may_split else []
    last_resort = min(_LAST_RESORT[each.info.role] for each in ready)
    kind = prefills or [each for each in ready if _LAST_RESORT[each.info.role] == last_resort]
    able = [each for each in kind if each.info.id not in {*refused, *at_limit}]
    if not able:
        return _all_at_limit(
            kind, "prefill instances" if prefills else "instances that could serve it alone"
        )

    def tokens(each: InstanceView) -> int:
        return each.load.queued_prefill_tokens + sent_tokens.get(each.info.id, 0)

    if not prefills:
        best = min(able, key=lambda each: (tokens(each), each.load.running + each.load.waiting))
        why = "no pair to split over" if may_split else "not split"
        return Whole(best.info.id, f"{why}: {best.info.role} with {tokens(best)} tokens queued")
    decodes = [each for each in ready if each.info.role is not Role.PREFILL]
    if all(each.info.id in at_limit for each in decodes):
        return _all_at_limit(decodes, "decode instances")
    best = min(able, key=lambda each: (tokens(each), each.info.role is Role.BOTH))
    return Split(best.info.id, f"least of {len(able)}: {tokens(best)} tokens queued")


def choose_keeper(
    view: ClusterView, *, model: str, excluded: Collection[InstanceId] = ()
) -> InstanceId | None:
    """Choose the instance that keeps what clients may ask for again (vLLM's stored responses);
    None when no ready instance serves the model. Every router chooses the same one while it is
    ready, without anything to remember."""
    able = _able(view, model, excluded, InstanceState.READY, InstanceState.FLIPPING)
    keepers = [(_LAST_RESORT[each.info.role], each.info.id) for each in able]
    return min(keepers)[1] if keepers else None


def _able(
    view: ClusterView, model: str, excluded: Collection[InstanceId], *states: InstanceState
) -> list[InstanceView]:
    """List the instances that serve a model, in one of these states."""
    return [
        each
        for each in view.instances
        if each.state in states and model in each.info.models and each.info.id not in excluded
    ]


def _all_at_limit(instances: list[InstanceView], who: str) -> AllAtLimit:
    return AllAtLimit(tuple(each.info.id for each in instances), who)


def _prefills(ready: list[InstanceView]) -> list[InstanceView]:
    """List the instances that can hand over to another one; a cluster has few identities."""
    takers: list[tuple[dict[str, str], list[InstanceId]]] = []
    for each in ready:
        if each.info.role is not Role.PREFILL:
            ids = next((ids for key, ids in takers if key == each.info.identity), None)
            if ids is None:
                takers.append((each.info.identity, [each.info.id]))
            else:
                ids.append(each.info.id)
    return [
        each
        for each in ready
        if each.info.role is not Role.DECODE
        and any(
            identity == each.info.identity and (len(ids) > 1 or ids[0] != each.info.id)
            for identity, ids in takers
        )
    ]


class Phase(StrEnum):
    """Where a request is, as the router sees it."""

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
