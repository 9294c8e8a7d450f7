"""What the client of a stream has received, and how another instance continues after it.

Instances send the token ids of every event; where the client does not want them they are
removed from the bytes. Events are kept as bytes and decoded only when the stream breaks, or
when there are many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from vllm_tetri.handover import DecodeParams, PriorOutput
from vllm_tetri.router._core import hide_ids
from vllm_tetri.router.errors import (
    ABORTED,
    DONE,
    ERROR_EVENT,
    JSON_ERRORS,
    SaidChoice,
    SaidDelta,
    SaidFunction,
    decode_event,
    event,
    usage_of,
)
from vllm_tetri.router.first_token import FirstToken, without_prompt
from vllm_tetri.router.request import ApiRequest
from vllm_tetri.router.response import FlowRules
from vllm_tetri.types import InstanceInfo, TransferId

_END = b"\n\n"
_DATA = b"data: "
_COMMENT = b":"
_CREATED = b'"created":%d,'
_FINISHED, _NO_CHOICES = b'"finish_reason":"', b'"choices":[]'
_MAX_EVENT_BYTES = 1 << 26  # an event may repeat the tokens of the prompt
_MAX_KEPT_BYTES = 1 << 16  # most outputs end before
# What a choice says, besides tool calls by their index.
_TEXT, _REASONING, _NAME, _ARGUMENTS = "text", "reasoning", "name of %d", "arguments of %d"
# Lists with one entry per token in the log probabilities of a completion.
_PER_TOKEN = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


class NotResumable(Exception):
    """The received output is not known well enough for another instance to continue it."""


class ContinuationMismatch(Exception):
    """A stream does not begin with the received output."""


class ContinuationFailed(Exception):
    """A stream that should continue the received output is an error."""


class _Said:
    """What one choice has said: text, reasoning, names and arguments of tool calls, by field."""

    __slots__ = ("texts", "token_ids")

    def __init__(
        self, texts: Mapping[str, str] | None = None, token_ids: Iterable[int] = ()
    ) -> None:
        self.texts, self.token_ids = dict(texts or {}), list(token_ids)

    def copy(self) -> _Said:
        return _Said(self.texts, self.token_ids)

    def add(self, field: str, text: str | None) -> None:
        if text:
            said = self.texts.pop(field, "")  # the only reference: Python appends in place
            said += text
            self.texts[field] = said

    def strip(self, field: str, holder: dict[str, Any], key: str) -> None:
        """Remove from a delta's field what is due of it. Raises `ContinuationMismatch`."""
        text, due = holder.get(key) or "", self.texts.get(field, "")
        size = min(len(text), len(due))
        if text[:size] != due[:size]:
            raise ContinuationMismatch(f"{text[:80]!r} does not continue {due!r}")
        if size:
            holder[key], self.texts[field] = text[size:], due[size:]

    @property
    def is_any(self) -> bool:
        return any(self.texts.values())


