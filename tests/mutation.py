"""Frames that nobody should send: bytes and values changed at random, the same every time."""

from __future__ import annotations

from math import inf, nan
from random import Random
from typing import Any

import msgspec
import pytest

QUICK, MANY = 1_000, 10_000

COUNTS = [pytest.param(QUICK, id="quick"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
"""How many frames a test tries: few by default, and 10,000 where there is time."""

STRANGE: list[Any] = [
    None, True, -1, 0, 1, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 0.5, -0.5, 1e308, nan, inf, -inf,
    "", "x", "\0", "é", "x" * 5000, b"\xff", b"", [], {}, [[]] * 50,
    {"type": "Hello"}, list(range(500)),
]  # fmt: skip


def mutated(rng: Random, frame: bytes) -> bytes:
    """A frame with something wrong in its bytes, or only random bytes."""
    kind = rng.randrange(5 if frame else 4)
    at = rng.randrange(len(frame) + 1)
    if kind == 0:
        return frame[:at]
    if kind == 1:
        return rng.randbytes(rng.randrange(len(frame) + 40))
    if kind == 2:
        return frame[:at] + rng.randbytes(rng.randrange(1, 30)) + frame[at:]
    if kind == 3:
        return frame[:at] + frame[at + rng.randrange(1, 20) :]
    broken = bytearray(frame)
    for _ in range(rng.randrange(1, 6)):
        broken[rng.randrange(len(broken))] = rng.randrange(256)
    return bytes(broken)


def estranged(rng: Random, plain: Any) -> Any:
    """Plain values, one of them exchanged for a strange one, left out or doubled."""
    if isinstance(plain, dict) and plain and rng.random() < 0.9:
        key = rng.choice(list(plain))
        if rng.random() < 0.1:
            return {name: value for name, value in plain.items() if name != key}
        return {**plain, key: estranged(rng, plain[key])}
    if isinstance(plain, list) and plain and rng.random() < 0.9:
        at = rng.randrange(len(plain))
        if rng.random() < 0.2:
            return plain[:at] + plain[at + 1 :] if rng.random() < 0.5 else [*plain, *plain]
        return [*plain[:at], estranged(rng, plain[at]), *plain[at + 1 :]]
    return rng.choice(STRANGE)


def strange_frame(rng: Random, frame: bytes, prefix_bytes: int) -> bytes:
    """A msgpack frame with something wrong in its bytes or in its values."""
    kind = rng.random()
    if kind < 0.3:
        return mutated(rng, frame)
    if kind < 0.31:
        return frame[:prefix_bytes] + b"\x91" * 100_000 + b"\x90"  # deeper than any stack
    plain = msgspec.msgpack.decode(frame[prefix_bytes:])
    for _ in range(rng.randrange(1, 3)):
        plain = estranged(rng, plain)
    return frame[:prefix_bytes] + msgspec.msgpack.encode(plain)
