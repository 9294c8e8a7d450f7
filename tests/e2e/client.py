"""A small asynchronous OpenAI-style client that keeps everything it sees."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT = aiohttp.ClientTimeout(total=110)


@dataclass
class Answer:
    """What a client can compare: ids, text, reasons and usage."""

    status: int
    headers: dict[str, str]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None

    def same_as(self, other: Answer) -> bool:
        mine = (self.status, self.token_ids, self.text, self.finish_reason, self.usage)
        theirs = (other.status, other.token_ids, other.text, other.finish_reason, other.usage)
        return mine == theirs


async def ask(url: str, body: Any) -> Answer:
    """One request; chat or completion by its body."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(url + path, json=body) as response,
    ):
        answer = Answer(response.status, dict(response.headers))
        if response.status != 200:
            answer.error = json.loads(await response.text())["error"]
        elif body.get("stream"):
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    _take_chunk(answer, json.loads(line[6:]))
        else:
            _take_whole(answer, await response.json())
        return answer


async def ask_all(url: str, bodies: list[Any]) -> list[Answer]:
    """All at once."""
    return list(await asyncio.gather(*(ask(url, body) for body in bodies)))


def _take_whole(answer: Answer, body: dict[str, Any]) -> None:
    choice = body["choices"][0]
    answer.text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    answer.token_ids = choice.get("token_ids") or []
    answer.finish_reason = choice["finish_reason"]
    usage = body["usage"]
    answer.usage = {key: usage[key] for key in ("prompt_tokens", "completion_tokens")}


def _take_chunk(answer: Answer, chunk: dict[str, Any]) -> None:
    if chunk.get("usage"):
        usage = chunk["usage"]
        answer.usage = {key: usage[key] for key in ("prompt_tokens", "completion_tokens")}
    if chunk.get("error"):
        answer.error = chunk["error"]
    for choice in chunk.get("choices", []):
        answer.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        answer.token_ids += choice.get("token_ids") or []
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