class StreamRecord:
    """What the client of one request has received, over all instances that write it.

    Another instance writes the received output first, which is removed from its events; reads
    may cut them anywhere. Owned by the request's task. With `is_plain` it is one choice of text,
    and events have its token ids, so an instance can continue it that has nothing of it.

    Attributes:
        error: An error event, or that of an engine that aborted the request, and what followed
            it; not sent to the client.
        is_complete: Whether the end of the stream has passed.
        is_caught_up: Whether all received output was written by the instance that writes now.
        token_ids, prompt_token_ids, is_over: The output, as far as it is decoded: call `settle`
            first.
    """

    def __init__(self, *, is_chat: bool, hides_ids: bool, is_plain: bool = True) -> None:
        self._is_chat, self._hides_ids, self.is_plain = is_chat, hides_ids, is_plain
        self._kept = bytearray()  # events that are not decoded yet
        self._rest = b""  # of an event that is not complete
        self._last = b""  # decoded event
        self._problem = ""  # why the output cannot be continued
        self._has_prompt = False
        self._created = 0
        self._theirs = self._ours = b""  # the time in events, which stays that of the first
        # What another instance has to write once more, if it has not yet.
        self.is_caught_up, self._due = True, dict[int, _Said]()
        self._said: defaultdict[int, _Said] = defaultdict(_Said)  # by choice
        self.error = b""
        self.is_aborted = self.is_complete = self.is_over = False
        self.prompt_token_ids: list[int] = []

    def copy(self) -> StreamRecord:
        """Return one that goes on by itself; the prompt's token ids are never changed."""
        made = StreamRecord(
            is_chat=self._is_chat, hides_ids=self._hides_ids, is_plain=self.is_plain
        )
        made._kept, made._rest, made._last = bytearray(self._kept), self._rest, self._last
        made._problem, made._has_prompt, made._created = (
            self._problem, self._has_prompt, self._created,
        )  # fmt: skip
        made._theirs, made._ours, made.is_caught_up = self._theirs, self._ours, self.is_caught_up
        for index, said in self._said.items():
            made._said[index] = said.copy()
        made._due = {index: said.copy() for index, said in self._due.items()}
        made.error, made.is_aborted = self.error, self.is_aborted
        made.is_complete, made.is_over = self.is_complete, self.is_over
        made.prompt_token_ids = self.prompt_token_ids
        return made

    @property
    def token_ids(self) -> list[int]:
        """Return those of the first choice."""
        return self._said[0].token_ids

    def begin_with(self, first: FirstToken, created: int) -> None:
        """The client gets the token of a prefill instance first."""
        prior, self._created = first.prefilled.prior_output, created
        self._said[0].add(_TEXT, first.shown_text)
        self._said[0].token_ids = list(prior.token_ids) if prior is not None else []
        self.prompt_token_ids = first.prefilled.prompt_token_ids

    def begin_continuation(self) -> None:
        """Another instance writes from here on; raises `NotResumable`."""
        self.settle()
        self._rest, self._has_prompt = b"", False
        self.error, self.is_aborted = b"", False
        self.is_caught_up = not self._created  # the client has no event
        self._due = {index: said.copy() for index, said in self._said.items()}
        self._theirs = self._ours = _CREATED % self._created

    def feed(self, data: bytes) -> bytes:
        """Take bytes of an instance; returns the whole events that the client gets. Raises
        `ContinuationMismatch`: going on would lose or repeat characters; `ContinuationFailed`: the
        first event of a continuation is an error."""
        if self._rest or not data.endswith(_END):
            whole, end, self._rest = (self._rest + data).rpartition(_END)
            data = whole + end
            if len(self._rest) > _MAX_EVENT_BYTES:
                raise ContinuationMismatch(f"an event has more than {_MAX_EVENT_BYTES} bytes")
        if not self.is_caught_up:
            data = self._skip_received(data)
        if not data:
            return data
        if self._theirs != self._ours:
            data = data.replace(self._theirs, self._ours)
        if ERROR_EVENT in data or ABORTED in data:
            at = data.find(ERROR_EVENT)
            if at < 0:
                self.is_aborted = True
                before = data.rfind(_END, 0, data.index(ABORTED))
                at = before + len(_END) if before >= 0 else 0
            data, self.error = data[:at], data[at:]
        self.keep(data)
        is_end = data.endswith(DONE)
        if (is_end or _NO_CHOICES in data) and not self.is_complete and self._is_empty():
            self.error, self.is_aborted = data, True  # vLLM does not say so without a token
            return b""
        self.is_complete = self.is_complete or is_end
        return self._without_ids(data) if self._hides_ids else data

    def settle(self) -> None:
        """Decode all that the client has received; raises `NotResumable` if some of it is not
        understood."""
        self._decode_kept()
        if self._problem:
            raise NotResumable(self._problem)

    def take_error(self) -> bytes:
        """Return the error, which then is the regular end of the stream."""
        error, self.error, self.is_complete = self.error, b"", True
        return error

    def ending(self, num_prompt_tokens: int, *, wants_usage: bool) -> bytes:
        """Return the missing end of an output that is over; call `settle` first."""
        if not wants_usage or _NO_CHOICES in self._last:
            return DONE
        chunk: dict[str, Any] = msgspec.json.decode(self._last.removeprefix(_DATA))
        usage = usage_of(num_prompt_tokens, len(self.token_ids))
        kept = ("id", "object", "created", "model")
        last: dict[str, Any] = {key: chunk[key] for key in kept if key in chunk}
        return event({**last, "choices": [], "usage": usage}) + DONE

    def flow_rules(self) -> FlowRules | None:
        """Return what happens to further events that need not pass here; None if they have to."""
        is_able = self.is_caught_up and not (self._rest or self.error or self.is_complete)
        if not is_able or (self._hides_ids and not self._has_prompt):
            return None
        is_other, hides_ids = self._theirs != self._ours, self._hides_ids
        times = (self._theirs, self._ours) if is_other else (b"", b"")
        return FlowRules(self.keep, hides_ids, hides_ids and self._is_chat, *times)

    def keep(self, events: bytes) -> None:
        """Take whole events that the client got without passing here."""
        self._kept += events
        if len(self._kept) > _MAX_KEPT_BYTES:
            self._decode_kept()

    def _is_empty(self) -> bool:
        """Whether no choice has said anything, nor why it ended."""
        if self.is_over or self._kept.rfind(_FINISHED) >= 0:  # it is near the end
            return False
        self._decode_kept()
        has_said = any(each.is_any or each.token_ids for each in self._said.values())
        return not (self.is_over or self._problem or has_said)

    def _without_ids(self, data: bytes) -> bytes:
        is_first = not self._has_prompt
        self._has_prompt = self._has_prompt or _DATA in data
        return hide_ids(data, with_prompt=is_first, drops_empty=self._is_chat)

    def _decode_kept(self) -> None:
        if not self._kept:
            return
        kept, self._kept = bytes(self._kept), bytearray()
        for raw in kept.split(_END):
            if not raw.startswith(_DATA) or raw == DONE.removesuffix(_END):
                continue
            try:
                found = decode_event(raw.removeprefix(_DATA))
            except JSON_ERRORS as error:
                self._problem = self._problem or f"an event is not understood: {error}"
                continue
            self._last = raw
            self._created = self._created or found.created
            self.prompt_token_ids = found.prompt_token_ids or self.prompt_token_ids
            for choice in found.choices:
                self._add(choice)

    def _add(self, choice: SaidChoice) -> None:
        delta, said = choice.delta or SaidDelta(), self._said[choice.index]
        text = choice.text or delta.content
        said.add(_TEXT, text)
        said.add(_REASONING, delta.reasoning)
        for call in delta.tool_calls or ():
            function = call.function or SaidFunction()
            said.add(_NAME % call.index, function.name)
            said.add(_ARGUMENTS % call.index, function.arguments)
        if self.is_plain and (delta.reasoning or delta.tool_calls):
            self._problem = self._problem or "the output is more than text"
        if self.is_plain and text and choice.token_ids is None:
            self._problem = self._problem or "the instance sent no token ids"
        said.token_ids += choice.token_ids or ()
        self.is_over = self.is_over or choice.finish_reason is not None
        self.prompt_token_ids = choice.prompt_token_ids or self.prompt_token_ids

    def _skip_received(self, data: bytes) -> bytes:
        """Remove received output from whole events; an event that was received in part is
        encoded again, all others keep their bytes."""
        written, at = b"", 0
        while (end := data.find(_END, at)) >= 0:
            written += self._take(data[at:end])
            at = end + len(_END)
            if written and not any(each.is_any or each.token_ids for each in self._due.values()):
                self.is_caught_up = True
                return written + data[at:]
        return written

    def _take(self, raw: bytes) -> bytes:
        """Take one event; returns its part after the received output, if it has one."""
        if raw.startswith(_COMMENT):
            return b""  # a keep-alive comment
        has_ended = raw == DONE.removesuffix(_END) or _NO_CHOICES in raw
        if ABORTED in raw or has_ended:  # the latter: without a token
            self.is_aborted = True
            raise ContinuationFailed("its engine aborted the request")
        try:
            chunk: Any = msgspec.json.decode(without_prompt(raw.removeprefix(_DATA)))
            if "error" in chunk:
                raise ContinuationFailed(raw.removeprefix(_DATA).decode(errors="replace"))
            self._theirs = _CREATED % chunk["created"]
            chunk["created"] = self._created
            (choice,) = chunk["choices"]
            if self._is_chat and "role" in choice["delta"]:
                return b""
            due = self._due.setdefault(choice["index"], _Said())
            is_over = choice["finish_reason"] is not None
            has_more = self._strip(choice, due)
        except (*JSON_ERRORS, LookupError, TypeError, ValueError) as error:
            raise ContinuationMismatch(f"unexpected event {raw[:200]!r}: {error!r}") from error
        # There may be received tokens that made no text yet.
        is_left = due.is_any or (choice.get("token_ids") is not None and bool(due.token_ids))
        if is_left and is_over:
            raise ContinuationMismatch(f"it ends before {due.texts!r}")
        if not is_left:
            due.token_ids = []
        # A parser may hold text back of which the client has a part, and tokens behind it.
        return event(chunk) if has_more or not is_left or choice.get("token_ids") else b""

    def _strip(self, choice: dict[str, Any], due: _Said) -> bool:
        """Remove the received output from a choice; returns whether anything is left that the
        client has not got while other parts of it must still follow."""
        holder, key = (choice["delta"], "content") if self._is_chat else (choice, "text")
        due.strip(_TEXT, holder, key)
        if holder.get("reasoning"):
            due.strip(_REASONING, holder, "reasoning")
        calls = []
        for call in holder.get("tool_calls") or ():
            function, index = call.get("function") or {}, call["index"]
            has_name = bool(due.texts.get(_NAME % index))
            due.strip(_NAME % index, function, "name")
            due.strip(_ARGUMENTS % index, function, "arguments")
            if has_name:  # the client has its id, which is another one here
                call = {"index": index, "function": {"arguments": function.get("arguments") or ""}}
            if call["function"].get("name") or call["function"].get("arguments"):
                calls.append(call)
        if holder.get("tool_calls"):
            holder["tool_calls"] = calls
        ids, num_due = choice.get("token_ids"), len(due.token_ids)
        if (logprobs := choice.get("logprobs")) is not None:
            choice["logprobs"] = _logprobs_after(logprobs, num_due)
        if ids is not None:
            if ids[:num_due] != due.token_ids[: len(ids)]:
                raise ContinuationMismatch(f"tokens {ids[:num_due]} are not {due.token_ids}")
            choice["token_ids"], due.token_ids = ids[num_due:], due.token_ids[len(ids) :]
        return bool(holder.get(key) or holder.get("reasoning") or holder.get("tool_calls"))


