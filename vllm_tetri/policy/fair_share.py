"""How much one client key may have when there is not enough for all.

A party may have up to four times what is still free (a "dynamic threshold", as switches
share their buffers: Choudhury and Hahne, 1998). Alone it comes to four fifths of the
limit, and finds nothing to wait for below that. As others come, less is free, so it gets
nothing more until it has as much as they: with *n* that want all they can get each has
4 / (1 + 4 n) of the limit, and 1 / (1 + 4 n) stays free for whoever comes next.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 4
RELAX_S = 60.0


def may_begin(own: int, taken: int, limit: int, *, num_parties: int) -> bool:
    """Whether a party may have one more.

    Args:
        own: What it has.
        taken: What all parties have, its own included.
        limit: The most that all may have.
        num_parties: How many there could be; a single one may have everything.
    """
    free = limit - taken
    return free > 0 and (num_parties <= 1 or own < SHARE * free)


def matters_from(limit: int, *, num_parties: int) -> int:
    """While less than this is taken, `may_begin` is true for everybody."""
    return limit if num_parties <= 1 else -(-SHARE * limit // (SHARE + 1))


def may_queue(own: int, taken: int, num_there: int) -> bool:
    """Whether a party may have one more where too much waits already: while it has less
    than an equal share of that.

    Args:
        own: What it has there.
        taken: What all parties have there, its own included.
        num_there: How many parties those are, itself included.
    """
    return own == 0 or own * num_there < taken


@dataclass(frozen=True, slots=True)
class Squeeze:
    """An instance that had no room for another request, though its limit was not reached.

    Its own bound is one of tokens, which a router cannot see coming; what it had then is
    the best guess of its limit for a while.

    Attributes:
        taken: Requests that it had.
        at_s: When it said so, monotonic seconds.
    """

    taken: int
    at_s: float

    def is_over(self, now: float) -> bool:
        """Whether it tells nothing any more."""
        return now - self.at_s >= RELAX_S

    def limit(self, most: int, now: float) -> int:
        """The limit that it stands for, of at most `most`; grows to twice what was there."""
        grown = self.taken * (1 + max(0.0, now - self.at_s) / RELAX_S)
        return max(1, min(most, int(grown)))
