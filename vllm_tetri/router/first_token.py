"""The prefill response: one token, as a complete OpenAI response.

For a client that streams, events are made from it as vLLM's servers make them (vLLM:
`chat_completion_stream_generator`, `completion_stream_generator`), keys and their order
included.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import FIELD, Prefilled, attempt_names, from_params
from vllm_tetri.messages import PrefillEnding
from vllm_tetri.router.errors import DONE, JSON_ERRORS, event, usage_of
from vllm_tetri.types import TransferId

_BROKEN_CHARACTER = "\ufffd"
# Parts of a chat message that are not text.
_OTHER_PARTS = ("reasoning", "tool_calls", "function_call", "refusal", "audio")

_PROMPT, _NO_PROMPT = b'"prompt_token_ids":[', b'"prompt_token_ids":null'
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prefill response."""

    response: dict[str, Any]  # as OpenAI's
    choice: dict[str, Any]  # its only one
    prefilled: Prefilled
    is_chat: bool  # of the chat API, else of the completions API

    @property
    def is_last(self) -> bool:
        """Whether the output ends with this token.

        Only the API server sees a stop string, so its finish reason counts as well.
        """
        return (
            self.prefilled.is_final
            or self.choice.get("finish_reason") == "stop"
            or self.choice.get("stop_reason") is not None
        )

    @property
    def text(self) -> str | None:
        """The token's text; None if it is something else than plain text."""
        text: Any = self.choice.get("text")
        if self.is_chat:
            message = self.choice.get("message")
            if not isinstance(message, dict) or any(message.get(key) for key in _OTHER_PARTS):
                return None
            text = message.get("content")
        return text if isinstance(text, str) else None

    @property
    def shown_text(self) -> str | None:
        """The text that a stream begins with: as in vLLM's, nothing of a part of a character."""
        text = self.text
        return "" if text and _BROKEN_CHARACTER in text else text

    def with_prompt(self, ending: PrefillEnding | None) -> FirstToken:
        """Add the prompt's token ids of the last chunk's message, which are sent only once."""
        prefilled = self.prefilled
        if prefilled.prompt_token_ids or ending is None or ending.digest != prefilled.digest:
            return self
        ids = ending.prompt_token_ids
        prefilled = msgspec.structs.replace(prefilled, prompt_token_ids=ids)
        return FirstToken(self.response, self.choice, prefilled, self.is_chat)

    def complete_response(self) -> bytes:
        """Encode the response to a request that is not streamed and ends here."""
        return msgspec.json.encode({**self.response, FIELD: None})

    def complete_stream(self, *, wants_usage: bool, counts_each: bool = False) -> bytes:
        """Encode all events of a stream that ends with this token."""
        created = self.response["created"]
        ending = {"system_fingerprint": self.response.get("system_fingerprint")}
        if not wants_usage:
            return self.opening(created, is_last=True, **_without_nulls(ending)) + DONE
        usage = {"usage": self.response["usage"], **ending, "metrics": self.response.get("metrics")}
        return (
            self.opening(created, counts_each=counts_each, is_last=True)
            + event(_without_nulls({**self._chunk(created, []), **usage}))
            + DONE
        )

    def opening(
        self, created: int, *, counts_each: bool = False, is_last: bool = False, **more: Any
    ) -> bytes:
        """Encode the events of a stream that begins with this token, created at a time in
        seconds since 1970; each has the usage so far if that is wanted."""
        counted = self._usage(1) if counts_each else {}
        text = event({**self._chunk(created, [self._piece(is_last)]), **counted, **more})
        if not self.is_chat:
            return text
        delta = {"role": self.choice["message"]["role"], "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        counted = self._usage(0) if counts_each else {}
        prompt = {key: self.response.get(key) for key in ("prompt_token_ids", "prompt_text")}
        return event({**self._chunk(created, [choice]), **counted, **prompt}) + text

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        usage = usage_of(self.response["usage"]["prompt_tokens"], num_tokens)
        return {"usage": usage | ({"completion_tokens_details": None} if self.is_chat else {})}

    def _chunk(self, created: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response["id"],
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": created,
            "model": self.response["model"],
            "choices": choices,
        }

    def _piece(self, is_last: bool) -> dict[str, Any]:
        get = self.choice.get
        text = self.text if is_last else self.shown_text
        said: dict[str, Any] = {"delta": {"content": text}} if self.is_chat else {"text": text}
        piece = {"index": 0, **said, "logprobs": get("logprobs")}
        piece["finish_reason"] = get("finish_reason") if is_last else None
        if is_last or not self.is_chat:
            piece["stop_reason"] = get("stop_reason") if is_last else None
        if not self.is_chat:
            piece["prompt_token_ids"] = get("prompt_token_ids")
        piece["token_ids"] = get("token_ids")
        return piece


def read_first_token(body: bytes, transfer: TransferId, *, is_chat: bool) -> FirstToken | None:
    """Decode a prefill response; None if it cannot be read or belongs to another transfer."""
    try:
        response: Any = msgspec.json.decode(body)
        params = from_params(response[FIELD])
        if not isinstance(params, Prefilled):
            return None
        if params.transfer != transfer and params.transfer not in attempt_names(transfer):
            return None
        choice = (response.get("choices") or [{}])[0]
        return FirstToken(response, choice, params, is_chat) if isinstance(choice, dict) else None
    except (*JSON_ERRORS, ProtocolError, LookupError, TypeError) as error:
        _log.warning(
            "prefill response cannot be read, so the request is prefilled again: %r", error
        )
        return None


def without_prompt(raw: bytes) -> bytes:
    """Return an event without the token ids of the prompt: the first one of a stream has them."""
    at = raw.find(_PROMPT)
    return raw if at < 0 else raw[:at] + _NO_PROMPT + raw[raw.index(b"]", at) + 1 :]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value