def surely_continues(request: ApiRequest, prior: PriorOutput, instance: InstanceInfo) -> bool:
    """Whether the client may get a first token before the instance has continued it."""
    is_sure = (
        instance.continues
        and (instance.continues_seeded or not request.is_seeded)
        and (bool(prior.logprobs) or not request.wants_logprobs)
    )
    # At an address there may be another medium when it is read again, and so another prompt.
    is_plain = request.is_streamed and request.is_plain and not request.has_links
    return is_sure and is_plain and not request.is_parsed_by(instance)


def may_resume(
    request: ApiRequest, instance: InstanceInfo, writer: InstanceInfo | None, *, anywhere: bool
) -> bool:
    """Whether an instance continues as `writer`, whose stream broke, would have done; anywhere,
    it may be of another kind, so that the text may differ from here."""
    if request.is_parsed_by(instance):
        return False  # the client has received unparsed text
    if anywhere or writer is None:
        return True
    ours, theirs = (each.adapters.get(request.model) for each in (instance, writer))
    is_same = (ours and ours.digest) == (theirs and theirs.digest)
    return is_same and instance.identity == writer.identity


def resume_body(
    request: ApiRequest, received: StreamRecord, first: FirstToken | None, instance: InstanceInfo
) -> bytes:
    """Encode a decode request without KV: the prompt, and as output what the client has.

    An engine that cannot continue from output tokens computes all of it again; either is
    compared with what the client has received.
    """
    digest, predicted, cached_tokens, prompt_ids = "", None, 0, received.prompt_token_ids
    if first is not None:
        digest, predicted = first.prefilled.digest, first.prefilled.predicted
        prompt_ids = prompt_ids or first.prefilled.prompt_token_ids
        cached_tokens = first.prefilled.cached_tokens
    ids = received.token_ids
    prior = PriorOutput(ids, is_seen=True) if ids else None
    params = DecodeParams(TransferId(""), digest, prior, predicted, cached_tokens=cached_tokens)
    return request.decode_body(params, prompt_ids, instance)


def _logprobs_after(logprobs: dict[str, Any], num_received: int) -> dict[str, Any]:
    """Drop the log probabilities of the first tokens, in either API's form."""
    if "content" in logprobs:
        return {**logprobs, "content": logprobs["content"][num_received:]}
    return {**logprobs, **{key: logprobs[key][num_received:] for key in _PER_TOKEN}}
