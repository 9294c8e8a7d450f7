"""Wait until the HTTP server of an instance that announced itself answers."""

from __future__ import annotations

import asyncio

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.types import InstanceInfo

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0
_TIMEOUT_S = 5.0

_Key = tuple[str, int, str]


class Probes:
    """One task per instance that is not ready yet. Owns the tasks."""

    def __init__(self, monitor: Monitor, upstream: Upstream) -> None:
        self._monitor = monitor
        self._upstream = upstream
        self._tasks: dict[_Key, asyncio.Task[None]] = {}

    def begin(self, info: InstanceInfo) -> None:
        """Probe an instance until it answers, is replaced or forgotten. Not only until it is
        silent: one that is slow to start, or a router that was stopped, says nothing for a
        while, and nobody would ask again.
        """
        key = (info.id, info.pid, info.url)
        if key in self._tasks:
            return
        task = asyncio.get_running_loop().create_task(self._probe(info), name=f"probe {info.id}")
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def close(self) -> None:
        """Stop all probes. Idempotent."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, info: InstanceInfo) -> None:
        wait_s = _FIRST_WAIT_S
        while self._monitor.knows(info):
            if await self._upstream.is_healthy(info.url, _TIMEOUT_S):
                self._monitor.mark_ready(info)
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
