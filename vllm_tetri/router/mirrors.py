"""Long outputs are copied to a second instance while they run, so that a death costs a tail.

A copy is two requests for one token each: the instance that has the output sends blocks from its
prefix cache, and the other one fetches them into its own (`handover.Fetch`).
"""

from __future__ import annotations

import asyncio
import logging
import time

from vllm_tetri.handover import Fetch
from vllm_tetri.policy.mirrors import SHARE, Mirror, MirrorOrder, choose_mirrors
from vllm_tetri.router.errors import InstanceAtLimit, InstanceFailed
from vllm_tetri.router.fetching import Fetches, Fetching
from vllm_tetri.router.liveness import repeat
from vllm_tetri.router.placement import Placer
from vllm_tetri.router.request import ApiRequest
from vllm_tetri.router.table import Entry, RequestTable
from vllm_tetri.types import InstanceId, InstanceInfo

_LOOK_S = 0.1  # between two looks for outputs that have grown
_WAIT_S = 10.0  # of an instance for blocks
_LONGEST_S = 30.0  # of a copy
_RETRY_S = 5.0  # after a copy that failed, in which its instances take part in none

_log = logging.getLogger(__name__)


class Mirrors:
    """Copies what outputs have grown by, once that is `every` tokens; none if that is 0. Build it
    on a running event loop."""

    def __init__(self, table: RequestTable, placer: Placer, fetches: Fetches, every: int) -> None:
        self._table, self._placer, self._fetches = table, placer, fetches
        self._every = every
        self._busy: dict[InstanceId, float] = {}  # until when
        self._copies: set[asyncio.Task[None]] = set()
        watch = repeat("look for copies", self._look, _LOOK_S, is_on=every > 0)
        self._task = asyncio.get_running_loop().create_task(watch)

    async def close(self) -> None:
        """Copy nothing any more. Idempotent."""
        tasks = {self._task, *self._copies}
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self) -> None:
        now = time.monotonic()
        self._busy = {name: until_s for name, until_s in self._busy.items() if until_s > now}
        long = [each for each in self._table if each.generated >= self._every]
        movers = {each.id: (each, each.mover) for each in long if each.mover is not None}
        outputs = [found for _, mover in movers.values() if (found := mover.growing()) is not None]
        if not outputs:
            return
        table = self._placer.table(now)
        views = {each.info.id: each.info for each in table.view.instances}
        for order in choose_mirrors(table, outputs, self._busy, self._every):
            (entry, mover), target = movers[order.request], views[order.target]
            self._busy |= dict.fromkeys((order.source, order.target), now + _LONGEST_S)
            source, copied = views[order.source], mover.copied()
            copy = asyncio.create_task(self._copy(entry, order, copied, source, target))
            self._copies.add(copy)
            copy.add_done_callback(self._copies.discard)

    async def _copy(
        self,
        entry: Entry,
        order: MirrorOrder,
        request: ApiRequest,
        source: InstanceInfo,
        target: InstanceInfo,
    ) -> None:
        begin_s, generated = time.monotonic(), entry.generated
        num_tokens = request.approx_tokens - 1  # of the last one there may be no KV
        fetch = Fetch(
            entry.new_transfer(), target.id, target.kv_endpoint, [], order.held_tokens, _WAIT_S,
            num_tokens,
        )  # fmt: skip
        sending = Fetching(self._fetches, request, source, fetch)
        taking = asyncio.ensure_future(self._take(request, target, fetch))
        is_copied = False
        try:
            async with asyncio.timeout(_LONGEST_S):
                is_copied = await asyncio.shield(sending.outcome) == "sent" and await taking
        except TimeoutError:
            pass
        finally:
            taking.cancel()
            sending.end()
            now = time.monotonic()
            rest_s = max((SHARE - 1) * (now - begin_s), 0.0 if is_copied else _RETRY_S)
            self._busy |= dict.fromkeys((source.id, target.id), now + rest_s)
            outcome = "copied" if is_copied else "failed"
            self._fetches.metrics.mirrors.labels(outcome).inc()
        if is_copied:
            entry.mirror = Mirror(target.id, target.pid, num_tokens, generated)
        else:
            _log.info("request %s: %s has no copy of it from %s", entry.id, target.id, source.id)

    async def _take(self, request: ApiRequest, target: InstanceInfo, fetch: Fetch) -> bool:
        """Let the target fetch the blocks; return whether it has the whole prompt then."""
        body = request.aggregated_body(target, fetch)
        try:
            return (await self._fetches.ask(target, request, body, fetch))[0] == 200
        except (InstanceFailed, InstanceAtLimit):
            return False
