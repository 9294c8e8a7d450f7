"""Who of several has a lease that a server keeps, by clocks that nobody compares.

The rules are those of Kubernetes' own leader election, and stricter where two could decide at
a time. A record is replaced only as it was read (the server compares versions), and:

- Its holder counts from when it *sent* what renewed it, and gives up after two thirds of the
  duration. Others count from when they first *saw* the newest version, and wait all of it. So
  clocks may show anything and run apart by half.
- Who makes the record decides a duration later. An earlier one may have been removed while
  somebody holds it.
- Only who has had it for a duration gives it back at once; others let it run out.

So a record is taken once and given back once in a duration at most. Its epoch, the second of
its making by the server's clock plus the number of both, therefore never overtakes that clock,
and grows from holder to holder also when the record is removed and made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

PERIODS = 3  # renewals, or looks of the others, in a duration
_DECIDING = 2 / 3  # of the duration: how long a renewal lasts for its holder


@dataclass(frozen=True, slots=True)
class Record:
    """What a lease says.

    Attributes:
        version: Another one with every change.
        holder: Empty when it was given back, or nobody had it yet.
        made_s: When it was made, in seconds since 1970 by the server's clock.
        num_changes: How often it was taken or given back; 0 with the one who made it.
        duration_s: How long others are to wait for its holder.
    """

    version: str
    holder: str
    made_s: int
    num_changes: int
    duration_s: float

    @property
    def epoch(self) -> int:
        """Grows from holder to holder."""
        return self.made_s + self.num_changes

    @property
    def is_given_back(self) -> bool:
        """By one who had it; a record that somebody made by hand was not."""
        return not self.holder and self.num_changes > 0


class Step(StrEnum):
    """What to ask the server for."""

    WAIT = "wait"
    LOOK = "look"  # read it
    MAKE = "make"  # with this candidate as its first holder
    TAKE = "take"  # as the next holder
    RENEW = "renew"


class Candidate:
    """One of those who want a lease. All times are of one monotonic clock of its own.

    Args:
        name: No other one's, not even of an earlier life.
        duration_s: How long others wait for it; the same for all, four seconds or more, or
            epochs might not grow when a record is removed and made again.
    """

    def __init__(self, name: str, duration_s: float) -> None:
        self.name = name
        self.duration_s = duration_s
        self.record: Record | None = None
        self._is_sure = False  # that `record` was the newest
        self._looked = -inf
        self._seen = -inf  # this version, for the first time
        self._mine = inf  # since when it is known to have it
        self._sent = -inf  # what renewed it last

    def learns(self, record: Record | None, now: float) -> None:
        """The server's answer came now: this is the lease; None if there is none."""
        known, self.record = self.record, record
        self._is_sure = True
        self._looked = now
        if record is None or known is None or record.version != known.version:
            self._seen = now
        if record is None or record.holder != self.name:
            self._mine, self._sent = inf, -inf
        elif known is None or known.holder != self.name or known.epoch != record.epoch:
            self._mine, self._sent = now, -inf

    def wins(self, record: Record, sent: float, now: float) -> None:
        """The server has written what this one sent then; its answer came now."""
        self.learns(record, now)
        if record.holder == self.name:
            self._sent = sent

    def doubts(self) -> None:
        """A request failed; it may have had its effect all the same, or have yet to."""
        self._is_sure = False

    def resigns(self) -> None:
        """It decides no more, until it has renewed the lease."""
        self._sent = -inf

    def epoch(self, now: float) -> int | None:
        """Under which it decides; None while it must not."""
        if self.record is None or not self._begins() <= now < self._ends():
            return None
        return self.record.epoch

    def may_give_back(self, now: float) -> bool:
        """Whether it has the lease, and for long enough."""
        return now >= self._mine + self.duration_s

    def step(self, now: float) -> Step:
        """What to do now."""
        if not self._is_sure:
            return Step.LOOK
        if self.record is None:
            return Step.MAKE
        if now < self._next():
            return Step.WAIT
        if self.record.holder == self.name:
            return Step.RENEW
        return Step.TAKE if now >= self._free() else Step.LOOK

    def pause_s(self, now: float) -> float:
        """How long there is nothing to do."""
        if not self._is_sure or self.record is None:
            return 0.0
        return max(0.0, self._next() - now)

    def _begins(self) -> float:
        assert self.record is not None
        return self._mine if self.record.num_changes else self._mine + self.duration_s

    def _ends(self) -> float:
        return self._sent + _DECIDING * self.duration_s

    def _free(self) -> float:
        """When it may take the lease of somebody else."""
        assert self.record is not None
        if self.record.is_given_back:
            return self._seen
        return self._seen + max(self.duration_s, self.record.duration_s)

    def _next(self) -> float:
        assert self.record is not None
        period_s = self.duration_s / PERIODS
        if self.record.holder == self.name:
            return self._sent + period_s
        return min(self._looked + period_s, self._free())
