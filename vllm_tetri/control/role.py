"""One instance's change of role: ordered on the agent's thread, taken on the engine's."""

from __future__ import annotations

import logging
import threading
import time

from vllm_tetri.messages import FlipRole
from vllm_tetri.policy.role import Flipping
from vllm_tetri.types import FlipStage, InstanceId, Role

_log = logging.getLogger(__name__)


class RoleKeeper(Flipping):
    """The role of one instance, whose engine takes another one on a thread of its own.

    The engine's thread calls only `take`; all else is the agent's thread.
    """

    def __init__(self, instance: InstanceId, role: Role) -> None:
        super().__init__(role)
        self._instance = instance
        self._lease = 0  # the newest lease under which a watcher ordered anything
        self._lock = threading.Lock()  # guards the two fields below
        self._wanted: Role | None = None
        self._taken_s: float | None = None

    @property
    def is_steady(self) -> bool:
        """Whether no change is under way."""
        return self.stage is None

    def obey(self, order: FlipRole, now: float) -> None:
        """Begin or call off a change, as a router orders."""
        if 0 < order.lease < self._lease:
            return
        self._lease = max(self._lease, order.lease)
        was_steady = self.is_steady
        is_call_off = order.epoch > self.epoch and order.role is self.role
        if is_call_off and self.stage is FlipStage.SWITCHING:
            if not self._withdraw():
                return  # the engine took it a moment ago; the router repeats the order
            self.roll_back(f"called off: {order.reason}", now)
            self._log(now)
        what = order.epoch, order.role, order.is_now, order.deadline_s, order.reason
        is_new = self.order(*what, now)
        if is_new and self.wanted is not None:
            self.want(self.wanted)
        elif is_new and self.is_steady and not was_steady:
            self._log(now)

    def proceed(self, unfinished: str, is_idle: bool, now: float) -> bool:
        """Continue the change that is under way, given the present role's unfinished work and
        whether the engine has no other; True when the engine has another role now."""
        if self.stage is FlipStage.DRAINING:
            self.advance(unfinished, now)
            if self.wanted is not None:
                self.want(self.wanted)
        taken_s = None
        if self.stage is FlipStage.SWITCHING:
            taken_s = now if self._wanted is not None and is_idle else self._taken_s
        if taken_s is not None:
            self.record_taken(taken_s)
        elif self.is_overdue(now) and self._withdraw():
            self.roll_back("the engine takes no step", now)
        if self.is_steady:
            self._log(now)
        return taken_s is not None

    def want(self, role: Role) -> None:
        """Let the engine take a role at its next step; the newest call counts."""
        with self._lock:
            self._wanted, self._taken_s = role, None

    def take(self) -> Role | None:
        """The role to have from now on, if it is another one; cheap if it is not."""
        if self._wanted is None:
            return None
        with self._lock:
            role: Role | None = self._wanted  # may have been withdrawn meanwhile
            self._wanted = None
            if role is not None:
                self._taken_s = time.monotonic()
        return role

    def _withdraw(self) -> bool:
        with self._lock:
            self._wanted = None
            return self._taken_s is None

    def _log(self, now: float) -> None:
        flip = self.newest(now)
        if flip is not None:
            _log.info(
                "%s: role %s to %s: %s%s (%s; drained for %.3f s)",
                self._instance, flip.source, flip.target, flip.stage,
                f", {flip.problem}" if flip.problem else "", flip.reason, flip.drain_s,
            )  # fmt: skip
