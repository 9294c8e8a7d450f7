"""What the client of a stream has got, so that another instance can go on behind it.

Instances tell the token ids of every event; where the client does not want them they are
taken out of the bytes again. Nothing is read of events while they pass: they are kept as
they are, and read when the stream breaks or when there are many.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from vllm_tetri.router.answers import ERROR_EVENT, GIVEN_UP, NO_JSON, event
from vllm_tetri.router.first_token import DONE, FirstToken
from vllm_tetri.router.shown import Shown

_END = b"\n\n"
_DATA = b"data: "
# Kept unread at most; most answers end before.
_MOST_KEPT_BYTES = 1 << 16
# None of these can be inside of a JSON string, where quotes are escaped. An event that tells
# nothing but an id exists only because ids were asked for.
_IDS = re.compile(rb'"token_ids":\[[\d,]*\]')
_NO_IDS = b'"token_ids":null'
_PROMPT_IDS = re.compile(rb'"prompt_token_ids":\[[\d,]*\]')
_NO_PROMPT_IDS = b'"prompt_token_ids":null'
_NOTHING = b'"delta":{},'
_SAYS_NOTHING = re.compile(
    rb'data: [^\n]*"delta":\{\},"logprobs":null,"finish_reason":null,"token_ids":null[^\n]*\n\n'
)


class Unprovable(Exception):
    """What the client has got is not known well enough for another instance to go on."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    created: int
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


_decoder = msgspec.json.Decoder(_Event)


class Record:
    """Of one stream, over all instances that write it. Owner: the request's task.

    Args:
        is_chat: Which of the two APIs it belongs to.
        hides_ids: Whether the client gets no token ids.

    Attributes:
        trouble: The event of an error, or of an engine that gave the request up, and what
            followed it; the client has not got them.
        is_given_up: Which of the two.
        is_whole: Whether the end of the stream has passed.
        prompt_token_ids: Of the prompt, as far as they were told; read `shown` first.
    """

    def __init__(self, *, is_chat: bool, hides_ids: bool) -> None:
        self._is_chat = is_chat
        self._hides_ids = hides_ids
        self._kept: list[bytes] = []
        self._num_kept_bytes = 0
        self._rest = b""
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._created = 0
        self._is_over = False
        self._last = b""
        self._problem = ""
        self._has_prompt = False
        self.trouble = b""
        self.is_given_up = False
        self.is_whole = False
        self.prompt_token_ids: list[int] = []

    def show(self, first: FirstToken, created: int) -> None:
        """The client gets a token of a prefill instance, before anything else."""
        shown = first.shown(created)
        self._created, self._texts = created, [shown.text]
        self._token_ids = list(shown.token_ids)

    def begin_leg(self) -> None:
        """Another instance writes from here on."""
        self._rest, self._has_prompt = b"", False
        self.trouble, self.is_given_up = b"", False

    def feed(self, data: bytes) -> bytes:
        """Bytes that go to the client; what it gets of them, in whole events."""
        if self._rest or not data.endswith(_END):
            whole, end, self._rest = (self._rest + data).rpartition(_END)
            data = whole + end
        if not data:
            return data
        if ERROR_EVENT in data or GIVEN_UP in data:
            data = self._until_trouble(data)
        self._kept.append(data)
        self._num_kept_bytes += len(data)
        if self._num_kept_bytes > _MOST_KEPT_BYTES:
            self._read_kept()
        if data.endswith(DONE):
            self.is_whole = True
        return self._without_ids(data) if self._hides_ids else data

    def shown(self) -> Shown:
        """All that the client has got.

        Raises:
            Unprovable: Some of it is not understood.
        """
        self._read_kept()
        if self._problem:
            raise Unprovable(self._problem)
        return Shown(
            self._is_chat,
            self._created,
            "".join(self._texts),
            tuple(self._token_ids),
            self._is_over,
        )

    def ending(self, num_prompt_tokens: int, *, wants_usage: bool) -> bytes:
        """What is missing of an answer that is over; read `shown` first."""
        if not wants_usage or b'"choices":[]' in self._last:
            return DONE
        chunk: dict[str, Any] = msgspec.json.decode(self._last.removeprefix(_DATA))
        num_tokens = len(self._token_ids)
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "completion_tokens": num_tokens,
        }
        kept = ("id", "object", "created", "model")
        last: dict[str, Any] = {key: chunk[key] for key in kept if key in chunk}
        return event({**last, "choices": [], "usage": usage}) + DONE

    def _until_trouble(self, data: bytes) -> bytes:
        at = data.find(ERROR_EVENT)
        if at < 0:
            self.is_given_up = True
            at = data.rindex(_DATA, 0, data.index(GIVEN_UP))
        self.trouble = data[at:]
        return data[:at]

    def _without_ids(self, data: bytes) -> bytes:
        data = _IDS.sub(_NO_IDS, data)
        if not self._has_prompt:
            self._has_prompt = _DATA in data
            data = _PROMPT_IDS.sub(_NO_PROMPT_IDS, data)
        return _SAYS_NOTHING.sub(b"", data) if _NOTHING in data else data

    def _read_kept(self) -> None:
        kept, self._kept, self._num_kept_bytes = self._kept, [], 0
        for raw in b"".join(kept).split(_END):
            if raw.startswith(_DATA) and raw != DONE.removesuffix(_END):
                self._read(raw)
        self._texts = ["".join(self._texts)]

    def _read(self, raw: bytes) -> None:
        try:
            found = _decoder.decode(raw.removeprefix(_DATA))
        except NO_JSON as error:
            self._problem = self._problem or f"an event is not understood: {error}"
            return
        self._last = raw
        self._created = self._created or found.created
        self._note_prompt(found.prompt_token_ids)
        for choice in found.choices:
            self._take(choice)

    def _take(self, choice: _Choice) -> None:
        delta = choice.delta
        if delta is not None and (delta.reasoning or delta.tool_calls):
            self._problem = self._problem or "it is more than text"
        text = choice.text or (delta.content if delta is not None else None) or ""
        if text and choice.token_ids is None:
            self._problem = self._problem or "the instance told no token ids"
        self._texts.append(text)
        self._token_ids += choice.token_ids or ()
        self._is_over = self._is_over or choice.finish_reason is not None
        self._note_prompt(choice.prompt_token_ids)

    def _note_prompt(self, token_ids: list[int] | None) -> None:
        if token_ids:
            self.prompt_token_ids = token_ids
