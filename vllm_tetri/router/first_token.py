"""The answer of the first leg: one token, as a whole OpenAI answer.

Where a client waits for a stream, its events are made from that answer as vLLM's
servers make them (vLLM: `chat_completion_stream_generator`,
`completion_stream_generator`), keys and their order included.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import FIELD, Prefilled, attempt_names, from_params
from vllm_tetri.router.answers import NO_JSON, event
from vllm_tetri.router.shown import Shown
from vllm_tetri.types import TransferId

DONE = b"data: [DONE]\n\n"
_BROKEN_CHARACTER = "\ufffd"
# Parts of a chat message that are not its text.
_OTHER_PARTS = ("reasoning", "tool_calls", "function_call", "refusal", "audio")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What leg 1 answered.

    Attributes:
        answer: The OpenAI answer.
        choice: Its only choice.
        prefilled: What the prefill instance says of the hand-over.
        is_chat: Which of the two APIs it belongs to.
    """

    answer: dict[str, Any]
    choice: dict[str, Any]
    prefilled: Prefilled
    is_chat: bool

    @property
    def is_last(self) -> bool:
        """Whether the answer ends with it.

        A stop string is seen by the API server only: what it says of the end tells.
        """
        return (
            self.prefilled.is_final
            or self.choice.get("finish_reason") == "stop"
            or self.choice.get("stop_reason") is not None
        )

    @property
    def text(self) -> str | None:
        """The token's text; None when it is something else than plain text."""
        text: Any = self.choice.get("text")
        if self.is_chat:
            message = self.choice.get("message")
            if not isinstance(message, dict) or any(message.get(key) for key in _OTHER_PARTS):
                return None
            text = message.get("content")
        return text if isinstance(text, str) else None

    @property
    def is_whole_text(self) -> bool:
        """Whether its text can stand alone: not a part of a character, not nothing."""
        return bool(self.text) and _BROKEN_CHARACTER not in (self.text or "")

    def shown(self, created: int) -> Shown:
        """What a client has seen that was shown it at that time, in seconds since 1970."""
        given = self.prefilled.given
        ids = tuple(given.token_ids) if given is not None else ()
        return Shown(self.is_chat, created, self.text or "", ids)

    def whole(self) -> bytes:
        """The answer of a request that is not streamed and ends here."""
        return msgspec.json.encode({**self.answer, FIELD: None})

    def opening(self, created: int, *, counts_each: bool = False) -> bytes:
        """Events that show the token as the beginning of a stream.

        Args:
            created: Their time, in seconds since 1970.
            counts_each: Whether every event has the usage so far.
        """
        return self._events(created, self._piece(), counts_each=counts_each)

    def whole_stream(self, *, wants_usage: bool, counts_each: bool = False) -> bytes:
        """Every event of a stream that ends with this token."""
        created, piece = self.answer["created"], self._piece(is_last=True)
        ending = {"system_fingerprint": self.answer.get("system_fingerprint")}
        if not wants_usage:
            ending = _without_nulls(ending)
            return self._events(created, piece, counts_each=False, **ending) + DONE
        usage = {"usage": self.answer["usage"], **ending, "metrics": self.answer.get("metrics")}
        return (
            self._events(created, piece, counts_each=counts_each)
            + event(_without_nulls({**self._chunk(created, []), **usage}))
            + DONE
        )

    def _events(
        self, created: int, piece: dict[str, Any], *, counts_each: bool, **more: Any
    ) -> bytes:
        """The token's event, and before it what a chat begins with."""
        counted = self._usage(1) if counts_each else {}
        text = event({**self._chunk(created, [piece]), **counted, **more})
        if not self.is_chat:
            return text
        delta = {"role": self.choice["message"]["role"], "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        counted = self._usage(0) if counts_each else {}
        prompt = {key: self.answer.get(key) for key in ("prompt_token_ids", "prompt_text")}
        return event({**self._chunk(created, [choice]), **counted, **prompt}) + text

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        prompt_tokens = self.answer["usage"]["prompt_tokens"]
        usage = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + num_tokens,
            "completion_tokens": num_tokens,
        }
        details = {"completion_tokens_details": None} if self.is_chat else {}
        return {"usage": {**usage, **details}}

    def _chunk(self, created: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer["id"],
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": created,
            "model": self.answer["model"],
            "choices": choices,
        }

    def _piece(self, *, is_last: bool = False) -> dict[str, Any]:
        choice = self.choice
        ending = {
            "logprobs": choice.get("logprobs"),
            "finish_reason": choice.get("finish_reason") if is_last else None,
        }
        stop_reason = {"stop_reason": choice.get("stop_reason") if is_last else None}
        token_ids = {"token_ids": choice.get("token_ids")}
        if self.is_chat:
            begin = {"index": 0, "delta": {"content": self.text}, **ending}
            return {**begin, **(stop_reason if is_last else {}), **token_ids}
        prompt = {"prompt_token_ids": choice.get("prompt_token_ids")}
        return {"index": 0, "text": self.text, **ending, **stop_reason, **prompt, **token_ids}


def read_first_token(body: bytes, transfer: TransferId, *, is_chat: bool) -> FirstToken | None:
    """The answer of leg 1; None when it does not belong to this transfer or cannot be read."""
    try:
        answer: Any = msgspec.json.decode(body)
        leg = from_params(answer[FIELD])
        if not isinstance(leg, Prefilled) or leg.transfer not in attempt_names(transfer):
            return None
        choice = (answer.get("choices") or [{}])[0]
        return FirstToken(answer, choice, leg, is_chat) if isinstance(choice, dict) else None
    except (*NO_JSON, ProtocolError, LookupError, TypeError) as error:
        _log.warning("a prefill answer cannot be read: %r", error)
        return None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value
