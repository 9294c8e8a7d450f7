"""Requests of clients, parsed, and the bodies that instances get for them; heads of messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from email.utils import formatdate
from functools import lru_cache
from typing import Any, TypeGuard, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from vllm_tetri.handover import FIELD, KEY, Fetch, Handover
from vllm_tetri.router.errors import JSON_ERRORS, Refusal, Unreachable
from vllm_tetri.router.prefixes import Start, starts_of
from vllm_tetri.types import InstanceInfo

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MAX_DEPTH = 100
MAX_VALUES = 2 << 20  # a prompt of a million token ids fits
MAX_ENTRIES = 8192  # messages, prompts, documents

_ONE_INSTANCE = ("best_of", "use_beam_search", "echo", "prompt_logprobs", "prompt_embeds")
# These may keep text back or turn it into something else than text.
_STRUCTURED = ("tools", "functions", "function_call", "tool_choice")
_UNPROVED = {"uuid", "prompt_embeds"}  # of a part of a chat message
_SHAPED = (*_STRUCTURED, "response_format", "structured_outputs", "stop")
# End conditions: choices draw their own first tokens, so prefill must not end with its own.
_ENDS = {"stop", "stop_token_ids", "ignore_eos"}
# What a request for KV alone does without.
_NOT_FETCHED = {*_ENDS, "stream_options", "max_completion_tokens", "min_tokens", "logprobs",
                "top_logprobs", "logprob_token_ids", "response_format",
                "structured_outputs", "return_token_ids"}  # fmt: skip
_OF_CACHE = ("cache_salt", "priority")  # what a request for a token keeps
_PROMPT_IDS = "prompt_token_ids"  # vLLM: renderers/online_renderer.py
_IDS_WANTED = {"return_token_ids": True}
_FORWARDED = ("authorization", "x-vllm-priority", "x-session-id", "traceparent", "tracestate",
              "endpoint-load-metrics-format")  # fmt: skip
LOAD_HEADER = "endpoint-load-metrics"  # of a response, if the request has the last one (ORCA)
_BYTES_PER_TOKEN = 4
_MOST = 1 << 62  # JSON has whole numbers that no float is as large as
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Headers that concern a connection or the encoding of a body, not the request.
_HOP_BY_HOP = frozenset(
    {"connection", "content-length", "keep-alive", "proxy-authenticate", "proxy-authorization",
     "te", "trailer", "transfer-encoding", "upgrade"}
)  # fmt: skip
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "expect", "content-encoding", "x-request-id"}
NOT_RETURNED = _HOP_BY_HOP | {"date", "server", "x-request-id"}
_Order = TypeVar("_Order")


@dataclass(frozen=True, slots=True)
class ProxyRules:
    """How a route that is never split is proxied to one instance."""

    generates: bool = True  # it keeps an engine busy, so it counts as in flight
    is_stored: bool = False  # its output may be stored: one instance gets all of a model
    has_json: bool = True  # the body, if any, is a JSON object
    has_body: bool = True  # else no body is read


@dataclass
class ApiRequest:
    """A parsed request. What `__post_init__` adds follows from the rest."""

    path: str  # route on the router and on the instances; of a proxied request with its query
    body: dict[str, Any]  # its `kv_transfer_params` has at most the prompt's token ids
    raw: bytes  # the same body
    model: str  # empty when the request names none
    is_splittable: bool  # two instances may share the request as prefill and decode
    approx_tokens: int  # rough prompt length, for balancing only
    headers: dict[str, str]  # passed on to instances
    request_id: str  # the client's, if it gave a valid one
    client: str = ""  # name of the API key, if the router tells clients apart
    method: str = "POST"
    rules: ProxyRules | None = None  # None on the two routes that the router understands

    def __post_init__(self) -> None:
        get, rules = self.body.get, self.rules
        options = get("stream_options")
        options = options if isinstance(options, dict) else {}
        num, logprobs = get("n"), get("logprobs")
        bounds = (get("max_completion_tokens"), get("max_tokens"))
        self.generates = rules is None or rules.generates  # keeps an engine busy
        self.is_stored = rules is not None and rules.is_stored
        is_later = self.path != RESPONSES or bool(get("previous_response_id"))
        self.asks_for_stored = self.is_stored and is_later  # for what an instance may have kept
        self.is_streamed = get("stream") is True
        self.has_choices = num not in (None, 1)  # outputs with a first token each
        self.num_choices = num if _is_int(num) and num > 0 else 1
        # Bound of the output length, if there is one, and whether outputs end only there.
        given = [min(each, _MOST) for each in bounds if _is_int(each) and each > 0]
        self.max_tokens = given[0] if given else None
        self.ignores_eos = get("ignore_eos") is True
        self.wants_logprobs = bool(logprobs) if self.path == CHAT else logprobs is not None
        # Whether the stream ends with an event that counts tokens, and whether each does.
        self.wants_usage = bool(options.get("include_usage"))
        self.wants_usage_each = self.wants_usage and bool(options.get("continuous_usage_stats"))
        self.is_seeded = get("seed") is not None
        # The text of its tokens, no tool calls. vLLM looks for them with `"tool_choice": null`.
        self.is_text = not (any(map(get, _STRUCTURED)) or "tool_choice" in self.body)
        # A token's text can be sent before the next is known.
        self.is_plain = self.is_text and not any(map(get, _SHAPED))
        # Decode needs only the prefill response's token.
        self.may_decode_early = self.is_plain and not (self.has_choices or self.wants_logprobs)
        self.shows_ids = get("return_token_ids") is True  # the client wants token ids
        # Images and the like, of which the prompt's token ids tell nothing; links to them.
        media = list(_media_of(self.body))
        self.has_media, self.has_links = bool(media), any(map(_is_link, media))
        # Another instance may send the KV of the prompt's start.
        self.may_fetch = self.is_splittable and not self.has_media
        self._starts: list[Start] | None = None  # until they are asked for

    @property
    def starts(self) -> list[Start]:
        """Name every start of the prompt; empty for a request that is not understood."""
        if self._starts is None:
            is_known, is_chat = self.rules is None, self.path == CHAT
            self._starts = starts_of(self.body, is_chat=is_chat) if is_known else []
        return self._starts

    def is_parsed_by(self, instance: InstanceInfo) -> bool:
        """Whether an instance's server splits a chat output into reasoning and text."""
        return self.path == CHAT and instance.reasons

    def is_recorded(self, instance: InstanceInfo) -> bool:
        """Whether another instance could continue the stream of this one: one choice of text
        that no parser splits."""
        is_one_text = self.is_streamed and self.is_splittable and not self.has_choices
        return is_one_text and self.is_text and not self.is_parsed_by(instance)

    def after(self, token_ids: list[int]) -> ApiRequest:
        """Return a request for the token after these, which has this one's prefix cache."""
        body = {key: each for key, each in self.body.items() if key in _OF_CACHE}
        body |= {"model": self.model, "prompt": token_ids, "max_tokens": 1}
        tokens = len(token_ids)
        return replace(self, path=COMPLETIONS, body=body, raw=b"", approx_tokens=tokens)

    def prefill_body(self, params: Handover) -> bytes:
        """Encode the prefill request: one choice, never streamed."""
        dropped = {"stream_options", *(_ENDS if self.has_choices else ())}
        body = {key: value for key, value in self.body.items() if key not in dropped}
        body |= {"n": 1, "ignore_eos": True} if self.has_choices else {}
        params_sent = {**self.body.get(FIELD, {}), KEY: params}
        return msgspec.json.encode({**body, "stream": False, FIELD: params_sent})

    def fetch_body(self, fetch: Fetch) -> bytes:
        """Encode the request for an instance that holds a start of the prompt: what it samples is
        of no use."""
        body = {key: value for key, value in self.body.items() if key not in _NOT_FETCHED}
        params = {**self.body.get(FIELD, {}), KEY: fetch}
        body |= {"n": 1, "max_tokens": 2, "ignore_eos": True, "stream": False, FIELD: params}
        return msgspec.json.encode(body)

    def aggregated_body(self, instance: InstanceInfo, fetch: Fetch | None = None) -> bytes:
        """Encode the request for an instance that does both prefill and decode."""
        is_plain = self.shows_ids or not self.is_recorded(instance)
        if is_plain and fetch is None:
            return self.raw
        body = self.body if is_plain else {**self.body, **_IDS_WANTED}
        if fetch is None and "return_token_ids" not in self.body and self.raw:
            return self.raw.rstrip()[:-1] + b',"return_token_ids":true}'
        if fetch is not None:
            body = {**body, FIELD: {**self.body.get(FIELD, {}), KEY: fetch}}
        return msgspec.json.encode(body)

    def decode_body(
        self, params: Handover, prompt_token_ids: list[int], instance: InstanceInfo
    ) -> bytes:
        """Encode the decode request: the client's, with the place of its KV, and the prompt's
        token ids, so that the text is not tokenised again; with media it must be."""
        prompt_token_ids = [] if self.has_media else prompt_token_ids
        body, carried = self.body, {**self.body.get(FIELD, {}), KEY: params}
        if self.is_recorded(instance):
            body = {**body, **_IDS_WANTED}
        if prompt_token_ids and self.path == COMPLETIONS:
            # vLLM has written a suffix (fill in the middle) into the prompt already.
            body = {key: value for key, value in body.items() if key != "suffix"}
            body["prompt"] = prompt_token_ids
        elif prompt_token_ids and not body.get("return_prompt_text"):
            carried = {**carried, _PROMPT_IDS: prompt_token_ids}
        return msgspec.json.encode({**body, FIELD: carried})


