"""Answers as values that can be compared: whole or streamed, everything but ids and times."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import aiohttp

from tests.e2e.client import TIMEOUT

VALUE_TOLERANCE = 1e-4
_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_NOT_COMPARED = {"id", "created", "system_fingerprint"}
_CALL_ID = re.compile(r"(chatcmpl-tool|call)[-_][0-9a-f-]+")


class Reply:
    """What came back, kept as it came."""

    def __init__(self, status: int, headers: dict[str, str], raw: bytes) -> None:
        self.status = status
        self.headers = headers
        self.raw = raw
        self.is_stream = headers.get("Content-Type", "").startswith("text/event-stream")

    @property
    def events(self) -> list[Any]:
        """The events of a stream, without the one that ends it."""
        lines = [line for line in self.raw.split(b"\n\n") if line]
        assert all(line.startswith(b"data: ") for line in lines), lines
        assert lines[-1] == b"data: [DONE]", lines[-1]
        return [json.loads(line[6:]) for line in lines[:-1]]

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def content_type(self) -> str:
        return self.headers["Content-Type"].split(";")[0]


async def ask_raw(url: str, kind: str, body: Any, headers: Any = None) -> Reply:
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(url + _PATHS.get(kind, kind), json=body, headers=headers) as response,
    ):
        return Reply(response.status, dict(response.headers), await response.read())


async def reply_to(url: str, body: Any) -> Reply:
    """Chat or completion by the body."""
    return await ask_raw(url, "chat" if "messages" in body else "completion", body)


async def replies_to(url: str, bodies: list[Any]) -> list[Reply]:
    """All at once."""
    return list(await asyncio.gather(*(reply_to(url, body) for body in bodies)))


def merged(reply: Reply) -> Any:
    """The whole answer, put together from its events if it was streamed."""
    return merge_events(reply.events) if reply.is_stream else merge_whole(reply.json)


def merge_whole(answer: Any) -> Any:
    choices = [_merge_choice([each]) for each in answer["choices"]]
    return {"choices": choices, "usage": answer["usage"], "prompt_ids": _prompt_ids([answer])}


def merge_events(events: list[Any]) -> Any:
    usage = [each["usage"] for each in events if each.get("usage")]
    parts: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return {
        "choices": [_merge_choice(parts[index]) for index in sorted(parts)],
        "usage": usage[-1] if usage else None,
        "prompt_ids": _prompt_ids(events),
    }


def _prompt_ids(parts: list[Any]) -> list[Any]:
    found = [part.get("prompt_token_ids") for part in parts]
    found += [choice.get("prompt_token_ids") for part in parts for choice in part["choices"]]
    return [ids for ids in found if ids]


def _merge_choice(parts: list[Any]) -> Any:
    said = [part.get("delta") or part.get("message") or part for part in parts]
    content = [each.get("text") if "text" in each else each.get("content") for each in said]
    return {
        "index": parts[0]["index"],
        "role": [each["role"] for each in said if each.get("role")],
        "text": "".join(text for text in content if text),
        "reasoning": "".join(each.get("reasoning") or "" for each in said),
        "token_ids": [token for part in parts for token in part.get("token_ids") or []],
        "tool_calls": _merge_calls(call for each in said for call in each.get("tool_calls") or []),
        "logprobs": _merge_logprobs([part["logprobs"] for part in parts if part.get("logprobs")]),
        "prompt_logprobs": [part["prompt_logprobs"] for part in parts if "prompt_logprobs" in part],
        "finish_reason": [part["finish_reason"] for part in parts if part["finish_reason"]][-1],
        "stop_reason": [part.get("stop_reason") for part in parts if part["finish_reason"]],
    }


def _merge_calls(calls: Iterable[Any]) -> list[Any]:
    whole: dict[int, Any] = {}
    for number, call in enumerate(calls):
        into = whole.setdefault(call.get("index", number), {"name": "", "arguments": "", "ids": 0})
        into["ids"] += bool(call.get("id"))
        into["name"] += call["function"].get("name") or ""
        into["arguments"] += call["function"].get("arguments") or ""
    return [whole[index] for index in sorted(whole)]


def _merge_logprobs(parts: list[Any]) -> Any:
    """Lists are joined, key by key."""
    joined: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            joined[key] = joined.get(key, []) + value if isinstance(value, list) else value
    return joined


def text_of(chunk: dict[str, Any]) -> str:
    (choice,) = chunk["choices"]
    found = choice["text"] if "text" in choice else choice["delta"].get("content")
    return str(found or "")


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client sees of a stream, however tokens were grouped into events."""
    assert [each for each in chunks if "error" in each] == []
    assert len({(each["id"], each["created"], each["model"]) for each in chunks}) == 1
    pieces = [each for each in chunks if each["choices"]]
    choices = [each["choices"][0] for each in pieces]
    last = next(each for each in pieces if each["choices"][0]["finish_reason"])
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for key, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(key, []).extend(values)
    return {
        "text": "".join(map(text_of, pieces)),
        "token_ids": [token for each in choices for token in each.get("token_ids") or []],
        "logprobs": rounded(logprobs),
        "finish": [each["finish_reason"] for each in choices if each["finish_reason"]],
        "stop": [each["stop_reason"] for each in choices if each.get("stop_reason")],
        "first": without(chunks[0], "choices", "usage"),
        "prompts": [each for each in choices if each.get("prompt_token_ids")][1:],
        "keys": [(*each, *each["choices"][0]) for each in (chunks[0], last)],
        "end": without(chunks[-1], "choices"),
    }


