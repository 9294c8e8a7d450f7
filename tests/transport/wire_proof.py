"""The proof of a KV connection by hand: independent of the code that is tested."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Callable

from tests.transport import wire
from tests.transport.wire import Rogue

CHALLENGE, PROOF = 19, 20
NONCE_BYTES = 32


def proof_of(
    key: bytes, role: bytes, sender_nonce: bytes, receiver_nonce: bytes, address: str
) -> bytes:
    """What the end with this role must say; `address` is the receiver's."""
    text = b"vllm-tetri KV " + role + b"\0" + sender_nonce + receiver_nonce
    text += struct.pack("<H", wire.VERSION) + address.encode()
    return hmac.new(key, text, hashlib.sha256).digest()


def challenge(nonce: bytes) -> bytes:
    return wire.frame(CHALLENGE, wire.text(nonce))


def proof(raw: bytes) -> bytes:
    return wire.frame(PROOF, wire.text(raw))


def nonce_of(kind: int, body: bytes) -> bytes:
    assert kind == CHALLENGE, (kind, body)
    assert len(body) == 4 + NONCE_BYTES
    return body[4:]


class Prover(Rogue):
    """A sender that knows the key, or pretends to."""

    def exchange(self) -> tuple[bytes, bytes]:
        """Both nonces: its own and the receiver's."""
        mine = os.urandom(NONCE_BYTES)
        self.send(challenge(mine))
        return mine, nonce_of(*self.receive())

    def prove(self, key: bytes) -> None:
        mine, theirs = self.exchange()
        host, port = self.socket.getpeername()
        address = f"{host}:{port}"
        self.send(proof(proof_of(key, b"sender", mine, theirs, address)))
        kind, body = self.receive()
        assert kind == PROOF, body
        assert body[4:] == proof_of(key, b"receiver", mine, theirs, address)


class FalseReceiver:
    """A port that answers every frame of a sender as a test wants.

    Args:
        answer: From the type and body of a frame to bytes; None hangs up. Called by a
            thread for each connection.
    """

    def __init__(self, answer: Callable[[int, bytes], bytes | None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(10.0)
        with connection, contextlib.suppress(OSError):
            while (frame := _frame_from(connection)) is not None:
                answer = self._answer(*frame)
                if answer is None:
                    return
                connection.sendall(answer)

    def close(self) -> None:
        """Once all senders are closed."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(20.0)
            assert not thread.is_alive()


def _frame_from(connection: socket.socket) -> tuple[int, bytes] | None:
    head = _exactly(connection, 12)
    if head is None:
        return None
    _, _, kind, length = struct.unpack("<IHHI", head)
    body = _exactly(connection, length)
    return None if body is None else (kind, body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = b""
    while len(parts) < count:
        piece = connection.recv(count - len(parts))
        if not piece:
            return None
        parts += piece
    return parts
