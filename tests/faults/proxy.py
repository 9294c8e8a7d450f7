"""A TCP proxy that breaks connections.

It runs on an event loop of its own in a thread of its own, so that tests with and
without a loop, and C++ threads, can talk through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass
from enum import Enum, auto

_PIECE = 65536
_POLL_S = 0.002
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets


class Kind(Enum):
    """What happens to a connection."""

    CUT = auto()  # both ends are reset
    END = auto()  # both ends are closed in good order: the rest is missing
    STALL = auto()  # nothing moves that way any more, until the trouble is over
    HALF_OPEN = auto()  # the server's end is reset, and the client is not told
    CORRUPT = auto()  # one byte has another value
    DELAY = auto()  # every piece comes later


@dataclass(frozen=True, slots=True)
class Trouble:
    """What happens, where and when."""

    kind: Kind
    after_bytes: int = 0  # of a connection
    up: bool = True  # to bytes from the client to the server, else to the others
    connection: int | None = None  # only to this one, in the order of their coming from 0
    delay_s: float = 0.0  # of every piece


class _Broken(Exception):
    pass


@dataclass(slots=True)
class _Bridge:
    """Two connections: to the client, and to the server."""

    number: int
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    is_mute: bool = False  # the client is told nothing any more


class Proxy:
    """Between clients and one server. Use it as a context manager."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._trouble: Trouble | None = None
        self.num_connections = 0  # that came so far
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._ends: list[asyncio.StreamWriter] = []
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    @classmethod
    def to(cls, endpoint: str) -> Proxy:
        """A proxy for ``HOST:PORT`` or ``http://HOST:PORT``."""
        host, _, port = endpoint.rpartition("/")[2].rpartition(":")
        return cls(host, int(port))

    @property
    def endpoint(self) -> str:
        """What clients connect to."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The same for HTTP."""
        return f"http://{self.endpoint}"

    def make(self, trouble: Trouble) -> None:
        """Trouble from now on."""
        self._trouble = trouble

    def clear(self) -> None:
        """No more trouble: what stalled goes on, what is broken stays so."""
        self._trouble = None

    # -- the proxy's own thread ---------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            number, self.num_connections = self.num_connections, self.num_connections + 1
            task = asyncio.create_task(self._connect(number, reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, sock=self._listener)
        await self._is_over.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in self._ends:
            end.transport.abort()
        for end in self._ends:
            with contextlib.suppress(OSError):
                await end.wait_closed()

    async def _connect(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ends = [writer]
        self._ends.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._server)
            ends.append(far_writer)
            self._ends.append(far_writer)
            bridge = _Bridge(number, writer, far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(bridge, reader, far_writer, up=True))
                group.create_task(self._pump(bridge, far_reader, writer, up=False))
        except* (OSError, _Broken):
            pass
        finally:
            for end in ends:
                end.close()

    async def _pump(
        self,
        bridge: _Bridge,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        up: bool,
    ) -> None:
        passed, before = 0, None
        while data := await reader.read(_PIECE):
            trouble = self._trouble_of(bridge.number)
            if trouble is not before:
                passed, before = 0, trouble
            if trouble is None or trouble.up is not up:
                writer.write(data)
            elif trouble.kind is Kind.STALL:
                await self._stall(trouble, writer, data, passed)
            else:
                writer.write(await self._break(trouble, bridge, writer, data, passed))
            await writer.drain()
            passed += len(data)
        if bridge.is_mute:
            await self._is_over.wait()
        writer.write_eof()

    def _trouble_of(self, number: int) -> Trouble | None:
        trouble = self._trouble
        return trouble if trouble is None or trouble.connection in (None, number) else None

    async def _stall(
        self, trouble: Trouble, writer: asyncio.StreamWriter, data: bytes, passed: int
    ) -> None:
        """What may pass before a stall, and the rest when it is over."""
        before = max(0, trouble.after_bytes - passed)
        writer.write(data[:before])
        while len(data) > before and self._trouble is trouble:
            await asyncio.sleep(_POLL_S)
        writer.write(data[before:])

    async def _break(
        self,
        trouble: Trouble,
        bridge: _Bridge,
        writer: asyncio.StreamWriter,
        data: bytes,
        passed: int,
    ) -> bytes:
        """What of a piece goes on."""
        if trouble.kind is Kind.DELAY:
            await asyncio.sleep(trouble.delay_s)
            return data
        place = trouble.after_bytes - passed
        if place >= len(data) or place < 0:
            return data
        if trouble.kind is Kind.CORRUPT:
            return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
        writer.write(data[:place])
        await writer.drain()
        if trouble.kind is Kind.HALF_OPEN:
            bridge.is_mute = True
            _reset(bridge.far)
            await self._is_over.wait()
        elif trouble.kind is Kind.CUT:
            _reset(bridge.near)
            _reset(bridge.far)
        raise _Broken

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(10)
        assert not self._thread.is_alive()


def _reset(end: asyncio.StreamWriter) -> None:
    """Close a connection so that the other side gets an error."""
    found = end.get_extra_info("socket")
    if found is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.transport.abort()
