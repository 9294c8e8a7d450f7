"""What vLLM's API servers answer, byte for byte, without an engine.

The shapes are those of `ChatCompletionResponse`, `CompletionResponse` and their
streamed kin; the end-to-end tests compare with a real one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
PROMPT_IDS = [5, 6, 7]


def event(chunk: dict[str, Any]) -> bytes:
    text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


@dataclass(frozen=True)
class Script:
    """An answer: the text of every token, and what the client wants to see of it."""

    texts: tuple[str, ...]
    is_chat: bool = False
    finish_reason: str = "length"
    stop_reason: int | None = None
    has_logprobs: bool = False
    has_token_ids: bool = False
    has_usage: bool = False
    counts_each: bool = False  # only together with has_usage
    id: str = "x-1"
    created: int = 1_700_000_000

    @property
    def token_ids(self) -> list[int]:
        return list(range(100, 100 + len(self.texts)))

    def whole(self, **kv: Any) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        last, n = len(self.texts), len(self.texts)
        choice: dict[str, Any] = {"index": 0}
        if self.is_chat:
            choice["message"] = {
                "role": "assistant", "content": "".join(self.texts), "refusal": None,
                "annotations": None, "audio": None, "function_call": None, "reasoning": None,
            }  # fmt: skip
        else:
            choice["text"] = "".join(self.texts)
        ids = self.token_ids if self.has_token_ids else None
        prompt_ids = PROMPT_IDS if self.has_token_ids else None
        choice |= {
            "logprobs": self._logprobs(0, last),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "token_ids": ids,
        }
        choice |= {} if self.is_chat else {"prompt_logprobs": None, "prompt_token_ids": prompt_ids}
        answer = {
            "id": self.id,
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": self.created,
            "model": "tiny",
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": "f1",
            "usage": {**self._usage(n), "prompt_tokens_details": None},
        }
        answer |= {"prompt_token_ids": prompt_ids, "prompt_text": None} if self.is_chat else {}
        return {**answer, "kv_transfer_params": kv or None, "metrics": None}

    def events(self, *sizes: int) -> list[bytes]:
        """The events of a stream; `sizes` are the tokens of the first ones."""
        found, at = [self._role()] if self.is_chat else [], 0
        for size in [*sizes, *([1] * len(self.texts))]:
            if at < len(self.texts):
                end = min(at + size, len(self.texts))
                found.append(self._event(at, end))
                at = end
        if self.has_usage:
            usage = {"usage": self._usage(len(self.texts)), "system_fingerprint": "f1"}
            found.append(event({**self._chunk([]), **usage}))
        return [*found, b"data: [DONE]\n\n"]

    def _event(self, at: int, end: int) -> bytes:
        is_last = end == len(self.texts)
        text = "".join(self.texts[at:end])
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        choice["logprobs"] = self._logprobs(at, end)
        choice["finish_reason"] = self.finish_reason if is_last else None
        if is_last or not self.is_chat:
            choice["stop_reason"] = self.stop_reason if is_last else None
        if not self.is_chat:
            wants_ids = self.has_token_ids and at == 0
            choice["prompt_token_ids"] = PROMPT_IDS if wants_ids else None
        choice["token_ids"] = self.token_ids[at:end] if self.has_token_ids else None
        fingerprint = {"system_fingerprint": "f1"} if is_last and not self.has_usage else {}
        return event({**self._chunk([choice]), **self._counted(end), **fingerprint})

    def _counted(self, num_tokens: int) -> dict[str, Any]:
        if not self.counts_each:
            return {}
        details = {"completion_tokens_details": None} if self.is_chat else {}
        return {"usage": {**self._usage(num_tokens), **details}}

    def _role(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        prompt_ids = PROMPT_IDS if self.has_token_ids else None
        prompt = {"prompt_token_ids": prompt_ids, "prompt_text": None}
        return event({**self._chunk([choice]), **self._counted(0), **prompt})

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": self.created,
            "model": "tiny",
            "choices": choices,
        }

    def _usage(self, num_tokens: int) -> dict[str, int]:
        prompt = len(PROMPT_IDS)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + num_tokens,
            "completion_tokens": num_tokens,
        }

    def _logprobs(self, at: int, end: int) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        texts, numbers = self.texts[at:end], range(at, end)
        if self.is_chat:
            return {
                "content": [
                    {
                        "token": text,
                        "logprob": -0.5 - number,
                        "bytes": list(text.encode()),
                        "top_logprobs": [
                            {"token": text, "logprob": -0.5 - number, "bytes": list(text.encode())}
                        ],
                    }
                    for text, number in zip(texts, numbers, strict=True)
                ]
            }
        return {
            "text_offset": [len("".join(self.texts[:number])) for number in numbers],
            "token_logprobs": [-0.5 - number for number in numbers],
            "tokens": list(texts),
            "top_logprobs": [
                {text: -0.5 - number} for text, number in zip(texts, numbers, strict=True)
            ],
        }


def joined(stream: bytes) -> list[object]:
    """A stream without its cuts into events."""
    assert stream.endswith(b"data: [DONE]\n\n")
    events = [json.loads(each[6:]) for each in stream.split(b"\n\n")[:-2]]
    text, logprobs, rest = "", dict[str, list[object]](), list[object]()
    for each in events:
        usage = each.pop("usage", None)
        for choice in each["choices"]:
            holder = choice.get("delta", choice)
            text += holder.pop("content", holder.pop("text", "")) or ""
            for key, values in (choice.pop("logprobs", None) or {}).items():
                logprobs.setdefault(key, []).extend(values)
        is_end = not each["choices"] or each["choices"][0]["finish_reason"] is not None
        if is_end or each["choices"][0].get("delta", {}).get("role"):
            rest.append((each, usage))
    return [text, logprobs, rest]
