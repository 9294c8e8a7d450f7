"""The requests of a soak: few enough to know every answer, and of every shape."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Prompts of less than a chunk and of several, answers that end at once and that last.
_PROMPTS = (12, 40, 150, 330, 700)
_ANSWERS = (1, 8, 40, 160)
_TOKENS = range(10, 500)  # every tokenizer has them
_WORDS = ("river", "stone", "garden", "winter", "market", "letter", "bridge", "silver", "music")
_TOKENS_A_WORD = 4  # or fewer; and what a chat template adds
_TEMPLATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, greedily, so that every answer to it is the same."""

    path: str
    body: dict[str, Any]

    def streamed(self) -> Request:
        """The same as a stream."""
        return Request(self.path, {**self.body, "stream": True})


def requests(model: str, window_tokens: int, rng: Random) -> list[Request]:
    """Every combination of length of prompt and of answer that fits into the window, every
    other one as a chat."""
    found: list[Request] = []
    for prompt_tokens in _PROMPTS:
        for answer_tokens in _ANSWERS:
            if prompt_tokens + _TEMPLATE_TOKENS + answer_tokens >= window_tokens:
                continue
            body: dict[str, Any] = {
                "model": model,
                "max_tokens": answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            if len(found) % 2:
                words = " ".join(rng.choices(_WORDS, k=prompt_tokens // _TOKENS_A_WORD))
                body["messages"] = [{"role": "user", "content": words}]
                found.append(Request(CHAT, body))
            else:
                body["prompt"] = rng.choices(_TOKENS, k=prompt_tokens)
                found.append(Request(COMPLETIONS, body))
    return found
