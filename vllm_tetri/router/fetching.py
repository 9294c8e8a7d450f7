"""The request by which an instance gets the KV of a prefix from the one that holds it."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import FIELD, Fetch, Prefilled, from_params
from vllm_tetri.messages import CancelTransfer, TransferLost
from vllm_tetri.router.errors import JSON_ERRORS, InstanceAtLimit, InstanceFailed
from vllm_tetri.router.request import ApiRequest
from vllm_tetri.router.retry import Scheduler
from vllm_tetri.types import InstanceInfo

_log = logging.getLogger(__name__)


class Fetching:
    """Asks the holder, at once, and tells the target if nothing will come. `end` it with the
    request that fetches."""

    def __init__(
        self, scheduler: Scheduler, request: ApiRequest, fetch: Fetch, holder: InstanceInfo
    ) -> None:
        self._scheduler, self._request = scheduler, request
        self._fetch, self._holder = fetch, holder
        self._task = asyncio.create_task(self._run())

    def end(self) -> None:
        """Drop what has not come, or was not used."""
        send, fetch = self._scheduler.monitor.send, self._fetch
        send(fetch.target, CancelTransfer(fetch.transfer))
        if not self._task.done():
            self._task.cancel()
            send(self._holder.id, CancelTransfer(fetch.transfer))
            self._record("late")

    async def _run(self) -> None:
        fetch, request, reason = self._fetch, self._request, ""
        headers = {**request.headers, "X-Request-Id": fetch.transfer.rpartition("/")[2]}
        try:
            upstream, body = self._scheduler.upstream, request.fetch_body(fetch)
            response = await upstream.send(self._holder, request, body, headers, lambda: True)
            answer = await upstream.body(self._holder, response)
            outcome = "sent" if _is_sent(answer) else "refused"
        except (InstanceFailed, InstanceAtLimit) as error:
            outcome, reason = "failed", f": {error}"
        if outcome != "sent":
            self._scheduler.monitor.send(fetch.target, TransferLost(fetch.transfer))
            _log.info("%s fetches nothing from %s%s", fetch.target, self._holder.id, reason)
        self._record(outcome)

    def _record(self, outcome: str) -> None:
        self._scheduler.metrics.fetches.labels(outcome).inc()
        if outcome != "sent":
            self._scheduler.placer.record_failed_fetch(self._holder.id, self._fetch.target)


def _is_sent(answer: bytes) -> bool:
    try:
        params = from_params(msgspec.json.decode(answer)[FIELD])
    except (*JSON_ERRORS, ProtocolError, LookupError, TypeError):
        return False
    return isinstance(params, Prefilled) and bool(params.decode)
