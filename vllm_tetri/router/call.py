"""What a client asked for, and the bodies of the legs that answer it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec

from vllm_tetri.handover import FIELD, Handover, to_params
from vllm_tetri.router.json_body import decode_object
from vllm_tetri.types import InstanceInfo

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_ONE_INSTANCE = ("best_of", "use_beam_search", "echo", "prompt_logprobs", "prompt_embeds")
# What may keep text back or turn it into something else than text.
_STRUCTURED = ("tools", "functions", "function_call", "tool_choice")
_SHAPED = (*_STRUCTURED, "response_format", "structured_outputs", "stop")
# Ends of an answer: choices draw their own first tokens, so leg 1 must not end with its own.
_ENDS = {"stop", "stop_token_ids", "ignore_eos"}
_PROMPT_IDS = "prompt_token_ids"  # vLLM: renderers/online_renderer.py
_IDS_WANTED = {"return_token_ids": True}
_FORWARDED = ("Authorization", "X-Vllm-Priority", "X-Session-ID", "traceparent", "tracestate")
_BYTES_PER_TOKEN = 4
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request.

    Attributes:
        path: Route on the router and on the instances.
        body: The JSON object, without anything that only the router may set.
        raw: The same as bytes.
        model: The name it asks for; empty when it names none.
        is_splittable: Whether two instances may share it.
        approx_tokens: Rough size of the prompt, for balancing only.
        headers: What is passed on to instances.
        request_id: The client's own name for the request, if it gave a sane one.
        sla: Service class that the client asked for.
        party: Who asks, if the router tells clients apart.
    """

    path: str
    body: dict[str, Any]
    raw: bytes
    model: str
    is_splittable: bool
    approx_tokens: int
    headers: dict[str, str]
    request_id: str
    sla: str
    party: str = ""

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.body.get("stream") is True

    @property
    def has_choices(self) -> bool:
        """Whether several answers are wanted, each with a first token of its own."""
        return self.body.get("n") not in (None, 1)

    @property
    def num_choices(self) -> int:
        """How many answers are wanted."""
        wanted = self.body.get("n")
        return wanted if _is_int(wanted) and wanted > 0 else 1

    @property
    def most_tokens(self) -> int | None:
        """How long an answer may be, if the client bounds it."""
        for key in ("max_completion_tokens", "max_tokens"):
            wanted = self.body.get(key)
            if _is_int(wanted) and wanted > 0:
                return wanted
        return None

    @property
    def is_endless(self) -> bool:
        """Whether answers end at that bound only."""
        return self.body.get("ignore_eos") is True

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities belong to the answer."""
        logprobs = self.body.get("logprobs")
        return bool(logprobs) if self.path == CHAT else logprobs is not None

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with an event that counts tokens."""
        return bool(self._stream_options.get("include_usage"))

    @property
    def wants_usage_each(self) -> bool:
        """Whether every event counts them."""
        return self.wants_usage and bool(self._stream_options.get("continuous_usage_stats"))

    @property
    def is_seeded(self) -> bool:
        """Whether it draws tokens with a seed of its own."""
        return self.body.get("seed") is not None

    @property
    def is_text(self) -> bool:
        """Whether each token's text is the answer's, whole and at once or at the end."""
        return not any(self.body.get(key) for key in _STRUCTURED)

    @property
    def is_plain(self) -> bool:
        """Whether in addition the first token's text can be shown before the second is known."""
        return self.is_text and not any(self.body.get(key) for key in _SHAPED)

    @property
    def may_open_early(self) -> bool:
        """Whether all that leg 2 needs of leg 1 is its token."""
        return self.is_plain and not self.has_choices and not self.wants_logprobs

    @property
    def shows_ids(self) -> bool:
        """Whether the client wants to see token ids."""
        return self.body.get("return_token_ids") is True

    def is_recorded(self, instance: InstanceInfo) -> bool:
        """Whether another instance could go on behind what this one streams: one choice
        of text that no parser takes apart."""
        is_one_text = self.is_streamed and self.is_splittable and not self.has_choices
        is_parsed = not self.is_text or (self.path == CHAT and instance.reasons)
        return is_one_text and not is_parsed

    @property
    def _stream_options(self) -> dict[str, Any]:
        options = self.body.get("stream_options")
        return options if isinstance(options, dict) else {}

    def prefill_body(self, leg: Handover) -> bytes:
        """Body of leg 1: the same request for one choice, never streamed."""
        body = {key: value for key, value in self.body.items() if key != "stream_options"}
        body["stream"] = False
        if self.has_choices:
            body = {key: value for key, value in body.items() if key not in _ENDS}
            body |= {"n": 1, "ignore_eos": True}
        return msgspec.json.encode({**body, FIELD: to_params(leg)})

    def whole_body(self, instance: InstanceInfo) -> bytes:
        """Body for an instance that does both."""
        if self.shows_ids or not self.is_recorded(instance):
            return self.raw
        return msgspec.json.encode({**self.body, **_IDS_WANTED})

    def decode_body(
        self, leg: Handover, prompt_token_ids: list[int], instance: InstanceInfo
    ) -> bytes:
        """Body of leg 2: what the client sent, where the KV is, and the prompt's tokens,
        so that the text is not tokenised again."""
        body, params = self.body, to_params(leg)
        if self.is_recorded(instance):
            body = {**body, **_IDS_WANTED}
        if prompt_token_ids and self.path == COMPLETIONS:
            body = {**body, "prompt": prompt_token_ids}
        elif prompt_token_ids and not body.get("return_prompt_text"):
            params = {**params, _PROMPT_IDS: prompt_token_ids}
        return msgspec.json.encode({**body, FIELD: params})


