"""Requests to instances over HTTP, what their failures mean, and whether instances are alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import suppress
from math import inf
from typing import TypeVar

from vllm_tetri.handover import RANK_HEADER
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
from vllm_tetri.router.request import ApiRequest, headers_without
from vllm_tetri.router.response import HttpResponse
from vllm_tetri.types import InstanceInfo

_ERROR_BODY_S = 5.0
_MAX_ERROR_BYTES = 4096
_ALIVE_S = 1.0  # longest wait for `/health` of an instance that failed a request
_AUTHORIZATION = "authorization"
_RANK = frozenset({RANK_HEADER.lower()})
_REFUSES_KEY = (
    "refuses this router's key: give the router TETRI_INSTANCE_API_KEY, and instances the same as "
    "VLLM_API_KEY"
)

_Key = TypeVar("_Key", bound=Hashable)
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def shared(
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
        if response.status == 401 and self._authorization is not None:
            response.close()
            raise InstanceFailed(instance.id, _REFUSES_KEY, is_suspect=False)
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
        return await asyncio.shield(shared(self._checks, instance.url, check))

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
                return InstanceFailed(instance.id, reason, status=504, is_final=True, is_mute=True)
            case Unreachable():
                words = str(error)
                return InstanceFailed(
                    instance.id, words, status=503, is_suspect=False, is_mute=True
                )
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
