"""What became of requests, fault by fault, and what a cluster promises. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm_tetri.bench.soak.faults import Fault, Kind

CALM = "no fault"  # before the first one
LASTS_S = 5.0


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
        again: How often the client was told to come again, or nobody was there to ask.
        words: What went wrong.
    """

    end: End
    began_s: float
    ended_s: float
    gap_s: float = 0.0
    again: int = 0
    words: str = ""


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
    happened to a request is on the account of the newest fault before its end."""
    found = [_row(CALM, [each for each in asked if _cause(each, faults) is None], [])]
    for kind in Kind:
        hits = [each for each in faults if each.kind is kind]
        if hits:
            caused = [each for each in asked if _of(each, faults, kind)]
            found.append(_row(kind.value, caused, hits))
    return [*found, _row("all", asked, faults)]


def _cause(asked: Asked, faults: Sequence[Fault]) -> Fault | None:
    before = [each for each in faults if each.at_s <= asked.ended_s]
    return max(before, key=lambda each: each.at_s, default=None)


def _of(asked: Asked, faults: Sequence[Fault], kind: Kind) -> bool:
    cause = _cause(asked, faults)
    return cause is not None and cause.kind is kind


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


@dataclass(frozen=True, slots=True)
class Promise:
    """Something that a cluster should keep.

    Attributes:
        is_kept: None where too little was seen to say so.
        found: What was seen, in words.
    """

    text: str
    is_kept: bool | None
    found: str


def promises_of_answers(found: Sequence[Row]) -> list[Promise]:
    """What clients are promised. Requests that a router has are lost with it: the client's
    connection is. Whoever has several routers asks another one."""
    total = found[-1]
    with_router = next((each for each in found if each.name == Kind.KILL_ROUTER), None)
    beyond = total.lost - (with_router.lost if with_router is not None else 0)
    unavoidable = f", {total.lost - beyond} with a router" if total.lost > beyond else ""
    return [
        Promise("no request is lost", beyond == 0, f"{beyond}{unavoidable}"),
        Promise("no answer ends with an error", total.errors == 0, str(total.errors)),
        Promise("no answer is wrong", total.wrong == 0, str(total.wrong)),
        Promise("requests are answered", total.good > 0, f"{total.good} answers"),
    ]


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
