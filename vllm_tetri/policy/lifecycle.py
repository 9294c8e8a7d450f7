"""The phases of a request as a table; nobody assigns a phase, everybody calls `advance`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Phase(StrEnum):
    """Where a request is, as the router sees it."""

    ARRIVED = "arrived"
    PREFILLING = "prefilling"
    HANDING_OVER = "handing_over"  # prefill answered, decode has not yet
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
    ANSWERING = "answering"  # the answer's first byte came
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


ENDED = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})

TRANSITIONS: Mapping[tuple[Phase, Event], Phase] = MappingProxyType(
    {
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
)


def advance(phase: Phase, event: Event) -> Phase:
    """The phase after an event.

    Raises:
        ValueError: The event cannot happen in this phase.
    """
    try:
        return TRANSITIONS[phase, event]
    except KeyError:
        raise ValueError(f"event {event} cannot happen to a request in phase {phase}") from None
