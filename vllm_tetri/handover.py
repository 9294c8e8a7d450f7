"""What the router and the instances say to each other inside a request.

vLLM carries a JSON object ``kv_transfer_params`` with every request and back
with every non-streamed answer. We use one key of it, ``"tetri"``, and these
structs are all it may hold. This is the only place that knows the key.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_tetri.errors import ProtocolError
from vllm_tetri.types import InstanceId, RequestId, TransferId

FIELD = "kv_transfer_params"
KEY = "tetri"


class PrefillLeg(msgspec.Struct, frozen=True, tag="prefill"):
    """Router → prefill instance: compute the prompt, hand its KV over."""

    transfer: TransferId
    request: RequestId


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """Prefill instance → router, in the answer of the first leg.

    ``decode`` is empty when no decode instance took the KV; then any instance
    may serve the request by computing the prompt again, and ``reason`` says why.
    """

    transfer: TransferId
    decode: InstanceId
    num_tokens: int
    num_chunks: int
    num_bytes: int
    reason: str


class DecodeLeg(msgspec.Struct, frozen=True, tag="decode"):
    """Router → decode instance: the prompt's KV is in your arena (or will be).

    ``num_loads`` is how many sequences will load it (``n`` of the request).
    """

    transfer: TransferId
    num_tokens: int
    num_loads: int = 1


Handover = PrefillLeg | Prefilled | DecodeLeg


def to_params(leg: Handover) -> dict[str, Any]:
    """The value of ``kv_transfer_params`` that carries this leg."""
    return {KEY: msgspec.to_builtins(leg)}


def from_params(params: dict[str, Any] | None) -> Handover | None:
    """The leg inside ``kv_transfer_params``; None when there is none of ours.

    Raises:
        ProtocolError: Our key is there but does not hold one of our legs.
    """
    if not params or KEY not in params:
        return None
    try:
        leg: Handover = msgspec.convert(params[KEY], Handover)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{FIELD}.{KEY}: {error}") from error
    return leg
