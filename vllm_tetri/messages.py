"""Every message of the control channel, and its framing.

A frame is one ZeroMQ message part: ``b"TTRI"``, one version byte, then a
msgpack-encoded tagged struct. Facts are past tense, commands imperative,
reports nouns. KV bytes never travel here. Numbers are finite and below 2^53 wherever they
come from outside: who decides by them must not have to ask.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import msgspec

from vllm_tetri.errors import ProtocolError
from vllm_tetri.types import (
    ClusterView,
    Flip,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    Prediction,
    RequestId,
    Role,
    StepCoefficients,
    TransferId,
)

MAGIC = b"TTRI"
VERSION = 3
MAX_FRAME_BYTES = 8 << 20
_MOST = 1 << 53
_MOST_BUCKETS = 1 << 18  # of predicted lengths
_MOST_WORDS = 4096  # characters of a reason

Epoch = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
"""Numbers orders to flip of one instance."""
Words = Annotated[str, msgspec.Meta(max_length=_MOST_WORDS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]  # and so not NaN
_BOUNDED: dict[Any, Any] = {
    int: Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)],
    float: Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)],
}


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Instance → router: who I am. Sent on connect and whenever asked."""

    info: InstanceInfo


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """Instance → router, every report period. `is_leaving`: it was asked to leave.
    `epoch`: of the newest order to flip that it heard; `flip`: its newest flip."""

    instance: InstanceId
    seq: int
    load: InstanceLoad
    is_leaving: bool = False
    epoch: Epoch = 0
    flip: Flip | None = None


class Opening(msgspec.Struct, frozen=True):
    """What a second leg needs that is opened while the prompt is still computed.

    ``transfer`` is the name of the try, ``digest`` that of the prompt.
    """

    transfer: TransferId
    digest: str
    prompt_token_ids: list[int]


class Dispatched(msgspec.Struct, frozen=True, tag=True):
    """Prefill instance → router: which decode instance a request goes to.

    Comes again with an ``opening`` when the last chunk begins.
    """

    request: RequestId
    transfer: TransferId
    decode: InstanceId
    reason: str
    predicted: Prediction | None = None
    opening: Opening | None = None


class Left(msgspec.Struct, frozen=True, tag=True):
    """Instance → router: I am going away in good order.

    `was_asked`: because of `Leave`. `cut_off` says what a deadline left unfinished.
    """

    instance: InstanceId
    was_asked: bool = False
    cut_off: Words = ""


class Flipped(msgspec.Struct, frozen=True, tag=True):
    """Instance → router: I have another role now, by the order of this epoch."""

    instance: InstanceId
    role: Role
    epoch: Epoch


class Introduce(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: I do not know you (yet); send `Hello`."""

    router: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: you cannot join, and why."""

    reason: Words


class View(msgspec.Struct, frozen=True, tag=True):
    """Router → every instance that dispatches, when instances came or went: report now,
    and these are the instances that decode. `roster` is another number every time."""

    view: ClusterView
    roster: int = 0


if TYPE_CHECKING:
    LoadRow = InstanceLoad
else:  # the same fields, without their names on the wire and made by msgspec's decoder
    LoadRow = msgspec.defstruct(
        "LoadRow",
        [(name, _BOUNDED.get(kind, kind)) for name, kind in get_type_hints(InstanceLoad).items()],
        frozen=True,
        array_like=True,
    )


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What changes all the time of an `InstanceView`."""

    state: InstanceState
    age_s: Seconds
    seq: int
    load: LoadRow


class Loads(msgspec.Struct, frozen=True, tag=True):
    """Router → every instance that dispatches, in every other report period: report now,
    and this is new of the instances of the `View` with that roster, in its order."""

    roster: int
    seq: int
    rows: list[Row]


class Cue(msgspec.Struct, frozen=True, tag=True):
    """Router → every instance that gets no `View`, leaves or drains, every report period:
    report now. `in_flight` tells one that leaves or drains how many requests of this
    router it has or may still get. `router` is its name, as in a view."""

    in_flight: int | None = None
    router: str = ""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: finish what you have and go; repeated until a report says so.

    After `deadline_s` (seconds from now) it goes in any case; None waits for ever.
    """

    deadline_s: Seconds | None = None


class FlipRole(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: take another role; repeated until a report has the epoch.

    With `is_now` old work is finished beside new work, else before. After `deadline_s`
    (seconds from now) it keeps its role instead; None waits for ever. `lease` is the
    epoch under which a watcher ordered it: one older than what the instance has heard is
    that of a router which decides no more. 0: an operator's.
    """

    epoch: Epoch
    role: Role
    is_now: bool = False
    deadline_s: Seconds | None = None
    reason: Words = ""
    lease: Epoch = 0


class Advertised(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: all who dispatch have been sent your role of this epoch, at the
    monotonic time `at_s` of the router's machine."""

    epoch: Epoch
    at_s: Seconds


class CancelTransfer(msgspec.Struct, frozen=True, tag=True):
    """Router → prefill and decode instance: nobody waits for this any more."""

    transfer: TransferId


class TransferLost(msgspec.Struct, frozen=True, tag=True):
    """Router → decode instance: what computed this prompt is silent. If its KV is not here
    yet, it will not come."""

    transfer: TransferId


ToRouter = Hello | LoadReport | Dispatched | Flipped | Left
ToInstance = (
    Introduce
    | Refused
    | View
    | Loads
    | Cue
    | Leave
    | FlipRole
    | Advertised
    | CancelTransfer
    | TransferLost
)

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
        ProtocolError: Foreign, truncated, oversized, of another version, not a message
            for routers, or with a number that is none.
    """
    message = _decode(_to_router, frame)
    if isinstance(message, LoadReport):
        _require_sound(message.load)
        _require_sound_flip(message.flip)
    return message


def decode_to_instance(frame: bytes) -> ToInstance:
    """The message in a frame that a router sent; raises like `decode_to_router`."""
    message = _decode(_to_instance, frame)
    if isinstance(message, View):
        for each in message.view.instances:
            _require_sound(each.load)
            _require_sound_flip(each.flip)
            _require_finite(each.age_s)
    elif isinstance(message, Loads):
        for row in message.rows:  # the rest of it msgspec has looked at
            _require_finite(*_cost_numbers(row.load.cost))
    return message


_load_numbers = attrgetter(
    *(name for name, kind in get_type_hints(InstanceLoad).items() if kind in _BOUNDED)
)
_cost_numbers = attrgetter(*(field.name for field in fields(StepCoefficients)))


def _require_sound(load: InstanceLoad) -> None:
    _require_finite(*_load_numbers(load), *_cost_numbers(load.cost))
    if len(load.bucket_tokens) > _MOST_BUCKETS:
        raise ProtocolError(f"{len(load.bucket_tokens)} buckets of lengths in a load")


def _require_sound_flip(flip: Flip | None) -> None:
    if flip is None:
        return
    _require_finite(flip.epoch, flip.age_s, flip.drain_s, flip.commit_s)
    if len(flip.reason) + len(flip.problem) > _MOST_WORDS:
        raise ProtocolError("a flip with more words than fit")


def _require_finite(*numbers: float) -> None:
    if not sum(map(abs, numbers)) <= _MOST:  # no comparison holds for NaN
        raise ProtocolError("a number that is not finite, or beyond 2^53")


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
