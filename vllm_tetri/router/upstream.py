"""Requests to instances over HTTP, what their failures mean, and whether instances are alive."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import suppress
from math import inf
from typing import TypeVar

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.handover import RANK_HEADER
from vllm_tetri.messages import TransferLost
from vllm_tetri.policy.route import apart
from vllm_tetri.router.errors import (
    ERROR_EVENT,
    GivenUp,
    HttpError,
    InstanceAtLimit,
    InstanceFailed,
    Silent,
    Unreachable,
    internal_error_in,
    is_at_limit,
    is_at_limit_event,
    is_failure,
)
from vllm_tetri.router.http_client import HttpClient
from vllm_tetri.router.request import ApiRequest, headers_without, parts_of
from vllm_tetri.router.response import HttpResponse
from vllm_tetri.router.table import RequestTable
from vllm_tetri.types import InstanceId, InstanceInfo, InstanceState

_ERROR_BODY_S = 5.0
_MAX_ERROR_BYTES = 4096
_ALIVE_S = 1.0  # longest wait for `/health` of an instance that failed a request
_AUTHORIZATION = "authorization"
_RANK = frozenset({RANK_HEADER.lower()})
_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 1.0
_TIMEOUT_S = 5.0
_CHECKS = 24  # liveness checks per `after_s`
# Missed checks after which resumable streams move to another instance.
_MIGRATION_CHECKS = _CHECKS // 2
_GOODBYE_S = 0.3  # by then the message of an instance that ended in good order has arrived
_REACH_S = 1.0
_NO_ROUTE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})

_Key = TypeVar("_Key", bound=Hashable)
_T = TypeVar("_T")
_APART_ADVICE = (
    "; give instances that shall share them the same checkpoint and options, others another "
    "--served-model-name"
)

_log = logging.getLogger(__name__)


async def repeat(
    what: str,
    look: Callable[[], None],
    period_s: float,
    *,
    is_on: bool = True,
    due: asyncio.Event | None = None,
) -> None:
    """Look at something each period, and at once when that is `due`. A look that fails changes
    nothing, and the next one comes."""
    due = due or asyncio.Event()
    while is_on:
        with suppress(TimeoutError):
            await asyncio.wait_for(due.wait(), period_s)
        due.clear()
        try:
            look()
        except Exception:
            _log.exception("a %s failed; the next one is in %g s", what, period_s)


def _shared(
    tasks: dict[_Key, asyncio.Task[_T]], key: _Key, work: Coroutine[None, None, _T]
) -> asyncio.Task[_T]:
    """Return the task that does some work already, or begin it."""
    if (task := tasks.get(key)) is not None:
        work.close()
        return task
    task = tasks[key] = asyncio.ensure_future(work)
    task.add_done_callback(lambda _: tasks.pop(key, None))
    return task


class Upstream:
    """Connections to all instances. Build it on a running event loop and close it there.

    `first_byte_s` is the longest wait for the next byte of an instance that makes no progress, in
    seconds.
    """

    def __init__(
        self, first_byte_s: float, authorization: str | None = None, max_flows: float = inf
    ) -> None:
        self._authorization = authorization
        self.http = HttpClient(first_byte_s, max_flows)
        self._checks: dict[str, asyncio.Task[bool]] = {}

    async def send(
        self,
        instance: InstanceInfo,
        request: ApiRequest,
        body: bytes,
        headers: Mapping[str, str],
        may_migrate: Callable[[], bool],
    ) -> HttpResponse:
        """Send a body for a request and wait for the head of its response, to be closed by the
        caller. `may_migrate` tells whether another instance can take over. Raises
        `InstanceFailed`: there is no response, or one of status 5xx to a request that is not
        proxied; `InstanceAtLimit`: the instance did not take the request."""
        url, method, headers = instance.url, request.method, self._authorized(headers)
        if instance.rank is not None:
            headers = {**headers_without(_RANK, headers), RANK_HEADER: str(instance.rank)}
        try:
            response = await self.http.send(
                url, method, request.path, body, headers, instance.id, may_migrate
            )
        except HttpError as error:
            raise self._failure(instance, error) from error
        if request.rules is None and is_failure(response.status):
            raise await _read_error(instance, response)
        return response

    async def first_chunk(self, instance: InstanceInfo, response: HttpResponse) -> bytes:
        """Return the first bytes of a stream, without comments before its first event; empty when
        it ends at once. Raises `InstanceFailed`: the stream broke, or no byte came in time;
        `InstanceAtLimit`: the stream says only that the instance is at its limit."""
        since_s = asyncio.get_running_loop().time()
        try:
            chunk = await response.read_some()
            while chunk.startswith(b":") and b"\n\n" in chunk:  # a keep-alive comment
                chunk = chunk.partition(b"\n\n")[2]
                if not chunk:
                    if self.http.is_silent(instance.id, since_s):
                        raise Silent
                    chunk = await response.read_some()
        except HttpError as error:
            raise self._failure(instance, error) from error
        if is_at_limit_event(chunk):
            raise InstanceAtLimit(instance.id)
        # The other beginning is that of `/v1/messages`.
        if chunk.startswith((ERROR_EVENT, b"event: error\n")) and not await self.is_alive(instance):
            raise InstanceFailed(instance.id, "its engine crashed")
        return chunk

    async def body(self, instance: InstanceInfo, response: HttpResponse) -> bytes:
        """Return all bytes of a response, which is closed; raises `InstanceFailed`."""
        try:
            return await response.read()
        except HttpError as error:
            raise InstanceFailed(instance.id, f"the response broke off: {error}") from error
        finally:
            response.close()

    async def is_alive(self, instance: InstanceInfo) -> bool:
        """Whether an instance that failed a request is healthy; one check for all requests."""
        check = self.is_healthy(instance.url, _ALIVE_S)
        return await asyncio.shield(_shared(self._checks, instance.url, check))

    async def is_healthy(self, url: str, timeout_s: float) -> bool:
        """Whether ``/health`` answers 200."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.http.send(url, "GET", "/health", b"", {})
        except (HttpError, TimeoutError):
            return False
        response.close()
        return response.status == 200

    async def ask(
        self,
        url: str,
        path: str,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> tuple[HttpResponse, bytes] | None:
        """Return the response to a GET, or to a POST of a body, and its body; None if they do not
        come in time."""
        response, headers = None, self._authorized(headers or {})
        try:
            async with asyncio.timeout(timeout_s):
                method = "POST" if body else "GET"
                response = await self.http.send(url, method, path, body, headers)
                return response, await response.read()
        except (HttpError, TimeoutError):
            return None
        finally:
            if response is not None:
                response.close()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for check in list(self._checks.values()):
            check.cancel()
        self.http.close()

    def _authorized(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        if self._authorization is None:
            return headers
        kept = headers_without(frozenset({_AUTHORIZATION}), headers)
        return {**kept, _AUTHORIZATION: self._authorization} if self._authorization else kept

    def _failure(self, instance: InstanceInfo, error: HttpError) -> InstanceFailed:
        match error:
            case Silent():
                reason = f"computed nothing and sent no byte within {self.http.silence_s:g} s"
                return InstanceFailed(instance.id, reason, status=504, is_final=True)
            case Unreachable():
                return InstanceFailed(instance.id, str(error), status=503, is_suspect=False)
            case GivenUp():
                return InstanceFailed(instance.id, str(error), status=503)
        return InstanceFailed(instance.id, f"connection lost: {error}")


async def _read_error(
    instance: InstanceInfo, response: HttpResponse
) -> InstanceFailed | InstanceAtLimit:
    text = b""
    with suppress(HttpError, TimeoutError):
        async with asyncio.timeout(_ERROR_BODY_S):
            while len(text) < _MAX_ERROR_BYTES and (chunk := await response.read_some()):
                text += chunk
    response.close()
    if is_at_limit(response.status, text):
        return InstanceAtLimit(instance.id)
    status = 503 if response.status == 503 else 502
    words = text[:_MAX_ERROR_BYTES].decode(errors="replace")
    reason = f"HTTP {response.status} {words}".strip()
    internal = internal_error_in(response.status, text)
    return InstanceFailed(instance.id, reason, status=status, internal=internal)


class Liveness:
    """Probes new instances until their HTTP servers respond, and fails the requests of
    instances that stop reporting. Owned by the event loop.

    After `after_s` seconds without a report all requests of an instance fail; after half of
    it resumable streams move, which costs one prefill each, and decode instances are told that its
    KV may be lost. Time is counted in checks, so that a router that was stopped itself fails no
    requests. It also says once which instances exchange no KV. A new instance is welcomed before
    it is used.
    """

    def __init__(
        self,
        monitor: Monitor,
        upstream: Upstream,
        table: RequestTable,
        welcome: Callable[[InstanceInfo], Coroutine[None, None, None]],
        *,
        after_s: float,
    ) -> None:
        self._monitor, self._upstream, self._table = monitor, upstream, table
        self._after_s, self._welcome = after_s, welcome
        self._roster, self._apart = 0, dict[InstanceId, str]()  # as compared last
        # Process and sequence number of the last report, and checks since then.
        self._reports: dict[InstanceId, tuple[tuple[int, int], int]] = {}
        # Tokens that an instance has computed, and since when that number stands.
        self._progress: dict[InstanceId, tuple[int, float]] = {}
        self._probes: dict[tuple[str, int, str], asyncio.Task[None]] = {}
        self._crashes: dict[tuple[InstanceId, int], asyncio.Task[bool]] = {}
        look = repeat("look at silent instances", self._look, after_s / _CHECKS)
        self._task = asyncio.get_running_loop().create_task(look, name="liveness")

    async def close(self) -> None:
        """Stop all checks and probes. Idempotent."""
        tasks = (self._task, *self._crashes.values(), *self._probes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def probe(self, info: InstanceInfo) -> None:
        """Probe an instance until it responds, is replaced or forgotten.

        A silent instance is probed on: it may be slow to start, or the router was stopped.
        """
        _shared(self._probes, (info.id, info.pid, info.url), self._probe(info))

    async def _probe(self, info: InstanceInfo) -> None:
        wait_s = _FIRST_WAIT_S
        while self._monitor.members.is_known(info):
            if await self._upstream.is_healthy(info.url, _TIMEOUT_S):
                await self._welcome(info)
                self._monitor.members.mark_ready(info)
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def has_crashed(self, instance: InstanceInfo) -> bool:
        """Whether an instance that failed a request crashed or hangs.

        False if it responds, if it drains or has ended in good order, if it was silent and
        reports again (its machine had too much to do), and if not even its host responds: a
        broken network or machine is not the fault of a request.
        """
        process = (instance.id, instance.pid)
        check = self._check_crash(instance)
        return await asyncio.shield(_shared(self._crashes, process, check))

    async def _check_crash(self, instance: InstanceInfo) -> bool:
        is_alive, has_host = await asyncio.gather(
            self._upstream.is_alive(instance), is_reachable(instance.url)
        )
        if is_alive or not has_host:
            return False
        report, missed = self._reports.get(instance.id, (None, 0))
        was_silent = missed >= _MIGRATION_CHECKS
        await asyncio.sleep(self._after_s if was_silent else _GOODBYE_S)
        one = self._monitor.view_of(instance.id)
        if one is None or one.state is InstanceState.DRAINING:
            return False
        is_same = one.info.pid == instance.pid
        if was_silent and is_same and report != (instance.pid, one.seq):
            return False  # it reports again
        _log.error("%s (process %d) crashed or hangs", instance.id, instance.pid)
        return True

    def _compare(self) -> None:
        if self._roster == self._monitor.members.roster:
            return
        self._roster, before = self._monitor.members.roster, self._apart
        infos = {each.info.id: each.info for each in self._monitor.view().instances}
        self._apart = apart(infos.values())
        for instance in self._apart.keys() - before.keys():
            advice = "" if infos[instance].alone else _APART_ADVICE
            _log.warning(
                "%s. Requests are served aggregated there%s.", self._apart[instance], advice
            )

    def _look(self) -> None:
        self._compare()
        known, self._reports = self._reports, {}
        progress, self._progress = self._progress, {}
        now = asyncio.get_running_loop().time()
        for each in self._monitor.view().instances:
            name, report = each.info.id, (each.info.pid, each.seq)
            num_tokens = each.load.prompt_tokens_done + each.load.output_tokens_done
            before = progress.get(name, (0, 0.0))
            self._progress[name] = before if before[0] == num_tokens else (num_tokens, now)
            last, missed = known.get(name, (None, 0))
            missed = missed + 1 if report == last else 0
            self._reports[name] = report, missed
            if missed == _MIGRATION_CHECKS:
                for decode, transfer in self._table.handed_over_by(name):
                    self._monitor.send(decode, TransferLost(transfer))
            if missed >= _MIGRATION_CHECKS and self._table.workers[name]:
                self._fail_requests(name, is_final=missed >= _CHECKS)
        since = self._progress.items()
        self._upstream.http.progress_s = {name: since_s for name, (_, since_s) in since}

    def _fail_requests(self, name: InstanceId, *, is_final: bool) -> None:
        quiet_s = self._after_s if is_final else self._after_s * _MIGRATION_CHECKS / _CHECKS
        why = f"no report for {quiet_s:g} s"
        num_failed = self._upstream.http.fail_requests(
            name, why, quiet_s=quiet_s, only_migratable=not is_final
        )
        if num_failed:
            what = "requests are retried or fail" if is_final else "streams move elsewhere"
            _log.warning("%s: %s; %d %s", name, why, num_failed, what)


async def is_reachable(url: str, timeout_s: float = _REACH_S) -> bool:
    """Whether the host of a server responds, if only by refusing the connection.

    The host of a process that hangs does; one behind a broken network does not.
    """
    loop = asyncio.get_running_loop()
    try:
        parts, port = parts_of(url)
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                asyncio.Protocol, parts.hostname or "", port
            )
    except TimeoutError:  # ETIMEDOUT is one, too
        return False
    except OSError as error:
        return error.errno not in _NO_ROUTE
    except Unreachable:
        return True  # not an address
    transport.abort()
    return True
