"""The protocol by hand, so that tests can misbehave."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any

MAGIC = 0x564B5454
VERSION = 3
HELLO, WELCOME, REFUSED, LINK, JOIN, JOINED, OPEN, OPENED, DATA, DONE = range(1, 11)
CONFIRM, CANCEL, STOP, STOPPED = range(11, 15)
MESSAGE, MESSAGE_ACK, PROGRESS = 17, 18, 21


def frame(kind: int, body: bytes = b"", version: int = VERSION) -> bytes:
    return struct.pack("<IHHI", MAGIC, version, kind, len(body)) + body


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(raw)) + raw


def pairs(values: dict[str, Any]) -> bytes:
    each = b"".join(text(key) + text(value) for key, value in sorted(values.items()))
    return struct.pack("<I", len(values)) + each


def hello(identity: dict[str, str], rank: int = 0, num_ranks: int = 1) -> bytes:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    body = pairs(identity) + struct.pack("<II", rank, num_ranks)
    return frame(HELLO, body + text(boot))


def welcome(
    segment: str | bytes = "",
    nonce: bytes = b"",
    offers: dict[str, bytes] | None = None,
    mac: bytes = b"",
    has_host_memory: bool = True,
) -> bytes:
    body = struct.pack("<Q", 1) + text(segment) + text(nonce)
    body += struct.pack("<I", has_host_memory) + pairs(offers or {})
    return frame(WELCOME, body + text(mac))


def open_frame(name: str, num_blocks: int, block_bytes: int) -> bytes:
    body = struct.pack("<Q", 1) + text(name) + struct.pack("<QQ", num_blocks, block_bytes)
    return frame(OPEN, body)


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

    def greet(self, identity: dict[str, str], shm: bool = True, link: str = "") -> None:
        first = hello(identity)
        self.send(first)
        kind, body = self.receive()
        assert kind == WELCOME, body
        (self.session, length) = struct.unpack_from("<QI", body)
        self.segment = body[12 : 12 + length].decode()
        agreed = first[12:] + body[: -len(self.mac(b"receiver", b""))] + text(b"")
        assert body.endswith(self.mac(b"receiver", agreed))
        choice = text(link or ("shm" if shm else "tcp"))
        self.send(frame(LINK, choice + self.mac(b"sender", agreed + choice + text(b""))))

    def mac(self, role: bytes, frames: bytes) -> bytes:
        """The signature of frames of the handshake, as text: none without a key."""
        del role, frames
        return text(b"")

    def join(self, control: Rogue) -> None:
        """Become a stream of another connection's session."""
        self.send(frame(JOIN, struct.pack("<Q", control.session)))
        assert self.receive()[0] == JOINED

    def open(self, name: str, num_blocks: int, block_bytes: int) -> tuple[int, int, int, int]:
        """Status, generation, offset and control index."""
        self.send(open_frame(name, num_blocks, block_bytes))
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
    return frame(DATA, body + struct.pack("<Q", checksum(body)))


def _crc_table() -> list[int]:
    found = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        found.append(crc)
    return found


_CRC32C, _MASK = _crc_table(), (1 << 64) - 1


def checksum(raw: bytes) -> int:
    """CRC32C of every fourth 8 bytes, four times, and their number."""
    lanes = [0xFFFFFFFF - lane for lane in range(4)]
    padded = raw + bytes(-len(raw) % 32)
    for place, byte in enumerate(padded):
        lane = place // 8 % 4
        lanes[lane] = lanes[lane] >> 8 ^ _CRC32C[(lanes[lane] ^ byte) & 0xFF]
    low, high = lanes[0] | lanes[1] << 32, lanes[2] | lanes[3] << 32
    return _mixed(low ^ _mixed(high ^ _mixed(len(raw))))


def _mixed(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
