"""The agent's side of flips: orders in, a role for the engine, facts out."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_tetri.control.role_switch import RoleSwitch
from vllm_tetri.messages import FlipRole
from vllm_tetri.policy.flipping import Flipping, Stage
from vllm_tetri.types import InstanceId, Role

_log = logging.getLogger(__name__)


class RoleKeeper:
    """What one instance's role is, and how far it is on its way to another.

    Owner: the agent's thread; the engine's only touches the switch.
    """

    def __init__(self, instance: InstanceId, role: Role, switch: RoleSwitch) -> None:
        self._instance = instance
        self._flipping = Flipping(role)
        self._switch = switch
        self._lease = 0  # the newest under which a watcher ordered anything
        self.told = self._flipping.told
        self.heard = self._flipping.heard
        self.known = self._flipping.known
        self.newest = self._flipping.newest

    @property
    def role(self) -> Role:
        """What it is now."""
        return self._flipping.role

    @property
    def epoch(self) -> int:
        """Of the newest order."""
        return self._flipping.epoch

    @property
    def num_flips(self) -> int:
        """Roles taken."""
        return self._flipping.num_flips

    @property
    def is_steady(self) -> bool:
        """Whether no flip is under way."""
        return self._flipping.stage is Stage.STEADY

    def order(self, order: FlipRole, now: float) -> None:
        """A router wants another role."""
        if 0 < order.lease < self._lease:
            return
        self._lease = max(self._lease, order.lease)
        was_steady = self.is_steady
        is_new = order.epoch > self.epoch
        if is_new and order.role is self.role and self._flipping.stage is Stage.SWITCHING:
            if not self._switch.withdraw():
                return  # the engine has taken it just now; the router will say it again
            self._flipping.withdrawn(now, f"called off: {order.reason}")
            self._log(now)
        is_new = self._flipping.order(
            order.epoch,
            order.role,
            is_now=order.is_now,
            deadline_s=order.deadline_s,
            reason=order.reason,
            now=now,
        )
        if not is_new:
            return
        if self._flipping.wanted is not None:
            self._switch.want(self._flipping.wanted)
        elif self.is_steady and not was_steady:
            self._log(now)

    def go_on(self, read_unfinished: Callable[[Role], str], now: float) -> bool:
        """Look whether the flip that is under way can go on; True when the engine has
        another role now."""
        flipping = self._flipping
        if flipping.stage is Stage.DRAINING:
            flipping.look(read_unfinished(flipping.role), now)
            if flipping.wanted is not None:
                self._switch.want(flipping.wanted)
        taken_s = self._switch.taken_s() if flipping.stage is Stage.SWITCHING else None
        if taken_s is not None:
            flipping.taken(taken_s)
        elif flipping.is_overdue(now) and self._switch.withdraw():
            flipping.withdrawn(now)
        if self.is_steady:
            self._log(now)
        return taken_s is not None

    def _log(self, now: float) -> None:
        flip = self._flipping.newest(now)
        if flip is not None:
            _log.info(
                "%s: from %s to %s: %s%s (%s; drained for %.3f s)",
                self._instance, flip.source, flip.target, flip.stage,
                f", {flip.problem}" if flip.problem else "", flip.reason, flip.drain_s,
            )  # fmt: skip
