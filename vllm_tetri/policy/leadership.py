"""Election of the holder of a lease that a server keeps, without comparing clocks.

The rules are those of Kubernetes' own leader election, and stricter where two candidates could
decide at the same time. A record is replaced only as it was read (the server compares versions):

- The holder counts from when it *sent* its last renewal, and stops deciding after two thirds of
  the duration. Other candidates count from when they first *read* the newest version, and wait
  for the whole duration. So clocks may differ, and their speeds too, by half.
- The candidate that creates the record decides one duration later: an earlier record may have
  been removed while another candidate held it.
- A holder gives the lease back only after one duration; before, it lets the lease expire.

So a record is taken once and given back once in a duration at most. Its epoch is the second of
its creation by the server's clock plus the number of both. It therefore never overtakes that
clock, and grows from holder to holder also when the record is removed and created again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

PERIODS = 3  # renewals of the holder, and reads of the others, in a duration
_DECIDING = 2 / 3  # of the duration: how long a renewal lasts for its holder


@dataclass(frozen=True, slots=True)
class Record:
    """The contents of a lease."""

    version: str  # changes with every write
    holder: str  # empty if it was given back, or never held
    made_s: int  # time of its creation, in seconds since 1970 by the server's clock
    num_changes: int  # how often it was taken or given back; 0 with its first holder
    duration_s: float  # how long other candidates must wait for its holder

    @property
    def epoch(self) -> int:
        """A number that grows from holder to holder."""
        return self.made_s + self.num_changes

    @property
    def is_given_back(self) -> bool:
        """Whether a holder gave it back; false for a record that was created without one."""
        return not self.holder and self.num_changes > 0


class LeaseStep(StrEnum):
    """The next request to the server."""

    WAIT = "wait"
    READ = "look"  # read it
    CREATE = "make"  # with this candidate as its first holder
    TAKE = "take"  # as the next holder
    RENEW = "renew"


class Candidate:
    """One candidate for a lease, whose name is unique among all processes, also earlier ones.

    `duration_s`, how long others wait for it, is the same for all and four seconds or more, or
    epochs might not grow when a record is removed and created again. All times are of one
    monotonic clock.
    """

    def __init__(self, name: str, duration_s: float) -> None:
        self.name = name
        self.duration_s = duration_s
        self.record: Record | None = None
        self._is_sure = False  # whether `record` is known to be the newest
        self._read_s = -inf
        self._version_read_s = -inf  # when this version was read for the first time
        self._held_since_s = inf  # since when it is known to hold the lease
        self._renewed_s = -inf  # when its last renewal was sent

    def on_read(self, record: Record | None, now: float) -> None:
        """Record that the server returned this lease now; None if there is none."""
        known, self.record = self.record, record
        self._is_sure = True
        self._read_s = now
        if record is None or known is None or record.version != known.version:
            self._version_read_s = now
        if record is None or record.holder != self.name:
            self._held_since_s, self._renewed_s = inf, -inf
        elif known is None or known.holder != self.name or known.epoch != record.epoch:
            self._held_since_s, self._renewed_s = now, -inf

    def on_written(self, record: Record, sent: float, now: float) -> None:
        """Record that the server wrote what was sent then, and responded now."""
        self.on_read(record, now)
        if record.holder == self.name:
            self._renewed_s = sent

    def on_error(self) -> None:
        """Record that a request failed; it may have taken effect, or may do so later."""
        self._is_sure = False

    def resign(self) -> None:
        """Stop deciding until the lease is renewed."""
        self._renewed_s = -inf

    def epoch(self, now: float) -> int | None:
        """Return the epoch under which it decides; None while it must not."""
        record = self.record
        if record is None:
            return None
        begins_s = self._held_since_s + (0.0 if record.num_changes else self.duration_s)
        ends_s = self._renewed_s + _DECIDING * self.duration_s
        return record.epoch if begins_s <= now < ends_s else None

    def may_give_back(self, now: float) -> bool:
        """Return whether it has held the lease for one duration."""
        return now >= self._held_since_s + self.duration_s

    def step(self, now: float) -> LeaseStep:
        """Return what to do now."""
        if not self._is_sure:
            return LeaseStep.READ
        if self.record is None:
            return LeaseStep.CREATE
        if now < self._next():
            return LeaseStep.WAIT
        if self.record.holder == self.name:
            return LeaseStep.RENEW
        return LeaseStep.TAKE if now >= self._free() else LeaseStep.READ

    def pause_s(self, now: float) -> float:
        """Return for how long there is nothing to do."""
        is_known = self._is_sure and self.record is not None
        return max(0.0, self._next() - now) if is_known else 0.0

    def _free(self) -> float:
        """Return when it may take the lease of another holder."""
        assert self.record is not None
        wait_s = max(self.duration_s, self.record.duration_s)
        return self._version_read_s + (0.0 if self.record.is_given_back else wait_s)

    def _next(self) -> float:
        assert self.record is not None
        period_s = self.duration_s / PERIODS
        if self.record.holder == self.name:
            return self._renewed_s + period_s
        return min(self._read_s + period_s, self._free())
