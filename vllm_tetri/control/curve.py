"""CURVE on ZeroMQ sockets: two ends that hold the same secret, and nobody else.

Both ends' keys follow from the secret. The caller knows the listener's key in advance, and
the listener lets in only the one caller that it knows, so each has proved that it holds the
secret before a message passes. What passes is encrypted and cannot be changed.
"""

from __future__ import annotations

import hmac
from typing import NamedTuple

import zmq
from zmq.utils import z85

from vllm_tetri.errors import ConfigError
from vllm_tetri.secret import Secret

CONTROL = "control"  # the channel between routers and instances
_DOMAIN = "tetri"
# What libzmq asks, and is answered, about a connection (ZAP, https://rfc.zeromq.org/spec/27/).
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


class KeyPair(NamedTuple):
    """A curve25519 key pair, in ZeroMQ's own notation (Z85)."""

    public: bytes
    private: bytes


class Curve:
    """The keys of one channel's two ends.

    Args:
        secret: What both ends hold.
        channel: Name of the channel; another one has other keys.

    Raises:
        ConfigError: This build of ZeroMQ has no CURVE.
    """

    def __init__(self, secret: Secret, channel: str) -> None:
        if not zmq.has("curve"):
            raise ConfigError("this pyzmq was built without CURVE; install another build of it")
        self._listener = _pair(secret.key(f"{channel} listener"))
        self._caller = _pair(secret.key(f"{channel} caller"))

    @property
    def caller(self) -> bytes:
        """The caller's public key, as it comes over the wire."""
        return z85.decode(self._caller.public)

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Let nobody but callers in; before `bind`. The context needs a `Gatekeeper`:
        without one nobody comes in at all."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._listener.private)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def call(self, socket: zmq.Socket[bytes]) -> None:
        """Talk to nobody but the listener; before `connect`."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._listener.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._caller.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._caller.private)


class Gatekeeper:
    """Tells libzmq, on the thread that owns it, which connections of a context to let in.

    A connection waits until `answer` is called, at most as long as the socket's
    HANDSHAKE_IVL says.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], curve: Curve) -> None:
        self._caller = curve.caller
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer all that libzmq has asked. To be called whenever the socket is readable."""
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            asked = self.socket.recv_multipart()
            status = b"200" if self._is_caller(asked) else b"400"
            request = asked[1] if len(asked) > 1 else b""
            self.socket.send_multipart([_ZAP_VERSION, request, status, b"", b"", b""])

    def _is_caller(self, asked: list[bytes]) -> bool:
        # version, request, domain, address, routing id, mechanism, the caller's public key
        return (
            len(asked) == 7
            and asked[0] == _ZAP_VERSION
            and asked[5] == b"CURVE"
            and hmac.compare_digest(asked[6], self._caller)
        )

    def close(self) -> None:
        """Idempotent."""
        self.socket.close(linger=0)


def _pair(private: bytes) -> KeyPair:
    encoded = z85.encode(private)
    return KeyPair(zmq.curve_public(encoded), encoded)
