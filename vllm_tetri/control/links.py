"""The links of an instance to its routers, which may come and go.

A host name can stand for many routers, as that of a headless Service of Kubernetes does, and
ZeroMQ dials the first address of a name only. So names are looked up here, again and again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Iterator

import zmq

from vllm_tetri import messages
from vllm_tetri.config import control_host
from vllm_tetri.security import HANDSHAKE_FAILED, Curve

RESOLVE_S = 2.0  # between two looks at what names stand for
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED

_log = logging.getLogger(__name__)


class RouterLink:
    """The socket to one router, and `events` that tell when it connects, is refused or breaks.
    The name `router` is empty until this connection has brought it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, curve: Curve | None, index: int
    ) -> None:
        self.address, self.index, self.router, self.is_connected = address, index, "", False
        self.socket = context.socket(zmq.DEALER)
        options = (
            (zmq.LINGER, 200),  # ms, for a last `Goodbye` on a live connection
            (zmq.IMMEDIATE, 1),  # nothing piles up for a router that is down
            (zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES),
            (zmq.RECONNECT_IVL, 100),
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 6000),
            (zmq.HEARTBEAT_TTL, 6000),  # the router drops a connection that is cut
            # Without these two, the kernel waits longer and longer between two tries on a cut
            # network (63 s after a minute), and ZeroMQ 30 s for a handshake.
            (zmq.CONNECT_TIMEOUT, 2000),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.IPV6, int("[" in address)),
        )
        for option, value in options:
            self.socket.setsockopt(option, value)
        self.socket.set_hwm(1000)
        if curve is not None:
            curve.call(self.socket)
        self.events = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(address)

    def send(self, frame: bytes) -> bool:
        with contextlib.suppress(zmq.Again):
            self.socket.send(frame, zmq.NOBLOCK)
            return True
        return False

    def close(self) -> None:
        self.socket.disable_monitor()
        self.events.close(linger=0)
        self.socket.close()


class RouterLinks:
    """One link to every router at some addresses; `poller` tells which of them have something.

    A name is looked up every `RESOLVE_S` seconds on a thread of its own, since that may block. An
    address that it stands for no more is dropped as soon as its connection has ended. Indices are
    used again, so that what is kept by index stays bounded. Owner: the agent's thread.
    """

    def __init__(self, addresses: tuple[str, ...], curve: Curve | None) -> None:
        self.poller, self._curve = zmq.Poller(), curve
        self._links: dict[str, RouterLink] = {}
        self._names = tuple(each for each in addresses if _is_name(control_host(each)))
        self._fixed = tuple(dict.fromkeys(each for each in addresses if each not in self._names))
        self._wanted = self._fixed  # replaced by the thread
        self._stop = threading.Event()

    def __iter__(self) -> Iterator[RouterLink]:
        return iter(self._links.values())

    def __len__(self) -> int:
        return len(self._links)

    def open(self) -> None:
        """Begin to look up names."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if self._names:
            threading.Thread(target=self._look_up, name="tetri-names", daemon=True).start()

    def update(self) -> bool:
        """Dial all addresses that are new, and drop what is gone; whether anything changed."""
        wanted = self._wanted
        gone = [each for each in self if each.address not in wanted and not each.is_connected]
        new = [each for each in wanted if each not in self._links]
        for link in gone:
            self._drop(link)
        for address in new:
            self._dial(address)
        return bool(gone or new)

    def close(self) -> None:
        """Close all links. A look-up that is under way ends by itself."""
        self._stop.set()
        for link in list(self):
            self._drop(link)
        self._context.term()

    def _dial(self, address: str) -> None:
        taken = {each.index for each in self}
        index = next(each for each in range(len(taken) + 1) if each not in taken)
        link = self._links[address] = RouterLink(self._context, address, self._curve, index)
        self.poller.register(link.socket, zmq.POLLIN)
        self.poller.register(link.events, zmq.POLLIN)

    def _drop(self, link: RouterLink) -> None:
        self.poller.unregister(link.socket)
        self.poller.unregister(link.events)
        del self._links[link.address]
        link.close()

    def _look_up(self) -> None:
        """Keep `_wanted` up to date. A name that cannot be looked up keeps its addresses."""
        found: dict[str, tuple[str, ...]] = {}
        said: dict[str, str] = {}
        while not self._stop.is_set():
            for name in self._names:
                try:
                    found[name] = addresses_of(name)
                    words = f"routers at {', '.join(found[name])}"
                except (OSError, UnicodeError) as error:  # the latter: no name at all
                    words = f"no address of a router, look-ups go on: {error}"
                if words != said.get(name):
                    _log.info("--tetri-control %s: %s", name, words)
                said[name] = words
            every = (each for addresses in found.values() for each in addresses)
            self._wanted = tuple(dict.fromkeys((*self._fixed, *every)))
            self._stop.wait(RESOLVE_S)


def addresses_of(name: str) -> tuple[str, ...]:
    """Return ``tcp://IP:PORT`` of all that the host of a control address stands for: IPv4 where
    it has any, as a router that was dialled twice would take one instance for two. OSError if it
    cannot be looked up now."""
    host, port = control_host(name), name.rpartition(":")[2]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {
        family: sorted({str(address[0]) for kind, *_, address in found if kind is family})
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    ipv6 = [f"[{each}]" for each in by_family[socket.AF_INET6]]
    return tuple(f"tcp://{each}:{port}" for each in by_family[socket.AF_INET] or ipv6)


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False
