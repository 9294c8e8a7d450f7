"""Roles that change while the cluster serves: orders from operators and from the watcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.messages import FlipRole
from vllm_tetri.policy.leaving import why_needed
from vllm_tetri.policy.watch_group import Look
from vllm_tetri.policy.watcher import Watcher
from vllm_tetri.router.answers import Refusal
from vllm_tetri.router.lease import Lease
from vllm_tetri.types import ClusterView, FlipStage, InstanceId, InstanceState, InstanceView, Role

DEADLINE_S = 60.0
_LOOK_S = 0.25
_WATCHER = "watcher: "

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ordered:
    """What came of an order: whether there was anything to do, and its epoch."""

    is_new: bool
    epoch: int


class Flips:
    """Orders flips of this router's instances. Owner: the event loop.

    Args:
        watcher: Decides when to flip; None leaves it to operators.
        is_dry: Only say what the watcher would do.
        lease: Makes this router's watcher the only one that orders flips; operators may
            always. Without one it rests as soon as instances have several routers. Closed
            with this.

    Attributes:
        are_roles_needed: Whether requests are split by role; else the watcher rests, and any
            instance stands in for any other.
    """

    def __init__(
        self,
        monitor: Monitor,
        watcher: Watcher | None,
        *,
        is_dry: bool,
        lease: Lease | None = None,
    ) -> None:
        self._lease = lease
        self._monitor = monitor
        self._watcher = watcher
        self._is_dry = is_dry
        self._task: asyncio.Task[None] | None = None
        self._said: tuple[InstanceId, Role] | None = None
        self.are_roles_needed = True
        self.newest = Look(None, "nobody watches: roles change by order only")

    def start(self) -> None:
        """Begin to watch, on the running event loop."""
        if self._watcher is not None:
            self._task = asyncio.get_running_loop().create_task(self._watch(self._watcher))

    async def close(self) -> None:
        """Stop watching and let another router watch. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._lease is not None:
            self._lease.close()
            await self._lease.wait_closed()

    def order(
        self,
        instance: InstanceId,
        role: Role,
        *,
        is_now: bool = False,
        deadline_s: float | None = DEADLINE_S,
        force: bool = False,
        reason: str,
        lease: int = 0,
    ) -> Ordered:
        """Have an instance take a role; its present one calls off a flip under way. `lease`
        is the epoch under which the watcher wants it, 0 for operators.

        Raises:
            Refusal: 404 if there is no such instance; 409 if it cannot flip now, or the
                cluster needs it as it is and `force` is not set.
        """
        one = self._monitor.view_of(instance)
        if one is None:
            raise Refusal(404, f"there is no instance {instance!r}")
        if one.state is InstanceState.SILENT:
            raise Refusal(409, f"{instance} is silent and cannot flip")
        under_way = _under_way(one)
        is_hurried = is_now and one.flip is not None and one.flip.stage is FlipStage.DRAINING
        if role is (under_way or one.info.role) and not is_hurried:
            return Ordered(is_new=False, epoch=one.flip.epoch if one.flip else 0)
        if role is not one.info.role:  # else it calls off what is under way
            if role is not under_way:
                _require_able(one, under_way)
            view = self._monitor.view()
            why = self._why_needed(view, one, becomes=role)
            if why and not force:
                raise Refusal(409, f'{why}; {{"force": true}} flips it all the same')
            # Without anybody who stands in for it while it would drain, it does not.
            is_now = is_now or bool(self._why_needed(view, one))
        order = FlipRole(0, role, is_now, deadline_s, reason, lease)
        return Ordered(is_new=True, epoch=self._monitor.order_flip(instance, order))

    def _why_needed(self, view: ClusterView, one: InstanceView, becomes: Role | None = None) -> str:
        return why_needed(view, one, becomes=becomes, are_roles_needed=self.are_roles_needed)

    async def _watch(self, watcher: Watcher) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self._look(watcher)
            except Exception:
                _log.exception("the watcher failed; it goes on")

    def _look(self, watcher: Watcher) -> None:
        if not self.are_roles_needed:
            self.newest = Look(None, "nobody watches: requests are not split by role now")
            return
        view = self._monitor.view()
        lease = self._hold(view)
        if lease is None:
            return
        self.newest = look = watcher.look(view, time.monotonic())
        order = look.order
        if order is None:
            return
        words = f"{order.instance} to {order.role}{' now' if order.now else ''}: {order.reason}"
        if self._is_dry:
            if (order.instance, order.role) != self._said:
                _log.info("%swould flip %s", _WATCHER, words)
            self._said = order.instance, order.role
            return
        try:
            self.order(
                order.instance,
                order.role,
                is_now=order.now,
                reason=_WATCHER + order.reason,
                lease=lease,
            )
        except Refusal as refusal:
            _log.info("%scannot flip %s: %s", _WATCHER, words, refusal)
        else:
            _log.info("%sflips %s", _WATCHER, words)

    def _hold(self, view: ClusterView) -> int | None:
        """Under which epoch this router decides, 0 without a lease; None when it does not."""
        if self._lease is not None:
            lease = self._lease.hold()
            if lease is None:
                self.newest = Look(None, self._lease.why_not)
            return lease
        if any(each.info.num_routers > 1 for each in view.instances):
            why = "instances have several routers, and this one has no --flip-lease"
            self.newest = Look(None, f"nobody watches: {why}")
            return None
        return 0


def _under_way(one: InstanceView) -> Role | None:
    """The role that it is about to have."""
    flip = one.flip
    return flip.target if flip is not None and flip.is_under_way else None


def _require_able(one: InstanceView, under_way: Role | None) -> None:
    name = one.info.id
    if under_way is not None:
        raise Refusal(
            409,
            f"{name} is about to become {under_way}; wait, or order {one.info.role} to call it off",
        )
    if one.state is not InstanceState.READY:
        raise Refusal(409, f"{name} is {one.state} and cannot flip")
