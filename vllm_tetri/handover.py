"""What the router and the instances say to each other inside a request.

vLLM carries a JSON object ``kv_transfer_params`` with every request and back
with every non-streamed answer. We use one key of it, ``"tetri"``, and these
structs are all it may hold. This is the only place that knows the key.
"""

from __future__ import annotations

import base64
import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from vllm_tetri.errors import ProtocolError
from vllm_tetri.types import InstanceId, Prediction, RequestId, TransferId

FIELD = "kv_transfer_params"
KEY = "tetri"


# A prefill instance may try a hand-over again; every try has a name of its own.
MAX_ATTEMPTS = 4

TokenId = Annotated[int, msgspec.Meta(ge=0)]


class PrefillLeg(msgspec.Struct, frozen=True, tag="prefill"):
    """Router → prefill instance: compute the prompt, hand its KV over.

    ``anywhere``: any instance may write the answer, this one included, and the cheapest
    is to (`policy.adaptive`); else one of those whose role it is.
    """

    transfer: Annotated[TransferId, msgspec.Meta(min_length=1, max_length=128)]
    request: Annotated[RequestId, msgspec.Meta(max_length=128)]
    anywhere: bool = False


class Given(msgspec.Struct, frozen=True):
    """Tokens of an answer that exist already; whoever goes on takes them as its own.

    ``logprobs`` is what `encode_logprobs` made of vLLM's arrays, bit for bit, and
    empty when the client wants none.
    """

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    logprobs: str = ""


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """Prefill instance → router, in the answer of the first leg.

    ``decode`` is empty when no decode instance took the KV; then any instance
    may go on by computing the prompt again, and ``reason`` says why.
    ``transfer`` is the name of the try that counts, ``digest`` that of the prompt.
    ``is_final`` means that the first token was also the last: nothing follows.
    """

    transfer: TransferId
    decode: InstanceId
    num_tokens: int
    digest: str
    num_chunks: int
    num_bytes: int
    reason: str
    given: Given | None = None
    is_final: bool = False
    prompt_token_ids: list[TokenId] = []
    predicted: Prediction | None = None


class DecodeLeg(msgspec.Struct, frozen=True, tag="decode"):
    """Router → decode instance: the prompt's KV is in your arena (or will be).

    ``digest`` proves that both sides mean the same tokens. Without a ``transfer``
    there is no KV: compute the prompt, and go on behind what is ``given``. With
    ``is_early`` the prompt is still being computed: what is given follows its KV.
    Several requests may name the same transfer (OpenAI's ``n``): all load from it.
    """

    transfer: Annotated[TransferId, msgspec.Meta(max_length=160)]
    digest: str
    given: Given | None = None
    predicted: Prediction | None = None
    is_early: bool = False


Handover = PrefillLeg | Prefilled | DecodeLeg


def to_params(leg: Handover) -> dict[str, Any]:
    """The value of ``kv_transfer_params`` that carries this leg."""
    return {KEY: msgspec.to_builtins(leg)}


def from_params(params: dict[str, Any] | None) -> Handover | None:
    """The leg inside ``kv_transfer_params``; None when there is none of ours.

    Raises:
        ProtocolError: Our key is there but does not hold one of our legs.
    """
    if not params:
        return None
    if not isinstance(params, dict):
        raise ProtocolError(f"{FIELD} must be an object, not {type(params).__name__}")
    if KEY not in params:
        return None
    try:
        leg: Handover = msgspec.convert(params[KEY], Handover)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{FIELD}.{KEY}: {error}") from error
    return leg


def unseen_logprobs(token_ids: Sequence[int]) -> str:
    """What `Given.logprobs` holds where the client has the real values already: as many
    rows, of which nothing is shown again. The layout is that of `encode_logprobs`.

    Raises:
        ProtocolError: There are more rows than it can tell.
    """
    num_rows = len(token_ids)
    try:
        head = struct.pack("<HH", num_rows, 1)
        ids = struct.pack(f"<{num_rows}i", *token_ids)
    except struct.error as error:
        raise ProtocolError(f"log probabilities of {num_rows} tokens: {error}") from error
    values, ranks = bytes(4 * num_rows), struct.pack("<i", 1) * num_rows
    return base64.b64encode(head + ids + values + ranks).decode()


def digest_of(token_ids: Sequence[int]) -> str:
    """Name of a prompt: equal prompts have equal digests, others do not."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


def prefix_of(router: str) -> str:
    """What the names of a router's transfers begin with, so that instances can tell whose
    they are when it is gone."""
    return f"{router}/"


def attempt_name(transfer: TransferId, attempt: int) -> TransferId:
    """Name of the n-th try of a transfer; the first has the plain name."""
    return transfer if attempt == 0 else TransferId(f"{transfer}~{attempt}")


def attempt_names(transfer: TransferId) -> tuple[TransferId, ...]:
    """The names of all tries that a transfer may have."""
    return tuple(attempt_name(transfer, attempt) for attempt in range(MAX_ATTEMPTS))
