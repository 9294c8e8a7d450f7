"""A stream behind what the client has already: a token from prefill, or all of a stream
that broke.

It begins with what was shown, too. Its first events are read, what was shown is taken
out of them, and from there on its bytes pass unread.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_tetri.router.answers import NO_JSON, event
from vllm_tetri.router.shown import Shown

_END = b"\n\n"
_MOST_EVENT_BYTES = 1 << 26  # it may repeat the tokens of the prompt
_DATA = b"data: "
_COMMENT = b":"
_CREATED = b'"created":%d,'
# Lists with one entry per token in the log probabilities of a completion.
_PER_TOKEN = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


class SpliceMismatch(Exception):
    """Leg 2 does not begin with what was shown."""


class SpliceRefused(Exception):
    """Leg 2 says an error instead of going on."""


class Splice:
    """Turns the bytes of leg 2 into those that follow what was shown.

    Reads may cut its events anywhere. An event that was shown in part is written
    anew, all others keep their bytes; only ``created`` becomes that of the shown events.
    """

    def __init__(self, shown: Shown) -> None:
        self._is_chat = shown.is_chat
        self._created = shown.created
        self._text = shown.text  # not yet seen in leg 2
        self._token_ids = list(shown.token_ids)  # likewise
        self._buffer = b""
        self._is_behind = False
        self._theirs = _CREATED % shown.created
        self._ours = self._theirs

    def feed(self, data: bytes) -> bytes:
        """What the client gets for these bytes; may be nothing yet.

        Raises:
            SpliceMismatch: Going on would lose or repeat characters.
            SpliceRefused: The first event is an error.
        """
        if self._is_behind:
            return self._pass(data)
        *events, rest = (self._buffer + data).split(_END)
        for index, found in enumerate(events):
            if written := self._take(found):
                self._is_behind, self._buffer = True, b""
                return written + self._pass(_END.join([*events[index + 1 :], rest]))
        if len(rest) > _MOST_EVENT_BYTES:
            raise SpliceMismatch(f"its first event has more than {_MOST_EVENT_BYTES} bytes")
        self._buffer = rest
        return b""

    def finish(self) -> bytes:
        """What is left when leg 2 has ended.

        Raises:
            SpliceMismatch: It ended before it came to what was shown.
        """
        if not self._is_behind:
            raise SpliceMismatch("the stream ended before it came to what was shown")
        return self._buffer

    def _pass(self, data: bytes) -> bytes:
        if self._theirs == self._ours:
            return data
        whole, end, self._buffer = (self._buffer + data).rpartition(_END)
        if len(self._buffer) > _MOST_EVENT_BYTES:
            raise SpliceMismatch(f"an event has more than {_MOST_EVENT_BYTES} bytes")
        return (whole + end).replace(self._theirs, self._ours)

    def _take(self, raw: bytes) -> bytes:
        """One event; what goes on behind the shown token, once that was seen in full."""
        if raw.startswith(_COMMENT):
            return b""  # keeps a connection alive
        try:
            chunk: Any = msgspec.json.decode(raw.removeprefix(_DATA))
            if "error" in chunk:
                raise SpliceRefused(raw.removeprefix(_DATA).decode(errors="replace"))
            self._theirs = _CREATED % chunk["created"]
            chunk["created"] = self._created
            (choice,) = chunk["choices"]
            if self._is_chat and "role" in choice["delta"]:
                return b""
            is_over = choice["finish_reason"] is not None
            is_left = self._strip(choice)
        except (*NO_JSON, LookupError, TypeError, ValueError) as error:
            raise SpliceMismatch(f"unexpected event {raw[:200]!r}: {error!r}") from error
        if is_left and is_over:
            raise SpliceMismatch(f"the answer ends before {self._text!r}")
        return b"" if is_left else event(chunk)

    def _strip(self, choice: dict[str, Any]) -> bool:
        """Take out what was shown; whether there is more of that to come."""
        holder, key = (choice["delta"], "content") if self._is_chat else (choice, "text")
        text = holder.get(key) or ""
        size = min(len(text), len(self._text))
        if text[:size] != self._text[:size]:
            raise SpliceMismatch(f"{text[:80]!r} does not go on behind {self._text!r}")
        holder[key], self._text = text[size:], self._text[size:]
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        num_shown = len(self._token_ids)
        if logprobs is not None:
            choice["logprobs"] = _behind(logprobs, num_shown)
        if ids is not None:
            if ids[:num_shown] != self._token_ids[: len(ids)]:
                raise SpliceMismatch(f"tokens {ids[:num_shown]} are not {self._token_ids}")
            choice["token_ids"], self._token_ids = ids[num_shown:], self._token_ids[len(ids) :]
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None  # only the first event of a stream has them
        # Tokens may have been shown that made no text yet.
        return bool(self._text) or (ids is not None and bool(self._token_ids))


def _behind(logprobs: dict[str, Any], num_shown: int) -> dict[str, Any]:
    """Log probabilities without those of the first tokens, in either API's form."""
    if "content" in logprobs:
        return {**logprobs, "content": logprobs["content"][num_shown:]}
    return {**logprobs, **{key: logprobs[key][num_shown:] for key in _PER_TOKEN}}
