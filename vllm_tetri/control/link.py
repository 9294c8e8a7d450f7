"""An instance's sockets to one router."""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_tetri import messages
from vllm_tetri.control.curve import Curve

_LINGER_MS = 200  # long enough for a last `Left` on a live connection
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


class Link(NamedTuple):
    """The socket to one router, and the one that tells when it is connected, refused, and
    connected no more."""

    socket: zmq.Socket[bytes]
    connected: zmq.Socket[bytes]

    @classmethod
    def open(
        cls, context: zmq.Context[zmq.Socket[bytes]], address: str, curve: Curve | None
    ) -> Link:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a router that is down
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.RCVHWM, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 6000)  # the router drops a connection that is cut
        # A network that is cut answers nothing: without these, the kernel waits longer and
        # longer between two tries (63 s after a minute), and ZeroMQ 30 s for a handshake.
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if curve is not None:
            curve.call(socket)
        connected = socket.get_monitor_socket(_EVENTS)
        socket.connect(address)
        return cls(socket, connected)

    def send(self, frame: bytes) -> bool:
        """Whether the frame was queued; False when the router is down or does not read."""
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def next_event(self) -> int:
        """What `connected` has to tell: one of `_EVENTS`."""
        return int(parse_monitor_message(self.connected.recv_multipart())["event"])

    def is_readable(self) -> bool:
        """Whether a frame is there."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        """Close both sockets."""
        self.socket.disable_monitor()
        self.connected.close(linger=0)
        self.socket.close()
