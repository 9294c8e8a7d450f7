"""What an engine still has although no request is there.

`leftovers` is a function of counts. An `Audit` says what has stayed for long enough not
to be on its way: everything that a request takes is given back with it, but what other
processes have a part in may come or go a moment later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# A report and the next one: whatever is seen by both was not seen in the middle of a step.
OWN_PATIENCE_S = 0.1
# The promise: within a second nothing is left of any request.
OTHERS_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What an engine has at a moment, its own measurements left out.

    Attributes:
        unfinished: Requests that are not finished.
        finished: Requests that vLLM keeps because their blocks are being read or filled.
        blocks: In use beyond the prefix cache.
        hand_overs: Entries of the outbox: their blocks are being read.
        arrivals: Entries of the inbox: those of a request that ended are being filled.
        swapped: Copies of preempted requests.
        taken_slots: Of the arena, in use by this engine.
        unclaimed_slots: Of the arena, arrived and not taken.
        quarantined_bytes: Of the arena, given up while a writer may still write.
        injections: Requests that began elsewhere.
        answers: Predictions that came with a request.
        predictions: Prompts that a predictor was asked about.
        queued: Entries of the prefill queue, started ones included.
        undecided: Prompts whose decode instance is being chosen.
        promised: Requests that the admission policy follows.
    """

    unfinished: int = 0
    finished: int = 0
    blocks: int = 0
    hand_overs: int = 0
    arrivals: int = 0
    swapped: int = 0
    taken_slots: int = 0
    unclaimed_slots: int = 0
    quarantined_bytes: int = 0
    injections: int = 0
    answers: int = 0
    predictions: int = 0
    queued: int = 0
    undecided: int = 0
    promised: int = 0


class Finding(NamedTuple):
    """Something that is left.

    Attributes:
        what: Its kind, in words.
        number: How many or how much.
        is_shared: Whether another process has a part in it.
    """

    what: str
    number: int
    is_shared: bool = False

    def __str__(self) -> str:
        return f"{self.number} {self.what}"


# By field of `Counts`, whatever else is there.
_OWN = {
    "swapped": "copies of preempted requests",
    "injections": "requests with given tokens",
    "answers": "predictions that came with a request",
    "predictions": "prompts to predict",
    "queued": "prompts in the queue",
    "undecided": "prompts without a decode instance",
    "promised": "requests known to admission",
}
_SHARED = {
    "unclaimed_slots": "transfers that arrived for nobody",
    "quarantined_bytes": "bytes of the arena whose writer has not answered",
}


def leftovers(counts: Counts) -> tuple[Finding, ...]:
    """What is there although no request is; nothing while there is one.

    KV that is being sent keeps its request's blocks, KV that is being received a slot:
    both end with their transfer, and are no leftovers.
    """
    return () if counts.unfinished else tuple(_findings(counts))


def _findings(counts: Counts) -> Iterator[Finding]:
    used = counts.hand_overs + counts.arrivals  # blocks that transfers and loads are at
    if counts.finished > used:
        yield Finding("finished requests that nothing reads", counts.finished - used)
    if used > counts.finished:
        yield Finding("transfers of requests that are gone", used - counts.finished)
    if counts.blocks and not counts.finished:
        yield Finding("blocks", counts.blocks)
    slots = counts.taken_slots - counts.swapped - counts.arrivals
    if slots > 0:
        yield Finding("slots of the arena that nobody reads", slots)
    for names, is_shared in ((_OWN, False), (_SHARED, True)):
        for name, what in names.items():
            number = getattr(counts, name)
            if number:
                yield Finding(what, number, is_shared)


class Audit:
    """Follows what is left of one engine. Used by one thread.

    Attributes:
        found: What was left for too long when there was last no request, in words.
    """

    def __init__(self) -> None:
        self.found: tuple[str, ...] = ()
        self._since: dict[str, float] = {}  # monotonic, by kind

    def look(self, counts: Counts, now: float) -> tuple[str, ...]:
        """Look once more; what is `found` then.

        Args:
            now: Monotonic seconds.
        """
        findings = leftovers(counts)
        since, self._since = self._since, {}
        for each in findings:
            self._since[each.what] = since.get(each.what, now)
        stays = tuple(
            str(each)
            for each in findings
            if now - self._since[each.what]
            >= (OTHERS_PATIENCE_S if each.is_shared else OWN_PATIENCE_S)
        )
        if stays or not (findings or counts.unfinished):
            self.found = stays
        return self.found
