"""The HTTP server for clients: its ports, how many connections it has, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

from vllm_tetri.logs import LimitLog
from vllm_tetri.router.app import App
from vllm_tetri.router.auth import Limits
from vllm_tetri.router.connection import Connection

_CHECK_S = 1.0  # accuracy of the deadlines of connections, at most
_HANDSHAKE_S = 10.0
_LOOK_AGAIN_S = 0.05
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class SharedPort:
    """A port that other processes of this user may have as well: each gets some of its connections
    (SO_REUSEPORT), and this one none before it `is_ready`."""

    number: int
    is_ready: Callable[[], object]

    def bind(self, host: str) -> socket.socket:
        """Bind a socket that does not listen yet; `serve` closes it. Raises `OSError`."""
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind((host, self.number))
        except OSError as error:
            bound.close()
            raise OSError(error.errno, f"port {self.number} of {host}: {error.strerror}") from error
        return bound

    async def serve(
        self, bound: socket.socket, listen: Callable[..., Awaitable[asyncio.Server]]
    ) -> None:
        """Listen at a bound socket once it is of use, until this is cancelled."""
        with bound:
            while not self.is_ready():
                await asyncio.sleep(_LOOK_AGAIN_S)
            async with await listen(sock=bound) as server:
                await server.serve_forever()


@dataclass(slots=True)
class Listener:
    """The address of its own port, and the admitted connections of all ports that are still open.
    At the end, requests may go on for `stop_s` seconds."""

    address: tuple[str, int]
    connections: set[Connection]
    stop_s: float = 0.5


@asynccontextmanager
async def listening(
    app: App,
    limits: Limits,
    address: tuple[str, int],
    tls: ssl.SSLContext | None = None,
    shared: SharedPort | None = None,
) -> AsyncIterator[Listener]:
    """Start the application and listen; close it at the end. Raises `OSError`: a port cannot be
    bound; `ConfigError`: the application cannot start."""
    connections, limit_log, loop = set[Connection](), LimitLog(), asyncio.get_running_loop()
    try:
        app.start()
        listen = partial(
            loop.create_server,
            lambda: cast(asyncio.Protocol, Connection(app, limits, connections, limit_log)),
            backlog=_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=_HANDSHAKE_S if tls else None,
        )
        port = await listen(*address)
        tasks = [loop.create_task(_watch(connections, limits))]
        listener = Listener(port.sockets[0].getsockname()[:2], connections)
        try:
            if shared is not None:
                tasks.append(loop.create_task(shared.serve(shared.bind(address[0]), listen)))
            yield listener
        finally:
            for task in tasks:
                task.cancel()
            port.close()
            await asyncio.sleep(0)  # requests that were accepted begin
            await _stop(app, connections, loop.time() + listener.stop_s)
    finally:
        await app.close()


async def _stop(app: App, connections: set[Connection], until_s: float) -> None:
    """Let requests end that have begun, then close all connections."""
    app.end_streams()
    loop = asyncio.get_running_loop()
    while True:
        for each in [*connections]:
            each.close_when_idle()
        is_busy = any(each.task or each.has_unsent for each in connections)
        if not is_busy or loop.time() >= until_s:
            break
        await asyncio.sleep(_LOOK_AGAIN_S)
    tasks = [each.task for each in connections if each.task is not None]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def _watch(connections: set[Connection], limits: Limits) -> None:
    while True:
        now = asyncio.get_running_loop().time()
        for connection in list(connections):
            connection.check_time(now)
        least_s = min(limits.head_s, limits.stalled_s, limits.idle_s)
        await asyncio.sleep(min(_CHECK_S, least_s / 4))
