"""What the client of a stream has received, and how another instance continues after it.

Instances send the token ids of every event; where the client does not want them they are
removed from the bytes. Events are kept as bytes and decoded only when the stream breaks, or
when there are many.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_tetri.handover import DecodeParams, PriorOutput, unseen_logprobs
from vllm_tetri.router.errors import ABORTED, DONE, ERROR_EVENT, JSON_ERRORS, event
from vllm_tetri.router.first_token import FirstToken
from vllm_tetri.router.request import ApiRequest
from vllm_tetri.types import InstanceInfo, TransferId

_END = b"\n\n"
_DATA = b"data: "
_COMMENT = b":"
_CREATED = b'"created":%d,'
_MAX_EVENT_BYTES = 1 << 26  # an event may repeat the tokens of the prompt
_MAX_KEPT_BYTES = 1 << 16  # most outputs end before
# None of these can occur inside a JSON string, where quotes are escaped. An event that holds
# nothing but an id exists only because ids were asked for.
_IDS = re.compile(rb'"token_ids":\[[\d,]*\]')
_NO_IDS = b'"token_ids":null'
_PROMPT_IDS = re.compile(rb'"prompt_token_ids":\[[\d,]*\]')
_NO_PROMPT_IDS = b'"prompt_token_ids":null'
_EMPTY_DELTA = b'"delta":{},'
_EMPTY_EVENT = re.compile(
    rb'data: [^\n]*"delta":\{\},"logprobs":null,"finish_reason":null,"token_ids":null[^\n]*\n\n'
)
# Lists with one entry per token in the log probabilities of a completion.
_PER_TOKEN = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


class NotResumable(Exception):
    """The received output is not known well enough for another instance to continue it."""


class ContinuationMismatch(Exception):
    """A stream does not begin with the received output."""


class ContinuationFailed(Exception):
    """A stream that should continue the received output is an error."""


@dataclass(frozen=True, slots=True)
class Received:
    """The beginning of an output, as the client has received it."""

    is_chat: bool  # the events are of the chat API, else of the completions API
    created: int  # time in the events, in seconds since 1970
    text: str = ""
    token_ids: tuple[int, ...] = ()
    is_over: bool = False  # this is all of the output


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


class StreamRecord:
    """The output of one request, over all instances that write it. Owned by its task."""

    def __init__(self, *, is_chat: bool, hides_ids: bool) -> None:
        self._is_chat, self._hides_ids = is_chat, hides_ids
        self._kept: list[bytes] = []  # events that are not decoded yet
        self._num_kept_bytes = 0
        self._rest = b""  # of an event that is not complete
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._created = 0
        self._is_over = False
        self._last = b""  # decoded event
        self._problem = ""  # why the output cannot be continued
        self._has_prompt = False
        # An error event, or that of an engine that aborted the request, and what followed it;
        # not sent to the client.
        self.error = b""
        self.is_aborted = False
        self.is_complete = False  # the end of the stream has passed
        self.prompt_token_ids: list[int] = []  # if known; read `received` first

    def begin_with(self, first: FirstToken, created: int) -> None:
        """The client gets the token of a prefill instance first."""
        self._created, self._texts = created, [first.text or ""]
        self._token_ids = first.token_ids

    def begin_continuation(self) -> None:
        """Another instance writes from here on."""
        self._rest, self._has_prompt = b"", False
        self.error, self.is_aborted = b"", False

    def feed(self, data: bytes) -> bytes:
        """Take bytes of an instance; returns the whole events that the client gets."""
        if self._rest or not data.endswith(_END):
            whole, end, self._rest = (self._rest + data).rpartition(_END)
            data = whole + end
        if not data:
            return data
        if ERROR_EVENT in data or ABORTED in data:
            data = self._until_error(data)
        self._kept.append(data)
        self._num_kept_bytes += len(data)
        if self._num_kept_bytes > _MAX_KEPT_BYTES:
            self._decode_kept()
        if data.endswith(DONE):
            self.is_complete = True
        return self._without_ids(data) if self._hides_ids else data

    def take_error(self) -> bytes:
        """Return the error, which then is the regular end of the stream."""
        error, self.error, self.is_complete = self.error, b"", True
        return error

    def received(self) -> Received:
        """Return all that the client has received; raises `NotResumable` if some of it is
        not understood."""
        self._decode_kept()
        if self._problem:
            raise NotResumable(self._problem)
        text, ids = "".join(self._texts), tuple(self._token_ids)
        return Received(self._is_chat, self._created, text, ids, self._is_over)

    def ending(self, num_prompt_tokens: int, *, wants_usage: bool) -> bytes:
        """Return the missing end of an output that is over; read `received` first."""
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

    def _until_error(self, data: bytes) -> bytes:
        at = data.find(ERROR_EVENT)
        if at < 0:
            self.is_aborted = True
            at = data.rindex(_DATA, 0, data.index(ABORTED))
        self.error = data[at:]
        return data[:at]

    def _without_ids(self, data: bytes) -> bytes:
        data = _IDS.sub(_NO_IDS, data)
        if not self._has_prompt:
            self._has_prompt = _DATA in data
            data = _PROMPT_IDS.sub(_NO_PROMPT_IDS, data)
        return _EMPTY_EVENT.sub(b"", data) if _EMPTY_DELTA in data else data

    def _decode_kept(self) -> None:
        kept, self._kept, self._num_kept_bytes = self._kept, [], 0
        for raw in b"".join(kept).split(_END):
            if raw.startswith(_DATA) and raw != DONE.removesuffix(_END):
                self._decode(raw)
        self._texts = ["".join(self._texts)]

    def _decode(self, raw: bytes) -> None:
        try:
            found = _decoder.decode(raw.removeprefix(_DATA))
        except JSON_ERRORS as error:
            self._problem = self._problem or f"an event is not understood: {error}"
            return
        self._last = raw
        self._created = self._created or found.created
        self.prompt_token_ids = found.prompt_token_ids or self.prompt_token_ids
        for choice in found.choices:
            self._add(choice)

    def _add(self, choice: _Choice) -> None:
        delta = choice.delta
        if delta is not None and (delta.reasoning or delta.tool_calls):
            self._problem = self._problem or "the output is more than text"
        text = choice.text or (delta.content if delta is not None else None) or ""
        if text and choice.token_ids is None:
            self._problem = self._problem or "the instance sent no token ids"
        self._texts.append(text)
        self._token_ids += choice.token_ids or ()
        self._is_over = self._is_over or choice.finish_reason is not None
        self.prompt_token_ids = choice.prompt_token_ids or self.prompt_token_ids


class Splice:
    """Turns a stream that begins with the received output into the rest of it.

    Reads may cut events anywhere. An event that was received in part is encoded again, all
    others keep their bytes; only ``created`` becomes that of the received events.
    """

    def __init__(self, received: Received) -> None:
        self._is_chat = received.is_chat
        self._created = received.created
        self._text = received.text  # not found yet
        self._token_ids = list(received.token_ids)  # not found yet
        self._buffer = b""
        self._is_past = False  # the received output has been found
        self._theirs = _CREATED % received.created
        self._ours = self._theirs

    def feed(self, data: bytes) -> bytes:
        """Return what the client gets for these bytes; may be empty.

        Raises:
            ContinuationMismatch: Going on would lose or repeat characters.
            ContinuationFailed: The first event is an error.
        """
        if self._is_past:
            return self._pass(data)
        *events, rest = (self._buffer + data).split(_END)
        for index, found in enumerate(events):
            if written := self._take(found):
                self._is_past, self._buffer = True, b""
                return written + self._pass(_END.join([*events[index + 1 :], rest]))
        if len(rest) > _MAX_EVENT_BYTES:
            raise ContinuationMismatch(f"its first event has more than {_MAX_EVENT_BYTES} bytes")
        self._buffer = rest
        return b""

    def finish(self) -> bytes:
        """Return the remaining bytes at the end of the stream; raises `ContinuationMismatch`
        if it ended before the end of the received output."""
        if not self._is_past:
            raise ContinuationMismatch("it ended before the end of what the client has received")
        return self._buffer

    def _pass(self, data: bytes) -> bytes:
        if self._theirs == self._ours:
            return data
        whole, end, self._buffer = (self._buffer + data).rpartition(_END)
        if len(self._buffer) > _MAX_EVENT_BYTES:
            raise ContinuationMismatch(f"an event has more than {_MAX_EVENT_BYTES} bytes")
        return (whole + end).replace(self._theirs, self._ours)

    def _take(self, raw: bytes) -> bytes:
        """Take one event; returns its part after the received output, if it has one."""
        if raw.startswith(_COMMENT):
            return b""  # a keep-alive comment
        try:
            chunk: Any = msgspec.json.decode(raw.removeprefix(_DATA))
            if "error" in chunk:
                raise ContinuationFailed(raw.removeprefix(_DATA).decode(errors="replace"))
            self._theirs = _CREATED % chunk["created"]
            chunk["created"] = self._created
            (choice,) = chunk["choices"]
            if self._is_chat and "role" in choice["delta"]:
                return b""
            is_over = choice["finish_reason"] is not None
            is_left = self._strip(choice)
        except (*JSON_ERRORS, LookupError, TypeError, ValueError) as error:
            raise ContinuationMismatch(f"unexpected event {raw[:200]!r}: {error!r}") from error
        if is_left and is_over:
            raise ContinuationMismatch(f"it ends before {self._text!r}")
        return b"" if is_left else event(chunk)

    def _strip(self, choice: dict[str, Any]) -> bool:
        """Remove the received output from a choice; returns whether more of it must follow."""
        holder, key = (choice["delta"], "content") if self._is_chat else (choice, "text")
        text = holder.get(key) or ""
        size = min(len(text), len(self._text))
        if text[:size] != self._text[:size]:
            raise ContinuationMismatch(f"{text[:80]!r} does not continue {self._text!r}")
        holder[key], self._text = text[size:], self._text[size:]
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        num_received = len(self._token_ids)
        if logprobs is not None:
            choice["logprobs"] = _logprobs_after(logprobs, num_received)
        if ids is not None:
            if ids[:num_received] != self._token_ids[: len(ids)]:
                raise ContinuationMismatch(f"tokens {ids[:num_received]} are not {self._token_ids}")
            choice["token_ids"], self._token_ids = ids[num_received:], self._token_ids[len(ids) :]
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None  # only the first event of a stream has them
        # There may be received tokens that made no text yet.
        return bool(self._text) or (ids is not None and bool(self._token_ids))


def surely_continues(request: ApiRequest, prior: PriorOutput, instance: InstanceInfo) -> bool:
    """Whether the client may get a first token before the instance has continued it."""
    is_sure = (
        instance.continues
        and (instance.continues_seeded or not request.is_seeded)
        and (bool(prior.logprobs) or not request.wants_logprobs)
    )
    is_plain = request.is_streamed and request.is_plain
    return is_sure and is_plain and not request.is_parsed_by(instance)


def may_resume(
    request: ApiRequest, instance: InstanceInfo, writer: InstanceInfo | None, *, anywhere: bool
) -> bool:
    """Whether an instance continues as `writer`, whose stream broke, would have done; anywhere,
    it may be of another kind, so that the text may differ from here."""
    if request.is_parsed_by(instance):
        return False  # the client has received unparsed text
    return anywhere or writer is None or instance.identity == writer.identity


def resume_body(
    request: ApiRequest,
    received: Received,
    first: FirstToken | None,
    prompt_token_ids: list[int],
    instance: InstanceInfo,
) -> bytes:
    """Encode a decode request without KV: the prompt, and as output what the client has.

    An engine that cannot continue from output tokens computes all of it again; `Splice`
    compares either with what the client has received.
    """
    digest, predicted = "", None
    if first is not None:
        digest, predicted = first.prefilled.digest, first.prefilled.predicted
        prompt_token_ids = first.prefilled.prompt_token_ids or prompt_token_ids
    ids = list(received.token_ids)
    logprobs = unseen_logprobs(ids) if ids and request.wants_logprobs else ""
    prior = PriorOutput(ids, logprobs) if ids else None
    params = DecodeParams(TransferId(""), digest, prior, predicted)
    return request.decode_body(params, prompt_token_ids, instance)


def _logprobs_after(logprobs: dict[str, Any], num_received: int) -> dict[str, Any]:
    """Drop the log probabilities of the first tokens, in either API's form."""
    if "content" in logprobs:
        return {**logprobs, "content": logprobs["content"][num_received:]}
    return {**logprobs, **{key: logprobs[key][num_received:] for key in _PER_TOKEN}}