def parse_request(
    path: str,
    raw: bytes,
    headers: Mapping[str, str],
    *,
    client: str = "",
    method: str = "POST",
    rules: ProxyRules | None = None,  # None on the two routes that can be split
) -> ApiRequest:
    """Parse a request; hand-over parameters of the client are removed from it. Raises `Refusal`:
    the body should be a JSON object and is not, or exceeds a limit. Wrong types are left to an
    instance, whose error message is better."""
    is_json = rules is None or (rules.has_json and bool(raw))
    if is_json:  # a byte order mark, as some editors write it
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    body = decode_object(raw if is_json else b"{}")
    sampling = body.get("sampling_params")
    extra = sampling.get("extra_args") if rules is not None and isinstance(sampling, dict) else None
    holders = [each for each in (body, body.get("vllm_xargs"), extra) if isinstance(each, dict)]
    if any(FIELD in each for each in holders):
        for each in holders:
            given = each.get(FIELD)
            if each is body and not isinstance(given or {}, dict):
                continue  # it orders nothing, and vLLM refuses it
            each.pop(FIELD, None)
            if each is body and given and _PROMPT_IDS in given:
                body[FIELD] = {_PROMPT_IDS: given[_PROMPT_IDS]}  # vLLM's, for clients
        raw = msgspec.json.encode(body)
    if rules is None:
        passed = {"content-type": "application/json"}
        for header in _FORWARDED:
            if (value := headers.get(header)) is not None:
                passed[header] = value
    else:
        passed = headers_without(_NOT_FORWARDED, headers)
    media = list(_media_of(body))
    model, name = body.get("model"), headers.get("x-request-id") or body.get("request_id")
    return ApiRequest(
        path=path,
        body=body,
        raw=raw,
        model=model if isinstance(model, str) else "",
        is_splittable=rules is None and _is_splittable(path, body, media),
        approx_tokens=_approx_tokens(body, raw if is_json else b"{}", media),
        headers=passed,
        request_id=name if isinstance(name, str) and _NAME.fullmatch(name) else "",
        client=client,
        method=method,
        rules=rules,
    )


