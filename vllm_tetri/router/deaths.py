"""Instances that die without saying so: who fell silent with requests, and who crashed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.types import InstanceId, InstanceInfo, InstanceState

# Looks at all instances in the time after which a silent one is given up.
_LOOKS = 24
# Of those, after which streams leave it that lose nothing by that.
_MOVING_LOOKS = _LOOKS // 2
# What an instance says that leaves in good order is here by then.
_LEFT_S = 0.3

_log = logging.getLogger(__name__)


class Deaths:
    """Hangs up on instances that report nothing. Owner: the event loop; `close` it.

    Time is counted in looks, so that a router that was held up itself does not believe
    that all instances are dead.

    Args:
        monitor: Who is there, and what they reported last.
        upstream: Connections to the instances.
        workers: How many requests every instance has.
        on_silent: Told once of each that has been silent for half of `after_s`.
        after_s: An instance that has requests and reports nothing for so long is given up.
            Streams that can go on elsewhere do so after half of it: moving them costs a
            computation, and the others would end.
    """

    def __init__(
        self,
        monitor: Monitor,
        upstream: Upstream,
        workers: Callable[[], Mapping[str, int]],
        on_silent: Callable[[InstanceId], None],
        *,
        after_s: float,
    ) -> None:
        self._monitor = monitor
        self._upstream = upstream
        self._workers = workers
        self._on_silent = on_silent
        self._after_s = after_s
        self._seen: dict[InstanceId, tuple[int, int]] = {}  # process, report
        self._missed: dict[InstanceId, int] = {}
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="deaths")

    async def close(self) -> None:
        """Look no more. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def has_crashed(self, instance: InstanceInfo) -> bool:
        """Whether an instance that failed a request died or hangs. Not so when it answers,
        nor when it left or is about to, nor when not even its host answers: that is the
        network, or a machine, and no request's doing."""
        is_alive, is_reachable = await asyncio.gather(
            self._upstream.is_alive(instance), self._upstream.is_reachable(instance)
        )
        if is_alive or not is_reachable:
            return False
        await asyncio.sleep(_LEFT_S)
        one = self._monitor.view_of(instance.id)
        return one is not None and one.state is not InstanceState.LEAVING

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._after_s / _LOOKS)
            self._look()

    def _look(self) -> None:
        views = self._monitor.view().instances
        for each in views:
            name, seen = each.info.id, (each.info.pid, each.seq)
            if self._seen.get(name) != seen:
                self._seen[name], self._missed[name] = seen, 0
                continue
            self._missed[name] += 1
            if self._missed[name] == _MOVING_LOOKS:
                self._on_silent(name)
            if self._missed[name] >= _MOVING_LOOKS and self._workers().get(name):
                self._give_up(name, is_final=self._missed[name] >= _LOOKS)
        for name in self._seen.keys() - {each.info.id for each in views}:
            del self._seen[name], self._missed[name]

    def _give_up(self, name: InstanceId, *, is_final: bool) -> None:
        quiet_s = self._after_s if is_final else self._after_s * _MOVING_LOOKS / _LOOKS
        why = f"silent for {quiet_s:g} s"
        hang_up = self._upstream.hang_up if is_final else self._upstream.move_away
        num_closed = hang_up(name, why, quiet_s=quiet_s)
        if num_closed:
            what = "requests go on elsewhere or end" if is_final else "streams go on elsewhere"
            _log.warning("%s has been %s: %d %s", name, why, num_closed, what)
