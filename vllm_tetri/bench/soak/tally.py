"""What became of requests, fault by fault, and what a cluster promises. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm_tetri.bench.promise import Promise
from vllm_tetri.bench.soak.faults import Fault, Kind

CALM = "no fault"  # before the first one
LASTS_S = 5.0
# What was sent to a router in the moment of its death was so before that, too.
_DYING_S = 1.0


class End(StrEnum):
    """How a request ended."""

    GOOD = "good"
    WRONG = "wrong"  # complete, but not the answer that it had before
    ERROR = "error"  # one clear error
    LOST = "lost"  # neither
    LEFT = "left"  # the client did not wait for it


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and its end; times are monotonic seconds.

    Attributes:
        gap_s: Longest time that a stream said nothing, its first token included.
        again: How often the client went to another router or came again: it was told to,
            nobody listened, or its connection broke before a byte of the answer had come.
        words: What went wrong.
        id: Under which the last router knew it.
        router: The last one that was asked.
        broke: Routers whose connections broke before a byte of the answer had come.
        heard_s: When events of a stream came, the last time that it was asked for.
    """

    end: End
    began_s: float
    ended_s: float
    gap_s: float = 0.0
    again: int = 0
    words: str = ""
    id: str = ""
    router: str = ""
    broke: tuple[str, ...] = ()
    heard_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """What one kind of fault came to.

    Attributes:
        whole_s: Longest time until a victim was of use again.
    """

    name: str
    faults: int
    good: int
    lost: int
    errors: int
    wrong: int
    left: int
    again: int
    gap_s: float
    whole_s: float


def rows(asked: Sequence[Asked], faults: Sequence[Fault]) -> list[Row]:
    """One row for the time before faults, one per kind that happened, and their sum. What
    happened to a request is on the account of the newest fault before its end.

    Args:
        faults: In the order of their times.
    """
    caused: dict[str, list[Asked]] = {CALM: []}
    for each in asked:
        place = bisect_right(faults, each.ended_s, key=lambda fault: fault.at_s)
        caused.setdefault(faults[place - 1].kind if place else CALM, []).append(each)
    found = [_row(CALM, caused[CALM], [])]
    for kind in Kind:
        hits = [each for each in faults if each.kind is kind]
        if hits:
            found.append(_row(kind.value, caused.get(kind, []), hits))
    return [*found, _row("all", asked, faults)]


def _row(name: str, asked: Sequence[Asked], faults: Sequence[Fault]) -> Row:
    ends = [each.end for each in asked]
    return Row(
        name=name,
        faults=len(faults),
        good=ends.count(End.GOOD),
        lost=ends.count(End.LOST),
        errors=ends.count(End.ERROR),
        wrong=ends.count(End.WRONG),
        left=ends.count(End.LEFT),
        again=sum(each.again for each in asked),
        gap_s=max((each.gap_s for each in asked), default=0.0),
        whole_s=max(
            (each.whole_s - each.at_s for each in faults if each.whole_s is not None), default=0.0
        ),
    )


def promises_of_answers(asked: Sequence[Asked], faults: Sequence[Fault]) -> list[Promise]:
    """What clients are promised. Answers that a router has begun to write are lost with it:
    the client's connection is."""
    ends = [each.end for each in asked]
    lost = [each for each in asked if each.end is End.LOST]
    with_router = sum(_died_with(each, each.router, faults) for each in lost)
    beyond = len(lost) - with_router
    unavoidable = f", {with_router} with their router" if with_router else ""
    broke = [(each, router) for each in asked for router in each.broke]
    alone = sum(not _died_with(each, router, faults) for each, router in broke)
    found = f"{alone}, {len(broke) - alone} with their router" if len(broke) > alone else str(alone)
    good, errors, wrong = ends.count(End.GOOD), ends.count(End.ERROR), ends.count(End.WRONG)
    return [
        Promise("no request is lost", beyond == 0, f"{beyond}{unavoidable}"),
        Promise("no router breaks a connection while it lives", alone == 0, found),
        Promise("no answer ends with an error", errors == 0, str(errors)),
        Promise("no answer is wrong", wrong == 0, str(wrong)),
        Promise("requests are answered", good > 0, f"{good} answers"),
    ]


def _died_with(asked: Asked, router: str, faults: Sequence[Fault]) -> bool:
    """Whether a router was killed while a request was under way."""
    return any(
        each.kind is Kind.KILL_ROUTER
        and each.victim == router
        and asked.began_s - _DYING_S <= each.at_s <= asked.ended_s
        for each in faults
    )


class Leftovers:
    """What instances without requests said that they had left. What stays counts; a machine
    that starts an engine on few cores may keep a router from asking for KV for a second.

    Attributes:
        stayed: What was seen for `LASTS_S` or longer, by instance and kind.
        brief: What was seen at all.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self.stayed: set[str] = set()
        self.brief: set[str] = set()

    def note(self, found: Mapping[str, Sequence[str]], now: float) -> None:
        """What those instances say now that say anything.

        Args:
            found: Words by instance; each begins with a number.
            now: Monotonic seconds.
        """
        kinds = {
            f"{name}: {text.partition(' ')[2]}" for name, words in found.items() for text in words
        }
        self._since = {kind: self._since.get(kind, now) for kind in sorted(kinds)}
        self.brief |= kinds
        self.stayed |= {kind for kind, since in self._since.items() if now - since >= LASTS_S}

    def excuse(self) -> None:
        """Somebody is stopped, so it is not over: begin to count anew."""
        self._since.clear()


def promise_of_audits(leftovers: Leftovers) -> Promise:
    """What instances kept although no request was there."""
    brief = sorted(leftovers.brief - leftovers.stayed)
    found = "; ".join(sorted(leftovers.stayed)) or "nothing"
    found += f" (for less than {LASTS_S:g} s: {'; '.join(brief)})" if brief else ""
    is_kept = not leftovers.stayed
    return Promise("nothing stays in an instance without requests", is_kept, found)
