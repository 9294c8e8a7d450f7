"""What the router and the instances exchange inside a request.

vLLM carries a JSON object ``kv_transfer_params`` with every request and back with every response
that is not streamed. Its key ``"tetri"`` holds one of these structs; only this module knows it.
"""

from __future__ import annotations

import signal
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Annotated, Any, TypeVar

import msgspec

from vllm_tetri.errors import ProtocolError
from vllm_tetri.types import MAX_CHOICES, InstanceId, Prediction, RequestId, TransferId

FIELD = "kv_transfer_params"
KEY = "tetri"
# Header of an instance's responses if all its streams count tokens (--enable-force-include-usage).
USAGE_HEADER = "x-tetri-usage"
INSTANCE_PATH = "/tetri/v1/instance"  # where an instance tells who it is, and its adapters
# Header of requests that says which data-parallel rank serves them (vLLM's
# `GenerateBaseServing._get_data_parallel_rank`).
RANK_HEADER = "X-data-parallel-rank"
# A rank that has drained tells its API server. Signals of this kind are queued, so all are counted.
RANK_DRAINED = signal.SIGRTMIN

# A prefill instance may try a hand-over again; every attempt has its own name.
MAX_ATTEMPTS = 4
MAX_HOLDERS = 16  # of a prompt's prefix that a prefill instance is told of
MAX_MARKS = 32  # of it

Found = TypeVar("Found")

