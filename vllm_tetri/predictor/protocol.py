"""What an instance and the predictor process beside it say to each other.

A frame is one ZeroMQ message part: four magic bytes, a version byte, a msgpack struct.
Several prompts share a frame, so that a step of the engine costs at most one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from vllm_tetri.errors import ProtocolError

MAGIC = b"TTPR"
VERSION = 1
CHANNEL = "predictor"  # names its keys
MAX_FRAME_BYTES = 32 << 20

# Prompts that may wait for a predictor; the next one is refused at once. At the rate of
# a small encoder on one core, more could not be answered before their first chunk is done.
QUEUE_PROMPTS = 256
# A predictor's window is shorter than this, and it keeps a prompt's head and tail, so
# what lies between need not travel.
_END_TOKENS = 2048


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt in the target model's tokens; `number` names it in the answer."""

    number: int
    token_ids: list[int]


class Asks(msgspec.Struct, frozen=True, tag=True):
    """Instance → predictor: new prompts, and those that nobody waits for any more."""

    prompts: list[Prompt]
    withdrawn: list[int] = []


class Answers(msgspec.Struct, frozen=True, tag=True):
    """Predictor → instance: (number, bucket), and prompts without an answer:
    refused by a full queue, failed in the model."""

    buckets: list[tuple[int, int]] = []
    refused: list[int] = []
    failed: list[int] = []


Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_asks = msgspec.msgpack.Decoder(Asks)
_answers = msgspec.msgpack.Decoder(Answers)
_PREFIX = MAGIC + bytes([VERSION])


def encode(message: Asks | Answers) -> bytes:
    """One frame."""
    return _PREFIX + _encoder.encode(message)


def decode_asks(frame: bytes) -> Asks:
    """The message in a frame that an instance sent.

    Raises:
        ProtocolError: Foreign, truncated, or of another version.
    """
    return _decode(_asks, frame)


def decode_answers(frame: bytes) -> Answers:
    """The message in a frame that a predictor sent; raises like `decode_asks`."""
    return _decode(_answers, frame)


def _decode(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    if frame[:5] != _PREFIX:
        raise ProtocolError("not a frame of this version of the predictor's protocol")
    try:
        return decoder.decode(memoryview(frame)[5:])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a predictor message: {error}") from error


def shortened(token_ids: Sequence[int]) -> list[int]:
    """The part of a prompt that travels: all of it, or its two ends."""
    if len(token_ids) <= 2 * _END_TOKENS:
        return list(token_ids)
    return [*token_ids[:_END_TOKENS], *token_ids[-_END_TOKENS:]]
