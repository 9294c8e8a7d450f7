"""Queues that take up a burst, and queues that stand. Pure.

A queue is of use when it is gone a moment later. One that stays makes everybody wait and
serves nobody more, however long it is; only those who then ask again elsewhere, or later, do
anything about it (Nichols and Jacobson, "Controlling Queue Delay", 2012). So a prompt may
wait for long where a burst has just come, and not where all prompts have waited for long for
a while: there the queue is kept short until it was as good as empty once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vllm_tetri.policy.backpressure import PrefillSpeeds, queue_wait_s
from vllm_tetri.types import ClusterView, InstanceId, InstanceView

# Longest wait for prompts to begin where a queue does not go away.
MOST_S = 2.0
# A queue that has been longer for so long is none of a burst.
PATIENCE_S = 5.0
# It is empty enough at such a part of the wait that is allowed.
_EMPTY = 0.25
# So few long prompts are no crowd, however long they take.
_FEW = 8
# Reports come every 100 ms.
_FRESH_S = 0.02


@dataclass(slots=True)
class _Queue:
    """Of one instance; `since_s` is when it became too long."""

    since_s: float
    stands: bool = False


class StandingQueues:
    """Of all instances. Owner: one thread; calls come in order of `now`.

    Args:
        most_s: Longest wait in a queue that stands; 0 lets queues be as they are.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._queues: dict[InstanceId, _Queue] = {}
        self._full: frozenset[InstanceId] = frozenset()
        self._at_s = float("-inf")

    def full(
        self, look: Callable[[], ClusterView], speeds: PrefillSpeeds, now: float
    ) -> frozenset[InstanceId]:
        """Instances that should get no further prompt now.

        Args:
            look: The newest picture of the cluster; not asked for with every request.
        """
        if self._most_s and now - self._at_s >= _FRESH_S:
            self._at_s = now
            self._full = frozenset(self._look(look().instances, speeds, now))
        return self._full

    def _look(
        self, instances: Iterable[InstanceView], speeds: PrefillSpeeds, now: float
    ) -> Iterator[InstanceId]:
        before, self._queues = self._queues, {}
        for each in instances:
            wait_s = queue_wait_s(each, speeds) or 0.0
            is_long = wait_s > self._most_s and each.load.waiting >= _FEW
            queue = before.get(each.info.id, _Queue(now))
            queue.stands |= is_long and now - queue.since_s >= PATIENCE_S
            if is_long or (queue.stands and wait_s > _EMPTY * self._most_s):
                self._queues[each.info.id] = queue
            if is_long and queue.stands:
                yield each.info.id
