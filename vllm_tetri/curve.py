"""CURVE keys on ZeroMQ sockets: both ends' keys follow from the cluster's secret.

The caller knows the listener's key in advance and the listener admits only that one caller, so
both have proved the secret before a message passes, encrypted and authenticated.
"""

from __future__ import annotations

import hmac

import zmq
from zmq.utils import z85

from vllm_tetri.errors import ConfigError
from vllm_tetri.security import Secret

CONTROL = "control"  # the CURVE channel between routers and instances
# libzmq asks a handler about each connection: ZAP, https://rfc.zeromq.org/spec/27/.
_ZAP_DOMAIN = "tetri"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message can be received."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class Curve:
    """The keys of one channel's two ends; ConfigError if this build of ZeroMQ has no CURVE."""

    def __init__(self, secret: Secret, channel: str) -> None:
        if not zmq.has("curve"):
            raise ConfigError("this pyzmq was built without CURVE; install another build of it")
        self._listener = z85.encode(secret.key(f"{channel} listener"))
        self._caller = z85.encode(secret.key(f"{channel} caller"))

    @property
    def caller(self) -> bytes:
        """The caller's public key, as it comes over the wire."""
        return z85.decode(zmq.curve_public(self._caller))

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Admit callers only, before `bind`. A context without `Gatekeeper` refuses all."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._listener)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def call(self, socket: zmq.Socket[bytes]) -> None:
        """Talk to the listener only; call it before `connect`."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(self._listener))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self._caller))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._caller)


class Gatekeeper:
    """Tells libzmq which connections of a context to admit; they wait for `answer`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], curve: Curve) -> None:
        self._caller = curve.caller
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer every question of libzmq; call it whenever the socket is readable."""
        while is_readable(self.socket):
            asked = self.socket.recv_multipart()
            status = b"200" if self._is_caller(asked) else b"400"
            request = asked[1] if len(asked) > 1 else b""
            self.socket.send_multipart([_ZAP_VERSION, request, status, b"", b"", b""])

    def _is_caller(self, asked: list[bytes]) -> bool:
        # version, request, domain, address, routing id, mechanism, the caller's public key
        is_curve = len(asked) == 7 and asked[0] == _ZAP_VERSION and asked[5] == b"CURVE"
        return is_curve and hmac.compare_digest(asked[6], self._caller)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.socket.close(linger=0)
