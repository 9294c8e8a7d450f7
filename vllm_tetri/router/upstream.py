"""HTTP from the router to the instances: one connection pool, and what may go wrong."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from weakref import WeakSet

import aiohttp

from vllm_tetri.router.answers import LegBusy, LegFailed, is_busy, is_busy_event
from vllm_tetri.types import InstanceId, InstanceInfo

_KEEPALIVE_S = 3.0  # vLLM closes idle connections after 5 s
_CONNECT_S = 5.0
_MAX_CONNECTIONS = 8192
_MAX_ERROR_BYTES = 4096
_AT_ONCE = 0.0


class Upstream:
    """Connections to all instances. Build it on a running event loop and close it there.

    Args:
        first_byte_s: Longest wait for an instance's next byte, in seconds.
    """

    def __init__(self, first_byte_s: float) -> None:
        self._first_byte_s = first_byte_s
        self._waiting: defaultdict[InstanceId, WeakSet[asyncio.Timeout]] = defaultdict(WeakSet)
        self._answers: defaultdict[InstanceId, WeakSet[aiohttp.ClientResponse]] = defaultdict(
            WeakSet
        )
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=_MAX_CONNECTIONS, limit_per_host=0, keepalive_timeout=_KEEPALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S, sock_read=first_byte_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=1 << 18,
        )

    async def post(
        self, instance: InstanceInfo, path: str, body: bytes, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a leg and wait for the head of its answer.

        Raises:
            LegFailed: No answer, or one that says that the instance is in trouble.
            LegBusy: The instance has no room; it has not taken the request.
        """
        response = await self.send(instance, "POST", path, body, headers)
        if response.status >= 500:
            raise await _trouble(instance, response)
        return response

    async def send(
        self,
        instance: InstanceInfo,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        """Send anything and wait for the head of the answer, whatever it says.

        A connection that the instance closed while it was idle is tried once
        more on a fresh one. The caller closes the response.

        Raises:
            LegFailed: No answer.
        """
        url = instance.url + path
        limit = asyncio.timeout(self._first_byte_s)
        self._waiting[instance.id].add(limit)
        try:
            async with limit:
                try:
                    response = await self._send(method, url, body, headers)
                except aiohttp.ClientConnectorError:
                    raise
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    response = await self._send(method, url, body, headers)
        except aiohttp.ServerTimeoutError as error:
            raise LegFailed(
                instance.id, f"no connection in {_CONNECT_S:g} s", status=503
            ) from error
        except TimeoutError as error:
            if limit.when() == _AT_ONCE:
                raise LegFailed(instance.id, "has left", status=503) from error
            raise self._late(instance) from error
        except aiohttp.ClientConnectorError as error:
            raise LegFailed(instance.id, f"cannot connect: {error}", status=503) from error
        except aiohttp.ClientError as error:
            raise LegFailed(instance.id, f"connection lost: {error!r}") from error
        finally:
            self._waiting[instance.id].discard(limit)
        self._answers[instance.id].add(response)
        return response

    def hang_up(self, instance: InstanceId) -> None:
        """Wait no longer for anything of an instance that left before it had finished: its
        server ends only when nobody is connected any more."""
        for limit in self._waiting.pop(instance, ()):
            if not limit.expired():
                limit.reschedule(_AT_ONCE)
        for response in self._answers.pop(instance, ()):
            response.close()

    async def first_chunk(self, instance: InstanceInfo, response: aiohttp.ClientResponse) -> bytes:
        """The first bytes of a streamed answer; empty when it ends at once.

        Raises:
            LegFailed: The stream broke or stays silent for too long.
            LegBusy: All it says is that the instance has no room.
        """
        try:
            async with asyncio.timeout(self._first_byte_s):
                chunk = await response.content.readany()
                while chunk.startswith(b":") and chunk.count(b"\n\n") == 1:
                    chunk = await response.content.readany()  # it only keeps alive
        except TimeoutError as error:
            raise self._late(instance) from error
        except aiohttp.ClientError as error:
            raise LegFailed(instance.id, f"connection lost: {error!r}") from error
        if is_busy_event(chunk):
            raise LegBusy(instance.id)
        return chunk

    async def body(self, instance: InstanceInfo, response: aiohttp.ClientResponse) -> bytes:
        """All bytes of an answer.

        Raises:
            LegFailed: The answer broke off.
        """
        try:
            return await response.read()
        except aiohttp.ClientError as error:
            raise LegFailed(instance.id, f"answer broke off: {error!r}") from error

    async def is_healthy(self, url: str, timeout_s: float) -> bool:
        """Whether ``/health`` answers 200."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(f"{url}/health") as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        await self._session.close()

    async def _send(
        self, method: str, url: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        return await self._session.request(
            method, url, data=body or None, headers=headers, allow_redirects=False
        )

    def _late(self, instance: InstanceInfo) -> LegFailed:
        reason = f"no answer within {self._first_byte_s:g} s"
        return LegFailed(instance.id, reason, status=504, is_final=True)


async def _trouble(instance: InstanceInfo, response: aiohttp.ClientResponse) -> LegFailed | LegBusy:
    text = bytearray()
    try:
        async with asyncio.timeout(_CONNECT_S):
            while len(text) < _MAX_ERROR_BYTES and (chunk := await response.content.readany()):
                text += chunk
    except (aiohttp.ClientError, TimeoutError):
        pass
    finally:
        response.close()
    if is_busy(response.status, bytes(text)):
        return LegBusy(instance.id)
    status = 503 if response.status == 503 else 502
    words = text[:_MAX_ERROR_BYTES].decode(errors="replace")
    return LegFailed(instance.id, f"HTTP {response.status} {words}".strip(), status=status)
