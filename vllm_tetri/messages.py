"""Every message of the control channel, and its framing.

A frame is one ZeroMQ message part: ``b"TTRI"``, one version byte, then a
msgpack-encoded tagged struct. Facts are past tense, commands imperative,
reports nouns. KV bytes never travel here.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from vllm_tetri.errors import ProtocolError
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    Prediction,
    RequestId,
    TransferId,
)

MAGIC = b"TTRI"
VERSION = 1
MAX_FRAME_BYTES = 8 << 20


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Instance → router: who I am. Sent on connect and whenever asked."""

    info: InstanceInfo


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """Instance → router, every report period."""

    instance: InstanceId
    seq: int
    load: InstanceLoad


class Dispatched(msgspec.Struct, frozen=True, tag=True):
    """Prefill instance → router: which decode instance a request goes to."""

    request: RequestId
    transfer: TransferId
    decode: InstanceId
    reason: str
    predicted: Prediction | None = None


class Left(msgspec.Struct, frozen=True, tag=True):
    """Instance → router: I am going away in good order."""

    instance: InstanceId


class Introduce(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: I do not know you (yet); send `Hello`."""

    router: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: you cannot join, and why."""

    reason: str


class View(msgspec.Struct, frozen=True, tag=True):
    """Router → every instance, every report period."""

    view: ClusterView


class CancelTransfer(msgspec.Struct, frozen=True, tag=True):
    """Router → prefill and decode instance: nobody waits for this any more."""

    transfer: TransferId


ToRouter = Hello | LoadReport | Dispatched | Left
ToInstance = Introduce | Refused | View | CancelTransfer

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_to_router: msgspec.msgpack.Decoder[ToRouter] = msgspec.msgpack.Decoder(ToRouter)
_to_instance: msgspec.msgpack.Decoder[ToInstance] = msgspec.msgpack.Decoder(ToInstance)
_PREFIX = MAGIC + bytes([VERSION])


def encode(message: ToRouter | ToInstance) -> bytes:
    """One frame."""
    return _PREFIX + _encoder.encode(message)


def decode_to_router(frame: bytes) -> ToRouter:
    """The message in a frame that an instance sent.

    Raises:
        ProtocolError: Foreign, truncated, oversized, of another version, or
            not a message for routers.
    """
    return _decode(_to_router, frame)


def decode_to_instance(frame: bytes) -> ToInstance:
    """The message in a frame that a router sent; raises like `decode_to_router`."""
    return _decode(_to_instance, frame)


def _decode(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    try:
        return decoder.decode(_payload(frame))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a control message: {error}") from error


def _payload(frame: bytes) -> memoryview:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"control frame of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
    if frame[:4] != MAGIC or len(frame) < 6:
        raise ProtocolError("not a vllm-tetri control frame")
    if frame[4] != VERSION:
        raise ProtocolError(f"control protocol version {frame[4]}, this side speaks {VERSION}")
    return memoryview(frame)[5:]
