"""Election of the holder of a lease that a server keeps, without comparing clocks.

The rules are those of Kubernetes' own leader election, and stricter where two candidates could
decide at the same time. Every candidate reads the record, writes it if it may, and pauses. A record
is replaced only as it was read (the server compares versions):

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
from math import inf

_PERIOD = 1 / 3  # of the duration: from one renewal of the holder, or read of another, to the next
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
        self._version_read_s = -inf  # when this version was read for the first time
        self._held_since_s = inf  # since when it is known to hold the lease
        self._renewed_s = -inf  # when its last renewal was sent

    def on_read(self, record: Record | None, now: float) -> None:
        """Record that the server returned this lease now; None if there is none."""
        known, self.record = self.record, record
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

    def may_write(self, now: float) -> bool:
        """Return whether it may create, renew or take the lease as it was just read."""
        return now >= self._free_s()

    def pause_s(self, now: float) -> float:
        """Return for how long there is nothing to do."""
        period_s = _PERIOD * self.duration_s
        if self.record is not None and self.record.holder == self.name:
            return max(0.0, self._renewed_s + period_s - now)
        return max(0.0, min(period_s, self._free_s() - now))

    def _free_s(self) -> float:
        """Return since or from when no other candidate may hold the lease."""
        record = self.record
        if record is None or record.holder == self.name:
            return -inf
        if not record.holder and record.num_changes:  # given back, not created without a holder
            return -inf
        return self._version_read_s + max(self.duration_s, record.duration_s)
