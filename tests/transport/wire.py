"""The protocol by hand, so that tests can misbehave."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any

MAGIC = 0x564B5454
VERSION = 2
HELLO, WELCOME, REFUSED, LINK, JOIN, JOINED, OPEN, OPENED, DATA, DONE = range(1, 11)
CONFIRM, CANCEL, STOP, STOPPED, READ, READ_DATA, MESSAGE, MESSAGE_ACK = range(11, 19)


def frame(kind: int, body: bytes = b"", version: int = VERSION) -> bytes:
    return struct.pack("<IHHI", MAGIC, version, kind, len(body)) + body


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(raw)) + raw


def hello(identity: dict[str, str], rank: int = 0, num_ranks: int = 1, shm: bool = True) -> bytes:
    pairs = b"".join(text(k) + text(v) for k, v in sorted(identity.items()))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    body = struct.pack("<I", len(identity)) + pairs + struct.pack("<II", rank, num_ranks)
    return frame(HELLO, body + text(boot) + struct.pack("<QI", 1, shm))


class Rogue:
    """A sender that does exactly what a test tells it to."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=5.0)
        self.session = 0
        self.segment = ""

    def __enter__(self) -> Rogue:
        return self

    def __exit__(self, *_: Any) -> None:
        self.socket.close()

    def send(self, raw: bytes) -> None:
        self.socket.sendall(raw)

    def receive(self) -> tuple[int, bytes]:
        head = self._exactly(12)
        magic, _, kind, length = struct.unpack("<IHHI", head)
        assert magic == MAGIC
        return kind, self._exactly(length)

    def at_end(self) -> bool:
        """Whether the receiver hung up, after whatever it still said."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        return True

    def greet(self, identity: dict[str, str], shm: bool = True) -> None:
        self.send(hello(identity, shm=shm))
        kind, body = self.receive()
        assert kind == WELCOME, body
        (self.session, length) = struct.unpack_from("<QI", body)
        self.segment = body[12 : 12 + length].decode()
        self.send(frame(LINK, struct.pack("<I", shm)))

    def open(self, name: str, num_blocks: int, block_bytes: int) -> tuple[int, int, int, int]:
        """Status, generation, offset and control index."""
        body = struct.pack("<Q", 1) + text(name) + struct.pack("<QQ", num_blocks, block_bytes)
        self.send(frame(OPEN, body))
        kind, answer = self.receive()
        assert kind == OPENED
        _, status, generation, offset, control = struct.unpack_from("<QIQQI", answer)
        return status, generation, offset, control

    def _exactly(self, count: int) -> bytes:
        parts = b""
        while len(parts) < count:
            piece = self.socket.recv(count - len(parts))
            assert piece, "the receiver hung up"
            parts += piece
        return parts


def data(generation: int, offset: int, payload: bytes) -> bytes:
    body = struct.pack("<QQ", generation, offset) + payload
    return frame(DATA, body + struct.pack("<Q", xxh64(body)))


_PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_MASK = (1 << 64) - 1


def xxh64(raw: bytes) -> int:
    """By the specification, with seed 0."""
    one, two, three, four, five = _PRIMES

    def turned(value: int, bits: int) -> int:
        value &= _MASK
        return (value << bits | value >> (64 - bits)) & _MASK

    def mixed(lane: int, word: int) -> int:
        return turned(lane + word * two, 31) * one & _MASK

    lanes = [one + two, two, 0, -one]
    end = len(raw) // 32 * 32
    for at in range(0, end, 32):
        words = struct.unpack_from("<4Q", raw, at)
        lanes = [mixed(lane, word) for lane, word in zip(lanes, words, strict=True)]
    found = five
    if end:
        found = sum(turned(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            found = (found ^ mixed(0, lane)) * one + four
    found += len(raw)
    while len(raw) - end >= 8:
        found = turned(found ^ mixed(0, *struct.unpack_from("<Q", raw, end)), 27) * one + four
        end += 8
    if len(raw) - end >= 4:
        found = (
            turned(found ^ struct.unpack_from("<I", raw, end)[0] * one & _MASK, 23) * two + three
        )
        end += 4
    for byte in raw[end:]:
        found = turned(found ^ byte * five, 11) * one
    found &= _MASK
    found = (found ^ found >> 33) * two & _MASK
    found = (found ^ found >> 29) * three & _MASK
    return found ^ found >> 32