def without(event: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Leave out these keys, and what differs from answer to answer on one instance too."""
    return {key: value for key, value in event.items() if key not in {*_NOT_COMPARED, *keys}}


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def event_keys(events: list[Any]) -> dict[str, set[str]]:
    """The keys of events, by what they are about.

    How tokens fall into events is chance, at one instance as well: vLLM puts together
    what a slow reader left waiting. So neither their number nor text tells anything.
    """
    found: dict[str, set[str]] = {}
    for event in events:
        keys = [list(event), [list(choice) for choice in event["choices"]]]
        found.setdefault(_about(event), set()).add(json.dumps(keys))
    return found


def _about(event: Any) -> str:
    if not event["choices"]:
        return "usage"
    (choice,) = event["choices"]
    if choice["finish_reason"]:
        return "end"
    return "role" if (choice.get("delta") or {}).get("role") else "text"


def role_events(events: list[Any]) -> list[Any]:
    """The events that only say who speaks."""
    return [
        stripped(event)
        for event in events
        if any((choice.get("delta") or {}).get("role") for choice in event["choices"])
    ]


def stripped(value: Any) -> Any:
    """Without ids, times and what tells a configuration from another."""
    if isinstance(value, dict):
        return {key: stripped(each) for key, each in value.items() if key not in _NOT_COMPARED}
    if isinstance(value, list):
        return [stripped(each) for each in value]
    return _CALL_ID.sub("CALL", value) if isinstance(value, str) else value


def difference(ours: Any, theirs: Any, path: str = "", tolerance: float = VALUE_TOLERANCE) -> str:
    """Where two values differ first; empty when they are equal but for rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if list(ours) != list(theirs):
            return f"{path}: keys {list(ours)} != {list(theirs)}"
        found = (difference(ours[key], theirs[key], f"{path}.{key}", tolerance) for key in ours)
        return next((each for each in found if each), "")
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{path}: {len(ours)} != {len(theirs)} entries: {ours} != {theirs}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        found = (difference(mine, other, f"{path}[{i}]", tolerance) for i, (mine, other) in pairs)
        return next((each for each in found if each), "")
    if isinstance(ours, float) and isinstance(theirs, float):
        is_close = math.isclose(ours, theirs, rel_tol=0, abs_tol=tolerance)
        return "" if is_close else f"{path}: {ours} != {theirs}"
    return (
        "" if ours == theirs and type(ours) is type(theirs) else f"{path}: {ours!r} != {theirs!r}"
    )
