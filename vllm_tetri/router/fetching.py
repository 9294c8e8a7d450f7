"""The requests by which instances get the KV of prefixes from those that hold them."""

from __future__ import annotations

import asyncio
import logging

from cachetools import TTLCache

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.handover import MAX_MARKS, Fetch
from vllm_tetri.messages import CancelTransfer, TransferLost
from vllm_tetri.policy.residency import Chain
from vllm_tetri.router.errors import InstanceAtLimit, InstanceFailed
from vllm_tetri.router.first_token import read_first_token
from vllm_tetri.router.metrics import Metrics
from vllm_tetri.router.placement import Placer
from vllm_tetri.router.request import ApiRequest
from vllm_tetri.router.table import Entry
from vllm_tetri.router.upstream import Upstream
from vllm_tetri.types import InstanceId, InstanceInfo

# How much of a reported chain a prompt has is an estimate; a little more is tried.
_SLACK = 1 + 1 / 16
_AVOID_S, _MAX_AVOIDED = 5.0, 1024  # how long a pair is left alone between which a fetch failed

_log = logging.getLogger(__name__)


class Fetching:
    """One such request; the target is told if nothing will come. `end` it with the request that
    fetches: what has not come is dropped."""

    def __init__(
        self, fetches: Fetches, request: ApiRequest, holder: InstanceInfo, fetch: Fetch
    ) -> None:
        self.fetch, self._fetches, self._holder = fetch, fetches, holder
        # What the holder did: `sent`, or another label of the metric.
        self.outcome = asyncio.create_task(self._run(request))

    def end(self) -> None:
        """Drop what has not come, or was not used."""
        self._fetches.monitor.send(self.fetch.target, CancelTransfer(self.fetch.transfer))
        if not self.outcome.done():
            self.outcome.cancel()
            self._fetches.monitor.send(self._holder.id, CancelTransfer(self.fetch.transfer))
            self._record("late")

    async def _run(self, request: ApiRequest) -> str:
        fetch, reason = self.fetch, ""
        try:
            body, name = request.fetch_body(fetch), fetch.transfer
            status, answer = await self._fetches.ask(self._holder, request, body, fetch)
            done = read_first_token(answer, name, is_chat=False) if status == 200 else None
            outcome = "sent" if done is not None and done.prefilled.decode else "refused"
        except (InstanceFailed, InstanceAtLimit) as error:
            outcome, reason = "failed", f": {error}"
        if outcome != "sent":
            self._fetches.monitor.send(fetch.target, TransferLost(fetch.transfer))
            _log.info("%s fetches nothing from %s%s", fetch.target, self._holder.id, reason)
        self._record(outcome)
        return outcome

    def _record(self, outcome: str) -> None:
        self._fetches.metrics.fetches.labels(outcome).inc()
        if outcome != "sent":
            self._fetches.avoided[self._holder.id, self.fetch.target] = None


class Fetches:
    """Begins fetches, as `placer` says. Owned by the event loop."""

    def __init__(
        self, placer: Placer, monitor: Monitor, upstream: Upstream, metrics: Metrics
    ) -> None:
        self._placer, self.monitor = placer, monitor
        self._upstream, self.metrics = upstream, metrics
        # Of holder and target; the first may have lost what it reported, or be out of reach.
        self.avoided: TTLCache[tuple[InstanceId, InstanceId], None] = TTLCache(
            _MAX_AVOIDED, _AVOID_S
        )

    async def ask(
        self, instance: InstanceInfo, request: ApiRequest, body: bytes, fetch: Fetch
    ) -> tuple[int, bytes]:
        """Send a request of a fetch to one of its two instances; return the status and body of the
        response. Raises `InstanceFailed` or `InstanceAtLimit`."""
        headers = {**request.headers, "x-request-id": fetch.transfer.rpartition("/")[2]}
        response = await self._upstream.send(instance, request, body, headers, lambda: True)
        return response.status, await self._upstream.body(instance, response)

    def begin(self, entry: Entry, target: InstanceInfo, request: ApiRequest) -> Fetching | None:
        """Let an instance that computes a prompt have a prefix of it from another one; None if
        computing is cheaper, or there was none to be had lately."""
        plan = self._placer.plan_fetch(target.id, request)
        if plan is None or (plan.holder, target.id) in self.avoided:
            return None
        holder, found = self.monitor.view_of(plan.holder), self._placer.look_up(request)
        if holder is None or found.known is None:
            return None
        names, size = found.known.chain
        num_blocks = min(found.held[plan.holder], round(plan.tokens * _SLACK)) // size
        marks = Chain(names[:num_blocks], size).marks(MAX_MARKS)
        held_tokens = found.cached.get(target.id, 0)
        transfer = entry.new_transfer()
        fetch = Fetch(transfer, target.id, target.kv_endpoint, marks, held_tokens, plan.wait_s)
        return Fetching(self, request, holder.info, fetch)
