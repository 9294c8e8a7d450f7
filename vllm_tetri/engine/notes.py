"""Short notes from a prefill instance's worker to a decode instance.

They travel as messages of the KV transport, not through a router: what they say
concerns one transfer and is wanted as early as its last block.
"""

from __future__ import annotations

import msgspec

from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import Given


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The transfer will not be completed; whoever waits may stop."""

    transfer: str


class FirstTokens(msgspec.Struct, frozen=True, tag="first"):
    """What was sampled behind the prompt whose KV the transfer carries."""

    transfer: str
    given: Given


Note = Lost | FirstTokens

MAX_BYTES = 4096  # of a note; nobody knows yet who will ask for it

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


def encode(note: Note) -> bytes:
    """The bytes of a note."""
    return _encoder.encode(note)


def decode(message: bytes) -> Note:
    """The note in a message.

    Raises:
        ProtocolError: It is something else, or too long for one.
    """
    if len(message) > MAX_BYTES:
        raise ProtocolError(f"a note of {len(message)} bytes; there may be {MAX_BYTES}")
    try:
        return _decoder.decode(message)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a note: {error}") from error
