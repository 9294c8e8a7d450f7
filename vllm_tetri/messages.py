"""Every message of the control channel, and its framing.

A frame is one ZeroMQ message part: ``b"TTRI"``, one version byte, then a msgpack-encoded tagged
struct. Facts are past tense, commands imperative, reports nouns. KV bytes never travel here.
Decoders admit only finite numbers below 2^62, so that policies need not check them.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import msgspec

from vllm_tetri.errors import ProtocolError
from vllm_tetri.types import (
    MAX_CHOICES,
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
VERSION = 14
MAX_FRAME_BYTES = 8 << 20
_MOST = 1 << 62  # counters of bytes pass 2^53 in weeks
_MOST_WORDS = 4096  # characters of a reason
NAME_BYTES = 8  # of a prefix block's name
MAX_CACHE_NAMES = 1 << 19  # of prefix blocks that one instance reports

Epoch = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]  # numbers orders to flip of one instance
NumTokens = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Words = Annotated[str, msgspec.Meta(max_length=_MOST_WORDS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]  # and so not NaN
_BOUNDED: dict[Any, Any] = {
    int: Annotated[int, msgspec.Meta(ge=-_MOST, le=_MOST)],
    float: Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)],
}


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Instance → router: its description. Sent on connect and whenever asked."""

    info: InstanceInfo


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """Instance → router, every report period; `epoch` is that of the newest order to flip."""

    instance: InstanceId
    seq: int
    load: InstanceLoad
    is_draining: bool = False
    epoch: Epoch = 0
    flip: Flip | None = None


class PrefillEnding(msgspec.Struct, frozen=True):
    """What a decode request needs that opens while the prompt is still computed."""

    transfer: TransferId
    digest: str
    prompt_token_ids: list[int]
    cached_tokens: int = 0  # of the prompt, found in the prefix cache of the prefill instance
    held_tokens: Annotated[int, msgspec.Meta(ge=0, le=_MOST)] = 0  # that the transfer leaves out


class Dispatched(msgspec.Struct, frozen=True, tag=True):
    """Prefill instance → router: which decode instance a request goes to.

    Repeated with an ``ending`` when the last chunk begins.
    """

    request: RequestId
    transfer: TransferId
    decode: InstanceId
    predicted: Prediction | None = None
    ending: PrefillEnding | None = None


class RequestChain(msgspec.Struct, frozen=True, array_like=True):
    """The prefix blocks of a request that ended, prompt and output, from its first token on."""

    request: Annotated[str, msgspec.Meta(max_length=512)]  # vLLM's name of it
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
    names: bytes


