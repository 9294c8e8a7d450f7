"""Which blocks of KV a prompt has, before any instance has seen it.

The router does not tokenise. It cuts a prompt into pieces, names every start of it by a digest
that is chained over them, and remembers for each start the chain of blocks that an instance
reported for the request. A later prompt that begins alike finds that chain. How many of its
tokens are the same is an estimate, good enough for a price; what is sent is decided by hashes.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from cachetools import LRUCache

from vllm_tetri.handover import find_named
from vllm_tetri.policy.residency import Chain
from vllm_tetri.types import InstanceId

_PIECE_BYTES = 1024
_MAX_PIECES = 2048
_MAX_HOLDERS = 4
_MAX_NAMES = 1 << 25  # of blocks in chains, all together, 8 bytes each
_START_NAMES = 48  # take as much memory as what is kept of a start beside its chain
_MAX_PENDING = 1 << 19  # starts of requests that have not ended
_MEDIA_BYTES = 4096  # of text have about as many tokens as an image
_PENDING_S = 900.0  # in which a request must end
# What changes a prompt's tokens beside its messages or text, or parts tenants.
_BASE = ("model", "cache_salt", "tools", "functions", "documents", "chat_template",
         "chat_template_kwargs", "reasoning_effort", "mm_processor_kwargs",
         "add_special_tokens", "add_generation_prompt", "continue_final_message")  # fmt: skip
_WRITTEN = ("tools", "functions", "documents")  # of these, into the prompt before all messages


class Start(NamedTuple):
    """A start of a prompt: its digest, its length, and that of the model's output after it."""

    digest: int
    num_bytes: int
    answer_bytes: int  # 0 if something else follows


class Known(NamedTuple):
    """What is known of a prompt: the chain that it has the first `common_tokens` of, and how
    many tokens it has, both estimated."""

    chain: Chain
    common_tokens: int
    prompt_tokens: int
    holders: tuple[InstanceId, ...]  # that reported the chain, or one with that start before it


class _Learnt(NamedTuple):
    chain: Chain
    tokens: int  # of this start, estimated
    is_end: bool  # it is a whole prompt
    bytes_per_token: float
    holders: tuple[InstanceId, ...]
    share: int  # of the chain's names, among the starts that have it, and its own size


class PrefixIndex:
    """Chains of blocks by the start of a prompt, the least recently used ones forgotten. Owned by
    the event loop."""

    def __init__(self) -> None:
        self._learnt = LRUCache[int, _Learnt](_MAX_NAMES, lambda each: each.share)
        # Two generations, since when, and the starts in the newer one.
        self._pending: dict[str, list[Start]] = {}
        self._older: dict[str, list[Start]] = {}
        self._since_s, self._num_pending = time.monotonic(), 0

    def expect(self, entry: str, starts: list[Start]) -> None:
        """Keep the starts of a request that was sent to an instance, until its chain comes."""
        if not starts:
            return
        now, self._num_pending = time.monotonic(), self._num_pending + len(starts)
        if now - self._since_s >= _PENDING_S or self._num_pending > _MAX_PENDING // 2:
            is_idle = now - self._since_s >= 2 * _PENDING_S
            self._older, self._pending = {} if is_idle else self._pending, {}
            self._since_s, self._num_pending = now, len(starts)
        self._pending[entry] = starts

    def learn(self, instance: InstanceId, vllm_name: str, chain: Chain, prompt_tokens: int) -> None:
        """Record the chain that an instance reports for a request that ended there."""
        starts = find_named(vllm_name, self._starts_of)
        if not starts:
            return
        num_bytes, share = starts[-1].num_bytes, _START_NAMES + len(chain.names) // len(starts)
        for start in starts:
            is_end = start is starts[-1]
            tokens = prompt_tokens * start.num_bytes // num_bytes
            known = self._learnt.get(start.digest)
            if known is not None and known.is_end and not is_end and start.answer_bytes:
                is_end, tokens = True, known.tokens  # as when it was the whole prompt
            before = known.holders if known is not None else ()
            others = tuple(each for each in before if each != instance)[: _MAX_HOLDERS - 1]
            self._learnt[start.digest] = _Learnt(
                chain, tokens, is_end, num_bytes / prompt_tokens, (instance, *others), share
            )

    def _starts_of(self, entry: str) -> list[Start] | None:
        return self._pending.get(entry) or self._older.get(entry)

    def find(self, starts: list[Start]) -> Known | None:
        """Return what is known of a prompt by the longest start that was seen; None if nothing."""
        known = self._learnt
        count = bisect_left(starts, True, key=lambda start: start.digest not in known)
        if count == 0:
            return None
        start = starts[count - 1]
        chain, tokens, is_end, bytes_per_token, holders, _ = known[start.digest]
        seen_bytes = start.num_bytes
        if is_end and start.answer_bytes:
            # The output was computed there, too, and most likely it is what follows here.
            tokens += round(start.answer_bytes / bytes_per_token)
            seen_bytes += start.answer_bytes
        rest = max(0, starts[-1].num_bytes - seen_bytes) / bytes_per_token
        common = min(tokens, len(chain.names) * chain.block_tokens)
        return Known(chain, common, tokens + round(rest), holders)


def starts_of(body: dict[str, Any], *, is_chat: bool) -> list[Start]:
    """Name every start of the prompt of a request, in order."""
    base = {key: body[key] for key in _BASE if key in body}
    digest = hash(msgspec.json.encode([is_chat, base], order="sorted"))
    starts = list[Start]()
    num_bytes = sum(len(msgspec.json.encode(base[key])) for key in _WRITTEN if key in base)
    for text, answer_bytes in _texts(body, is_chat=is_chat):
        last = len(text) - _PIECE_BYTES
        for at in range(0, len(text), _PIECE_BYTES):
            piece = text[at : at + _PIECE_BYTES]
            num_bytes += len(piece)
            digest = hash((digest, piece))
            starts.append(Start(digest, num_bytes, answer_bytes if at >= last else 0))
            if len(starts) == _MAX_PIECES:
                return starts
    return starts


def _texts(body: dict[str, Any], *, is_chat: bool) -> Iterator[tuple[bytes, int]]:
    """Yield the messages of a prompt, or all of it, each with the bytes of an output of the model
    that follows it."""
    if is_chat:
        messages = body.get("messages")
        messages = messages if isinstance(messages, list) else []
        known: bytes | None = None  # the text of the next message
        for message, following in pairwise([*messages, None]):
            text = msgspec.json.encode(_without_media(message)) if known is None else known
            is_answer = isinstance(following, dict) and following.get("role") == "assistant"
            known = msgspec.json.encode(_without_media(following)) if is_answer else None
            yield text, len(known or b"")
        return
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        yield prompt.encode(errors="replace"), 0
    elif isinstance(prompt, list):
        with suppress(OverflowError, TypeError):  # no token ids
            yield array("q", prompt).tobytes(), 0


def _without_media(message: Any) -> Any:
    """Put in the place of an image, a video or a sound its digest, as long as a text of about as
    many tokens: how many bytes it has says nothing."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    return {**message, "content": [_medium_or_text(each) for each in parts]}


def _medium_or_text(part: Any) -> Any:
    if not isinstance(part, dict) or "text" in part:
        return part
    digest = blake2b(msgspec.json.encode(part, order="sorted"), digest_size=16)
    return digest.hexdigest().ljust(_MEDIA_BYTES)