def parse_call(path: str, raw: bytes, headers: Mapping[str, str], *, party: str = "") -> Call:
    """Read a request body.

    Wrong types are left for an instance to complain about: its message is better.

    Raises:
        Refusal: The body is not a JSON object, or one beyond its bounds.
    """
    body = decode_object(raw)
    extra = body.get("vllm_xargs")
    if FIELD in body or (isinstance(extra, dict) and FIELD in extra):
        body.pop(FIELD, None)
        if isinstance(extra, dict):
            extra.pop(FIELD, None)
        raw = msgspec.json.encode(body)
    model = body.get("model")
    return Call(
        path=path,
        body=body,
        raw=raw,
        model=model if isinstance(model, str) else "",
        is_splittable=_is_splittable(path, body),
        approx_tokens=_approx_tokens(body, raw),
        headers={name: headers[name] for name in _FORWARDED if name in headers},
        request_id=_sane(headers.get("X-Request-Id") or body.get("request_id")),
        sla=_sane(headers.get("x-tetri-sla", "")) or "default",
        party=party,
    )


def _is_splittable(path: str, body: dict[str, Any]) -> bool:
    if any(body.get(key) for key in _ONE_INSTANCE) or body.get("prompt_logprobs") == 0:
        return False
    if body.get("n") is not None and (not _is_int(body["n"]) or body["n"] < 1):
        return False
    if body.get("stream") not in (None, True, False):
        return False
    if path == CHAT:
        return isinstance(body.get("messages"), list)
    prompt = body.get("prompt")
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(map(_is_int, prompt))
    )


def _approx_tokens(body: dict[str, Any], raw: bytes) -> int:
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, list) and prompt and _is_int(prompt[0]):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace")) // _BYTES_PER_TOKEN
    num_bytes = len(raw)
    if isinstance(messages, list):  # pictures and the like are no text
        num_bytes -= sum(map(_num_media_bytes, messages))
    return num_bytes // _BYTES_PER_TOKEN


def _num_media_bytes(message: object) -> int:
    """Of a chat message's parts those that are data."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return 0
    return sum(
        len(msgspec.json.encode(part))
        for part in parts
        if isinstance(part, dict) and part.get("type") not in (None, "text")
    )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _sane(name: object) -> str:
    return name if isinstance(name, str) and _NAME.fullmatch(name) else ""
