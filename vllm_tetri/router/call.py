"""What a client asked for, and the bodies of the legs that answer it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_tetri.handover import FIELD, Handover, to_params
from vllm_tetri.router.answers import Refusal

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_ONE_INSTANCE = ("best_of", "use_beam_search", "echo", "prompt_logprobs", "prompt_embeds")
# The first leg's token is drawn again by the second. Without its seed the first leg
# also stays clear of a defect: vLLM 0.32's CPU runner dies on a seeded prompt that is
# computed in more than one chunk (torch's CPU generator has no offset to rewind).
_NOT_FOR_PREFILL = {"stream_options", "logprobs", "top_logprobs", "seed"}
_FORWARDED = ("Authorization", "X-Vllm-Priority", "traceparent", "tracestate")
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

    def prefill_body(self, leg: Handover) -> bytes:
        """Body of leg 1: never streamed, nothing that only the answer needs."""
        kept = {key: value for key, value in self.body.items() if key not in _NOT_FOR_PREFILL}
        return msgspec.json.encode({**kept, "stream": False, FIELD: to_params(leg)})

    def decode_body(self, leg: Handover) -> bytes:
        """Body of leg 2: what the client sent, and where the KV is."""
        return msgspec.json.encode({**self.body, FIELD: to_params(leg)})


def parse_call(path: str, raw: bytes, headers: Mapping[str, str]) -> Call:
    """Read a request body.

    Wrong types are left for an instance to complain about: its message is better.

    Raises:
        Refusal: The body is not a JSON object.
    """
    try:
        body: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, f"the body must be a JSON object, not {type(body).__name__}")
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
        request_id=_sane(headers.get("X-Request-Id", "")),
        sla=_sane(headers.get("x-tetri-sla", "")) or "default",
    )


def _is_splittable(path: str, body: dict[str, Any]) -> bool:
    if any(body.get(key) for key in _ONE_INSTANCE) or body.get("prompt_logprobs") == 0:
        return False
    if body.get("n") is not None and (not _is_int(body["n"]) or body["n"] != 1):
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
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and _is_int(prompt[0]):
        return len(prompt)
    return len(raw) // _BYTES_PER_TOKEN


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _sane(name: str) -> str:
    return name if _NAME.fullmatch(name) else ""
