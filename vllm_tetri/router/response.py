"""What an instance responds: a head, and a body that is read, poured out or flows by itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

from vllm_tetri.router import _core
from vllm_tetri.router._core import Flow, FlowState
from vllm_tetri.router.errors import ABORTED, DONE, ERROR_EVENT, ConnectionLost, HttpError

_MAX_UNREAD_BYTES = 1 << 17  # above twice this reading pauses: a slow client slows its instance
_MAX_AT_ONCE_BYTES = 1 << 16  # poured out before other streams have their turn
_MAX_BODY_BYTES = 1 << 29  # of a response that is read whole, as embeddings
_READS_AT_ONCE = 32  # of all flows, before anything else has its turn
# After a read others are waited for: instances write an event of every stream in a few
# milliseconds, and waking up for each would cost as much as moving it.
_GATHER_S = 0.001
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+")


class Pump:
    """All flows of an event loop: events that the C++ core moves from the sockets of instances to
    those of clients. Build it on the loop, and close it there. A flow ends before an error, an
    aborted output and the end of a stream; `most` may go on at a time, as each needs two files."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._core = _core.Pump([ERROR_EVENT, ABORTED, DONE])
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._core.fileno(), self._turn)
        self._next: asyncio.Handle | None = None  # instead of the descriptor
        self._flows: dict[Flow, tuple[FlowRules, Callable[[], None]]] = {}

    def begin(self, source: int, target: int, rules: FlowRules, stop: Callable[[], None]) -> Flow:
        """Let events flow between two sockets, and call `stop` once if that ends by itself; `end`
        it in any case. Raises `RuntimeError`: there is no descriptor, or there are enough flows."""
        if len(self._flows) >= self._most:
            raise RuntimeError("as many streams flow as may")
        flow = self._core.begin(
            source,
            target,
            keeps=rules.keep is not None,
            hides_ids=rules.hides_ids,
            drops_empty=rules.drops_empty,
            theirs=rules.theirs,
            ours=rules.ours,
        )
        self._flows[flow] = rules, stop
        return flow

    def end(self, flow: Flow) -> bytes:
        """End a flow, and return the bytes that were read and are no part of it."""
        self._flows.pop(flow, None)
        return flow.end()

    def close(self) -> None:
        """Move no more bytes. Idempotent."""
        self._loop.remove_reader(self._core.fileno())
        if self._next is not None:
            self._next.cancel()

    def _turn(self) -> None:
        num_read, told = self._core.turn(_READS_AT_ONCE)
        if num_read == 0:
            self._next = None
            self._loop.add_reader(self._core.fileno(), self._turn)
        else:
            if self._next is None:
                self._loop.remove_reader(self._core.fileno())
            wait_s = 0.0 if num_read == _READS_AT_ONCE else _GATHER_S
            self._next = self._loop.call_later(wait_s, self._turn)
        for flow in told:
            rules, stop = self._flows[flow]
            if flow.state is not FlowState.KEPT:
                del self._flows[flow]
                stop()
            elif rules.keep is not None:
                rules.keep(flow.take_kept())


class FlowRules(NamedTuple):
    """What happens to events on their way. `keep` gets them, some time later; token ids are
    hidden, and with them the events of a chat that hold nothing else; the time of creation in them
    is replaced, unless it is empty."""

    keep: Callable[[bytes], None] | None = None
    hides_ids: bool = False
    drops_empty: bool = False
    theirs: bytes = b""
    ours: bytes = b""


class Carrier(Protocol):
    """The connection that a response comes by."""

    def drop(self, error: HttpError) -> None: ...
    def resume_reading(self) -> None: ...
    def begin_flow(
        self, target: int, rules: FlowRules, stop: Callable[[], None]
    ) -> Flow | None: ...
    def end_flow(self) -> None: ...


