"""The proof of a KV connection by hand: independent of the code that is tested."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socketserver
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
    text = b"vllm-tetri KV " + role + b"\0" + context_of(sender_nonce, receiver_nonce, address)
    return hmac.new(key, text, hashlib.sha256).digest()


def context_of(sender_nonce: bytes, receiver_nonce: bytes, address: str) -> bytes:
    """What proofs and signatures of one connection have in common."""
    return sender_nonce + receiver_nonce + struct.pack("<H", wire.VERSION) + address.encode()


def mac_of(key: bytes, role: bytes, context: bytes, frames: bytes) -> bytes:
    """How the end with this role signs frames of the handshake."""
    text = b"vllm-tetri KV frames of the " + role + b"\0" + context + b"\0" + frames
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

    key = b""
    context = b""

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
        self.key = key
        self.context = context_of(mine, theirs, address)

    def mac(self, role: bytes, frames: bytes) -> bytes:
        if not self.key:
            return super().mac(role, frames)
        return wire.text(mac_of(self.key, role, self.context, frames))


class FalseReceiver(socketserver.ThreadingTCPServer):
    """A port that answers every frame of a sender as a test wants: from the frame's type and body
    to bytes, on a thread for each connection; None hangs up."""

    def __init__(self, answer: Callable[[int, bytes], bytes | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.answer = answer
        self.endpoint = f"127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()

    def close(self) -> None:
        """Wait for all connections: close the senders before."""
        self.shutdown()
        self.server_close()


class _Answering(socketserver.StreamRequestHandler):
    server: FalseReceiver
    timeout = 10.0

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while len(head := self.rfile.read(12)) == 12:
                _, _, kind, length = struct.unpack("<IHHI", head)
                answer = self.server.answer(kind, self.rfile.read(length))
                if answer is None:
                    return
                self.wfile.write(answer)