TokenId = Annotated[int, msgspec.Meta(ge=0)]
NumTokens = Annotated[int, msgspec.Meta(ge=0)]


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Router → the instance ``target`` that computes a prompt, and the one from which it fetches
    the KV of a prefix: the prompt up to the longest of ``marks`` that is one of it, or the blocks
    of its first ``num_tokens`` where both get the same token ids.

    Both get the same, the holder with a request of its own, and find that prefix by their own
    block hashes. The transfer begins behind ``held_tokens``, which the target is believed to hold.
    It computes what has not come within ``wait_s``.
    """

    transfer: Annotated[TransferId, msgspec.Meta(min_length=1, max_length=128)]
    target: Annotated[InstanceId, msgspec.Meta(max_length=128)]
    kv_endpoint: Annotated[str, msgspec.Meta(max_length=256)]  # of the target
    marks: Annotated[list[tuple[NumTokens, int]], msgspec.Meta(max_length=MAX_MARKS)]
    held_tokens: NumTokens = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    num_tokens: NumTokens = 0


class PrefillParams(msgspec.Struct, frozen=True, tag="prefill"):
    """Router → prefill instance: compute the prompt, hand its KV over.

    With ``anywhere`` the cheapest instance decodes, this one included (`policy.adaptive`); else
    one whose role it is. ``held`` are the prompt tokens whose KV an instance is believed to have in
    its prefix cache: it is not sent there. A wrong number costs time, nothing else. ``marks`` name
    blocks of what they hold (`policy.residency.Chain.marks`), by which the prefill instance sees
    how much of it is this prompt. With ``fetch`` a prefix comes from another instance.
    """

    transfer: Annotated[TransferId, msgspec.Meta(min_length=1, max_length=128)]
    request: Annotated[RequestId, msgspec.Meta(max_length=128)]
    anywhere: bool = False
    held: Annotated[dict[InstanceId, NumTokens], msgspec.Meta(max_length=MAX_HOLDERS)] = {}
    marks: Annotated[list[tuple[NumTokens, int]], msgspec.Meta(max_length=MAX_MARKS)] = []
    fetch: Fetch | None = None


class PriorOutput(msgspec.Struct, frozen=True):
    """Output tokens that exist already; the next instance continues after them.

    ``logprobs`` holds vLLM's arrays as `encode_logprobs` wrote them, bit for bit; empty when the
    client wants none, or with ``is_seen`` has them already.
    """

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    logprobs: str = ""
    is_seen: bool = False


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """Prefill instance → router, in the response to the prefill request.

    ``decode`` is empty when no decode instance took the KV, and ``reason`` says why; then any
    instance may compute the prompt again. ``transfer`` names the attempt that counts, ``digest``
    the prompt. ``is_final`` means that the first token was also the last. The transfer begins
    behind ``held_tokens`` of the prompt, which the decode instance is believed to hold.
    """

    transfer: TransferId
    decode: InstanceId
    num_tokens: int
    digest: str
    reason: str
    prior_output: PriorOutput | None = None
    is_final: bool = False
    prompt_token_ids: list[TokenId] = []
    predicted: Prediction | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    held_tokens: NumTokens = 0


class DecodeParams(msgspec.Struct, frozen=True, tag="decode"):
    """Router → decode instance: the prompt's KV is in its arena (or will be).

    ``digest`` proves that both sides mean the same prompt. Without a ``transfer`` there is no
    KV: compute the prompt and continue after ``prior_output``. With ``is_early`` the prompt is
    still being computed, and its first tokens follow with its KV. Several requests may name the
    same transfer (OpenAI's ``n``): all load from it.
    """

    transfer: Annotated[TransferId, msgspec.Meta(max_length=160)]
    digest: str
    prior_output: PriorOutput | None = None
    predicted: Prediction | None = None
    is_early: bool = False
    cached_tokens: NumTokens = 0  # as the prefill instance counted them
    held_tokens: NumTokens = 0  # of the prompt, that the transfer leaves out
    prefill: InstanceId = InstanceId("")  # that sends the KV
    # Of a running output that moves here: of how many tokens, prompt and output, the KV comes, for
    # each choice.
    kv_tokens: Annotated[list[NumTokens], msgspec.Meta(max_length=MAX_CHOICES)] = []

    def of_choice(self, index: int) -> DecodeParams:
        """Return the parameters of one choice of an output that moves."""
        if not self.kv_tokens:
            return self
        index = min(index, len(self.kv_tokens) - 1)
        name, kv_tokens = choice_name(self.transfer, index), [self.kv_tokens[index]]
        return msgspec.structs.replace(self, transfer=name, kv_tokens=kv_tokens)


Handover = PrefillParams | Prefilled | DecodeParams | Fetch


class _Carried(msgspec.Struct):
    """What carries them: msgspec remembers how to read a Struct, not a union."""

    tetri: Handover | msgspec.UnsetType = msgspec.UNSET


def to_params(params: Handover) -> dict[str, Any]:
    """The value of ``kv_transfer_params`` that carries these parameters."""
    return {KEY: msgspec.to_builtins(params)}


def from_params(params: dict[str, Any] | None) -> Handover | None:
    """The parameters inside ``kv_transfer_params``; None when the key ``"tetri"`` is absent,
    ProtocolError if it holds something else."""
    if not params:
        return None
    if not isinstance(params, dict):
        raise ProtocolError(f"{FIELD} must be an object, not {type(params).__name__}")
    try:
        found = msgspec.convert(params, _Carried).tetri
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{FIELD}: {error}") from error
    return None if found is msgspec.UNSET else found


def digest_of(
    token_ids: Sequence[int],
    media: Sequence[tuple[str, int, int]] = (),
    adapter: tuple[str, str] | None = None,
) -> str:
    """Name a prompt: equal prompts have equal digests, others do not. Its media are given as name
    of the content, first position and number of tokens; those tokens are alike for all media. Its
    LoRA adapter is given as name and digest."""
    digest = blake2b(array("q", token_ids).tobytes(), digest_size=16)
    if media:
        digest.update(msgspec.json.encode(media))
    if adapter is not None:
        digest.update(msgspec.json.encode({"adapter": adapter}))
    return digest.hexdigest()


def find_named(vllm_name: str, get: Callable[[Any], Found | None]) -> Found | None:
    """Get, by the router's id, what belongs to the request that vLLM calls so: it puts a word
    before that id, and numbers after it."""
    name = vllm_name.partition("-")[2]
    while name:
        found = get(name)
        if found is not None:
            return found
        name = name.rpartition("-")[0]
    return None


def prefix_of(router: str) -> str:
    """Prefix of a router's transfer names: instances find them by it when the router is gone."""
    return f"{router}/"


def attempt_name(transfer: TransferId, attempt: int) -> TransferId:
    """Name the n-th attempt of a transfer; the first has the plain name."""
    return transfer if attempt == 0 else TransferId(f"{transfer}~{attempt}")


def choice_name(transfer: TransferId, index: int) -> TransferId:
    """Name the transfer of one choice of an output that moves; the first has the plain name."""
    return transfer if index == 0 else TransferId(f"{transfer}+{index}")


def attempt_names(transfer: TransferId) -> tuple[TransferId, ...]:
    """The names of all attempts that a transfer may have."""
    return tuple(attempt_name(transfer, attempt) for attempt in range(MAX_ATTEMPTS))