def decode_order(raw: bytes, kind: type[_Order], what: str) -> _Order:
    """Decode the body of an operator's order; raises `Refusal` 400 for another shape."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except JSON_ERRORS as error:
        raise Refusal(400, f"the body is not a valid {what}: {error}") from error


def decode_object(raw: bytes) -> dict[str, Any]:
    """Decode a body as a JSON object of bounded size and depth: a few megabytes can become
    gigabytes of Python objects, and deep ones cannot be encoded again for an instance. Raises
    `Refusal`: 400, the body is not such an object; 413, it has too many values."""
    # Counts inside strings, too: telling them apart would take longer than decoding.
    if len(raw) > MAX_VALUES and sum(map(raw.count, (b"[", b"{", b","))) > MAX_VALUES:
        raise Refusal(413, f"the body has more than {MAX_VALUES} values")
    try:
        body: Any = msgspec.json.decode(raw)
    except JSON_ERRORS as error:
        raise Refusal(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, f"the body must be a JSON object, not {type(body).__name__}")
    if _opens_more(raw, MAX_DEPTH) and _is_deeper(body, MAX_DEPTH):
        raise Refusal(400, f"the body nests deeper than {MAX_DEPTH} levels")
    for name, value in body.items():
        if isinstance(value, list) and len(value) > MAX_ENTRIES and not isinstance(value[0], int):
            message = f"{name} has {len(value)} entries; at most {MAX_ENTRIES} are allowed"
            raise Refusal(400, message, param=name)
    return body


def _is_splittable(path: str, body: dict[str, Any], media: list[dict[str, Any]]) -> bool:
    if any(body.get(key) for key in _ONE_INSTANCE) or body.get("prompt_logprobs") == 0:
        return False
    if not isinstance(body.get(FIELD) or {}, dict):
        return False
    options = body.get("stream_options")
    if options is not None:  # prefill requests have none, so an instance has to refuse wrong ones
        if not isinstance(options, dict) or (options and not body.get("stream")):
            return False
        wants = options.get("include_usage"), options.get("continuous_usage_stats")
        if not all(each is None or each in (0, 1) for each in wants):
            return False
    if body.get("n") is not None and (not _is_int(body["n"]) or body["n"] < 1):
        return False
    flags = body.get("stream"), body.get("return_token_ids")
    if not all(each is None or isinstance(each, bool) for each in flags):
        return False
    if path == CHAT:
        # Nothing proves that media which the client names are the same on another instance.
        unnamed = (not _UNPROVED & {*part, str(part.get("type"))} for part in media)
        return isinstance(body.get("messages"), list) and all(unnamed)
    prompt = body.get("prompt")
    return isinstance(prompt, str) or (isinstance(prompt, list) and set(map(type, prompt)) == {int})


def _approx_tokens(body: dict[str, Any], raw: bytes, media: list[dict[str, Any]]) -> int:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and _is_int(prompt[0]):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace")) // _BYTES_PER_TOKEN
    num_media_bytes = sum(len(msgspec.json.encode(part)) for part in media)
    return (len(raw) - num_media_bytes) // _BYTES_PER_TOKEN


def _media_of(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of chat messages that are not text."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and not _is_text(part):
                yield part


def _is_text(part: dict[str, Any]) -> bool:
    return part.get("type") == "text" and part.get("uuid") is None  # as vLLM decides


def _is_link(part: dict[str, Any]) -> bool:
    places = [value for key, value in part.items() if key.endswith("_url")]
    urls = [each.get("url") if isinstance(each, dict) else each for each in places]
    return any(isinstance(url, str) and not url.startswith("data:") for url in urls)


def _opens_more(raw: bytes, most: int) -> bool:
    """Whether more than `most` brackets open; `find` is much faster than `count`."""
    for sign in (b"[", b"{"):
        at = raw.find(sign)
        while at >= 0:
            most -= 1
            if most < 0:
                return True
            at = raw.find(sign, at + 1)
    return False


def _is_deeper(value: dict[str, Any], limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for some in inner for each in some if isinstance(each, (list, dict))]
    return bool(level)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def headers_without(dropped: frozenset[str], headers: Mapping[str, str]) -> dict[str, str]:
    """Select the headers of a proxied message that are passed on."""
    named = headers.get("connection", "").lower().replace(" ", "").split(",")
    gone = dropped.union(named)
    return {name: value for name, value in headers.items() if name.lower() not in gone}


@lru_cache(maxsize=4096)
def parts_of(url: str) -> tuple[SplitResult, int]:
    """Return the parts of a URL, and its port."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise Unreachable(f"{url!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unreachable(f"{url!r} is not an HTTP URL")
    return parts, port


def head_of(first: str, headers: Mapping[str, str]) -> bytes:
    """Render the head of an HTTP message; ValueError for a line break in a header."""
    lines = [first, *[f"{name}: {value}" for name, value in headers.items()]]
    head = "\r\n".join([*lines, "", ""])
    if not head.count("\n") == head.count("\r") == len(lines) + 1:
        raise ValueError("a header contains a line break")
    return head.encode("utf-8", "surrogateescape")


@lru_cache(maxsize=1)
def date_at(_: int) -> str:
    """Return the date of a second of the event loop's clock, which is now."""
    return formatdate(usegmt=True)