class CacheReport(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Instance → router: which prefix blocks came and went since the report before this one, or
    with `is_all` which are there, and the chains of requests that ended. `added`, `removed` and
    chains hold names of 8 bytes (`policy.residency`). A router that misses one asks for all. Where
    layers have windows names are of their blocks, and a prefix is there if its last `tail_blocks`
    are."""

    instance: InstanceId
    seq: Epoch
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
    is_all: bool = False
    added: bytes = b""
    removed: bytes = b""
    chains: list[RequestChain] = []
    tail_blocks: Annotated[int, msgspec.Meta(ge=0, le=_MOST)] = 0


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """Instance → router: it ends in good order, `was_asked` by `Drain`. `cut_off`
    describes work that a deadline left unfinished."""

    instance: InstanceId
    was_asked: bool = False
    cut_off: Words = ""


class Flipped(msgspec.Struct, frozen=True, tag=True):
    """Instance → router: it has another role now, by the order of this epoch."""

    instance: InstanceId
    role: Role
    epoch: Epoch


class Moving(msgspec.Struct, frozen=True, tag=True):
    """Instance → router: by an order to move a running output, the KV of `kv_tokens` tokens of each
    choice is on its way, and the decode request may be opened. With a `problem` the output does not
    move, or not any more: it continues here, if it has not ended."""

    request: RequestId
    transfer: TransferId
    kv_tokens: Annotated[list[NumTokens], msgspec.Meta(max_length=MAX_CHOICES)] = []
    digest: str = ""
    prompt_token_ids: list[int] = []
    predicted: Prediction | None = None
    problem: Words = ""


class Moved(msgspec.Struct, frozen=True, tag=True):
    """Instance → router: a choice that moved here goes on; its transfer, of the first choice."""

    transfer: TransferId


class WhoAreYou(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: the sender is unknown (yet), and has to send `Hello`."""


class SendCache(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: a `CacheReport` is missing here; send all."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: it cannot join, and why."""

    reason: Words


if TYPE_CHECKING:
    LoadRow = InstanceLoad
else:  # its fields without their names on the wire, made by msgspec's decoder
    LoadRow = msgspec.defstruct(
        "LoadRow",
        [(name, _BOUNDED.get(kind, kind)) for name, kind in get_type_hints(InstanceLoad).items()],
        frozen=True,
        array_like=True,
    )


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What changes all the time of an instance that others see."""

    state: InstanceState
    age_s: Seconds
    seq: int
    load: LoadRow


class Poll(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Router → every instance, every report period: report now.

    Instances that dispatch also get the instances that decode: a row for each, in the order of the
    `infos` that came last, which come with a new `roster` number when an instance came or went.
    An instance that drains gets the number of its requests of this router as `in_flight`.
    """

    router: str
    seq: int = 0
    roster: int = 0
    infos: tuple[InstanceInfo, ...] | None = None
    rows: list[Row] | None = None
    in_flight: int | None = None


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: finish your requests and leave, after `deadline_s` in any case. Repeated
    until a report confirms it."""

    deadline_s: Seconds | None = None


class FlipRole(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: take another role; repeated until a report has the epoch.

    With `is_now` old work is finished together with new work, else before it. If that takes longer
    than `deadline_s`, it keeps its role. `lease` is the epoch under which a watcher ordered it, 0
    for an operator: an instance ignores a lease older than the newest that it received.
    """

    epoch: Epoch
    role: Role
    is_now: bool = False
    deadline_s: Seconds | None = None
    reason: Words = ""
    lease: Epoch = 0


class RoleCommitted(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: all that dispatch know your role since monotonic time `at_s` (router)."""

    epoch: Epoch
    at_s: Seconds


class Move(msgspec.Struct, frozen=True, tag=True):
    """Router → instance: move a running output to the instance `target`, if it still runs and
    that is possible; answered by `Moving`. `CancelTransfer` calls it off."""

    request: RequestId
    transfer: Annotated[TransferId, msgspec.Meta(min_length=1, max_length=128)]
    target: InstanceId
    kv_endpoint: Annotated[str, msgspec.Meta(max_length=256)]
    num_choices: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1


class CancelTransfer(msgspec.Struct, frozen=True, tag=True):
    """Router → prefill and decode instance: the request was cancelled."""

    transfer: TransferId


class TransferLost(msgspec.Struct, frozen=True, tag=True):
    """Router → decode instance: KV that has not arrived will not come from prefill."""

    transfer: TransferId


class OutputEnded(msgspec.Struct, frozen=True, tag=True):
    """Decode instance → router → prefill instance: the output after this transfer's prompt ended
    with so many tokens; it would have been longer if it `is_cut`."""

    prefill: Annotated[InstanceId, msgspec.Meta(max_length=512)]
    transfer: Annotated[TransferId, msgspec.Meta(max_length=160)]
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
    is_cut: bool = False


class Served(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Instance → router: a request ended here, and what it took: `queue_s` until a step had it (at
    a decode instance also for its KV), `compute_s` to its first new token, `output_s` to its
    end."""

    request: Annotated[str, msgspec.Meta(max_length=512)]  # vLLM's name of it
    queue_s: Seconds = 0.0
    compute_s: Seconds = 0.0
    output_s: Seconds = 0.0
    prompt_tokens: NumTokens = 0
    cached_tokens: NumTokens = 0  # of the prompt, in the prefix cache or received
    output_tokens: NumTokens = 0
    preemptions: NumTokens = 0


class Placed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Router → instance → its other routers: a request is on its way there. What these know of the
    cluster counts it until reports do (`policy.ledger`). `prefill` has to compute its prompt but
    for what is cached there; `decode`, if that is known, writes its output from `decode_after_s`
    on."""

    prefill: Annotated[InstanceId, msgspec.Meta(max_length=512)]
    prompt_tokens: NumTokens
    cached_tokens: NumTokens = 0
    output_tokens: Annotated[float, msgspec.Meta(ge=0, le=_MOST)] = 0.0  # expected
    decode: Annotated[InstanceId, msgspec.Meta(max_length=512)] = InstanceId("")
    decode_after_s: Seconds = 0.0


class LengthMap(msgspec.Struct, frozen=True, tag=True):
    """Instance → router → other instances: how this model's hidden states tell the lengths of
    outputs (`predictor.head.Weights`)."""

    model: Annotated[str, msgspec.Meta(max_length=64)]
    packed: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]


# By engines, at any time.
OfRequest = Dispatched | Moving | Moved | Served | Placed
Published = OfRequest | OutputEnded | LengthMap
ToRouter = Hello | LoadReport | CacheReport | Flipped | Goodbye | Published
ToEngine = Move | CancelTransfer | TransferLost | OutputEnded | LengthMap
ToInstance = (
    WhoAreYou | SendCache | Refused | Poll | Drain | FlipRole | RoleCommitted | Placed | ToEngine
)

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_to_router: msgspec.msgpack.Decoder[ToRouter] = msgspec.msgpack.Decoder(ToRouter)
_to_instance: msgspec.msgpack.Decoder[ToInstance] = msgspec.msgpack.Decoder(ToInstance)
_PREFIX = MAGIC + bytes([VERSION])


def encode(message: ToRouter | ToInstance) -> bytes:
    """Make one frame."""
    return _PREFIX + _encoder.encode(message)


def decode_to_router(frame: bytes) -> ToRouter:
    """Return the message of an instance; ProtocolError unless it is sound and of this version."""
    message = _decode(_to_router, frame)
    if isinstance(message, LoadReport):
        _require_sound(message.load, message.flip)
    elif isinstance(message, CacheReport):
        packed = message.added, message.removed, *(each.names for each in message.chains)
        if any(len(names) % NAME_BYTES for names in packed):
            raise ProtocolError(f"names of blocks that are not {NAME_BYTES} bytes long")
    return message


def decode_to_instance(frame: bytes) -> ToInstance:
    """Return the message of a router; raises like `decode_to_router`."""
    message = _decode(_to_instance, frame)
    if isinstance(message, Poll):
        for row in message.rows or ():  # msgspec has checked all other numbers of a row
            _require_finite(*_cost_numbers(row.load.cost))
    return message


_load_numbers = attrgetter(
    *(name for name, kind in get_type_hints(InstanceLoad).items() if kind in _BOUNDED)
)
_cost_numbers = attrgetter(*(field.name for field in fields(StepCoefficients)))


def _require_sound(load: InstanceLoad, flip: Flip | None) -> None:
    _require_finite(*_load_numbers(load), *_cost_numbers(load.cost))
    if flip is not None:
        _require_finite(flip.epoch, flip.age_s, flip.drain_s, flip.commit_s)
        if len(flip.reason) + len(flip.problem) > _MOST_WORDS:
            raise ProtocolError("a flip with more words than fit")


def _require_finite(*numbers: float) -> None:
    if not sum(map(abs, numbers)) <= _MOST:  # no comparison holds for NaN
        raise ProtocolError("a number that is not finite, or beyond 2^62")


def _decode(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"control frame of {len(frame)} bytes exceeds {MAX_FRAME_BYTES}")
    if frame[:4] != MAGIC or len(frame) < 6:
        raise ProtocolError("not a vllm-tetri control frame")
    if frame[4] != VERSION:
        raise ProtocolError(f"control protocol version {frame[4]}, this side speaks {VERSION}")
    try:
        return decoder.decode(memoryview(frame)[5:])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a control message: {error}") from error
