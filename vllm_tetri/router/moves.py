"""Outputs of this router that move, by `policy.moves`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.messages import Moved, Moving
from vllm_tetri.policy.cluster import TableMaker
from vllm_tetri.policy.moves import choose_moves, why_leave
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.table import Entry, RequestTable
from vllm_tetri.types import InstanceId, InstanceState, InstanceView, RequestId

_LOOK_S = 0.05  # between two looks at the cluster

_log = logging.getLogger(__name__)


class Moves:
    """Looks for outputs that should move, and orders it. Build it on a running event loop."""

    def __init__(self, monitor: Monitor, table: RequestTable, *, any_role: bool) -> None:
        self._monitor, self._table = monitor, table
        self.any_role = any_role  # whether any instance may take an output
        self._tables = TableMaker()
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="moves")

    async def close(self) -> None:
        """Order no more moves. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def on_message(self, message: Moving | Moved) -> None:
        """Pass on what an instance tells of a move."""
        for entry in self._table:
            if entry.mover is not None:
                entry.mover.on_message(message)

    def order(self, request: RequestId, target: InstanceId) -> InstanceId:
        """Order the output of a request to move, and return where it is now. Raises `Refusal` 404:
        there is no such request or instance; 409: it cannot move there, now or at all."""
        entry, one = self._table.get(request), self._monitor.view_of(target)
        if entry is None:
            raise Refusal(404, f"there is no request {request!r}")
        if one is None:
            raise Refusal(404, f"there is no instance {target!r}")
        here = self._monitor.view_of(entry.worker) if entry.worker else None
        mover, source = entry.mover, entry.worker
        if mover is None or here is None or mover.movable(0.0, time.monotonic()) is None:
            raise Refusal(409, f"{request} has no running output that can move now")
        if source == target:
            raise Refusal(409, f"{request} is at {target} already")
        if one.state is not InstanceState.READY:
            raise Refusal(409, f"{target} takes no outputs: it is {one.state}")
        if one.info.alone or one.info.identity != here.info.identity:
            raise Refusal(409, f"{source} and {target} exchange no KV")
        if not mover.order(one.info, "order"):
            raise Refusal(409, f"{source} cannot be reached")
        return source

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self._look()
            except Exception:  # outputs stay where they are, then
                _log.exception("a look for outputs that should move failed")

    def _look(self) -> None:
        if not len(self._table):
            return
        view, now = self._monitor.view(), time.monotonic()
        table = self._tables.make(view, now)
        reasons = {each.info.id: why_leave(each, table) for each in view.instances}
        due = [each for each in view.instances if reasons[each.info.id]]
        if not due:
            return
        entries = self._entries_at({each.info.id for each in due})
        on_way = Counter(
            each.worker for each in self._table if each.mover is not None and each.mover.is_moving
        )
        infos = {each.info.id: each.info for each in view.instances}
        for one in due:
            usual = _usual_left(one)
            found = {each.id: each for each in entries.get(one.info.id, ())}
            outputs = [
                output
                for each in found.values()
                if each.mover is not None and (output := each.mover.movable(usual, now)) is not None
            ]
            reason = reasons[one.info.id]
            num_on_way = on_way[one.info.id]
            orders = choose_moves(one, reason, outputs, table, num_on_way, any_role=self.any_role)
            for order in orders:
                mover = found[order.request].mover
                if mover is not None:
                    mover.order(infos[order.target], order.reason)

    def _entries_at(self, instances: set[InstanceId]) -> dict[InstanceId, list[Entry]]:
        found: dict[InstanceId, list[Entry]] = {name: [] for name in instances}
        for entry in self._table:
            if entry.worker in found:
                found[entry.worker].append(entry)
        return found


def _usual_left(one: InstanceView) -> float:
    """Return the mean output that an instance expects its decodes to have left."""
    load = one.load
    return max(0.0, load.remaining_tokens / max(1.0, load.heavy + load.light))