class HttpResponse:
    """An instance's response to one request; to be closed. Names of headers and the media type are
    in lower case; of repeated headers the last counts."""

    def __init__(self, connection: Carrier, status: int, headers: dict[str, str]) -> None:
        self._connection: Carrier | None = connection
        self._error: HttpError | None = None
        self._unread, self._num_peeked = bytearray(), 0
        self._take: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[bool] | None = None  # of the newest reader
        self.status, self.headers = status, headers
        self.content_type = _media_type(headers.get("content-type", ""))

    async def read_some(self) -> bytes:
        """Return the bytes since the last call, at least one; empty at the end. Raises
        `ConnectionLost` if the rest will not come."""
        if not self._unread:
            await self._wait()
        some, self._num_peeked = bytes(self._unread), 0
        self._unread.clear()
        return some

    async def pour(self, take: Callable[[bytes], bool]) -> bool:
        """Call `take` with bytes at once as they come until it returns False; returns whether it
        did. Raises what it raises, and `ConnectionLost` if the rest will not come."""
        if self._unread and not take(await self.read_some()):
            return True
        return await self._wait(take)

    async def pour_rest(self, take: Callable[[bytes], bool], within_s: float) -> None:
        """`pour` what is left, if it comes in time; mostly there is nothing left."""
        if self._connection is None and not self._unread:
            return
        with suppress(HttpError, TimeoutError):
            async with asyncio.timeout(within_s) if self._connection else nullcontext():
                await self.pour(take)

    def begin_flow(self, target: int, rules: FlowRules) -> Flow | None:
        """Let a flow take the body to another socket; None if that cannot begin now. It goes on
        until `flows` returns or is cancelled."""
        if self._unread or self._connection is None:
            return None
        loop = asyncio.get_running_loop()
        self._take, self._waiter = None, loop.create_future()
        return self._connection.begin_flow(target, rules, partial(wake, self._waiter))

    async def flows(self) -> None:
        """Wait until a flow stops; the rest of the body is to be read."""
        assert self._waiter is not None
        try:
            await self._waiter
        finally:
            if self._connection is not None:
                self._connection.end_flow()

    async def peek(self) -> bytes:
        """Wait for more bytes and return all unread ones, which stay unread; empty at the end."""
        is_more = len(self._unread) > self._num_peeked or await self._wait()
        self._num_peeked = len(self._unread)
        return bytes(self._unread) if is_more else b""

    async def is_good(self) -> bool:
        """Whether its status is 200, and what comes first does not say that its engine aborted the
        request."""
        return self.status == 200 and ABORTED not in await self.peek()

    async def read(self) -> bytes:
        """Return all unread bytes; raises `ConnectionLost` if some will not come, or there are
        too many."""
        is_whole = self._connection is None and self._error is None
        if is_whole and len(self._unread) <= _MAX_BODY_BYTES:  # as mostly
            return await self.read_some() if self._unread else b""
        body = bytearray()
        while some := await self.read_some():
            body += some
            if len(body) > _MAX_BODY_BYTES:
                self.close()
                raise ConnectionLost(f"the response has more than {_MAX_BODY_BYTES} bytes")
        return bytes(body)

    def close(self) -> None:
        """Give up the rest of the response. Idempotent."""
        if self._connection is not None:
            self._connection.drop(ConnectionLost("closed"))

    def feed(self, data: bytes) -> bool:
        """Take a part of the body; returns False if too much of it is unread."""
        waiter, take = self._waiter, self._take
        is_awaited = waiter is not None and not waiter.done()  # it may be cancelled
        if waiter is None or not is_awaited or take is None:
            self._unread += data
            if waiter is not None and is_awaited:
                waiter.set_result(True)
            return is_awaited or len(self._unread) <= 2 * _MAX_UNREAD_BYTES
        try:
            if not take(data) or len(data) > _MAX_AT_ONCE_BYTES:
                waiter.set_result(True)
        except Exception as error:
            waiter.set_exception(error)
        return True

    def end(self, error: HttpError | None = None) -> None:
        """Mark the end of the response, or the error that ended it."""
        self._connection, self._error = None, error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)

    async def _wait(self, take: Callable[[bytes], bool] | None = None) -> bool:
        """Wait until bytes come, or until `take` wants no more; returns False at the end."""
        is_more = False
        if self._connection is not None:
            self._connection.resume_reading()
            self._take, self._waiter = take, asyncio.get_running_loop().create_future()
            is_more = await self._waiter
        if not is_more and self._error is not None:
            raise self._error
        return is_more


@lru_cache(maxsize=256)
def _media_type(value: str) -> str:
    kind = value.partition(";")[0].strip().lower()
    return kind if _MEDIA_TYPE.fullmatch(kind) else "application/octet-stream"


def wake(waiter: asyncio.Future[bool] | None) -> None:
    """Let a task go on that waits, if one still does."""
    if waiter is not None and not waiter.done():
        waiter.set_result(True)


def close_result(sent: asyncio.Future[Any]) -> None:
    """Close the response that a request got, if it got one."""
    if not sent.cancelled() and sent.exception() is None and (response := sent.result()):
        response.close()
