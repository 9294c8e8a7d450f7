"""A port for clients that several routers of one host have, without a load balancer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_LOOK_S = 0.05


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
                await asyncio.sleep(_LOOK_S)
            async with await listen(sock=bound) as server:
                await server.serve_forever()
