"""CURVE keys on ZeroMQ sockets: both ends' keys follow from the cluster's secret.

The caller knows the listener's key in advance and the listener admits only that one caller, so
both have proved the secret before a message passes, encrypted and authenticated.
"""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from vllm_tetri.errors import ConfigError
from vllm_tetri.security import Secret

_DOMAIN = "tetri"
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message can be received."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class Curve:
    """The keys of the channel's two ends; ConfigError if this build of ZeroMQ has no CURVE."""

    def __init__(self, secret: Secret) -> None:
        if not zmq.has("curve"):
            raise ConfigError("this pyzmq was built without CURVE; install another build of it")
        self._listener = z85.encode(secret.key("control listener"))
        self._caller = z85.encode(secret.key("control caller"))

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Admit callers only, before `bind`. A context without `gatekeeper` refuses all."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._listener)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def call(self, socket: zmq.Socket[bytes]) -> None:
        """Talk to the listener only; call it before `connect`."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(self._listener))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self._caller))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._caller)

    def gatekeeper(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Tell libzmq, on a thread of its own, which connections of a context to admit."""
        keeper = ThreadAuthenticator(context)
        keeper.certs[_DOMAIN] = {zmq.curve_public(self._caller): True}
        keeper.start()
        return keeper
