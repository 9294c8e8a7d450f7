"""Prompts of many lengths around the edges of chunks and blocks."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.e2e.cluster import MODEL

LENGTHS = (
    3, 4, 10, 31, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 400, 511, 512, 513,
    700, 1000, 1023, 1024, 1025, 1300, 1500,
)  # fmt: skip
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
WORDS = (Path(__file__).parents[2] / "LICENSE").read_text().lower().split()[:200]


def token_prompt(num_tokens: int) -> list[int]:
    rng = Random(num_tokens)
    return [rng.randrange(10, 1000) for _ in range(num_tokens)]


def text_prompt(num_words: int) -> str:
    rng = Random(num_words)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def completion(num_tokens: int, **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": token_prompt(num_tokens),
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }


def chat(num_words: int, **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text_prompt(num_words)}],
        "max_tokens": 24,
        "temperature": 0,
        "return_token_ids": True,
        **options,
    }


def turn_of(messages: list[dict[str, str]], max_tokens: int, **options: Any) -> dict[str, Any]:
    """A turn of a conversation, whose output has exactly this length."""
    exact = {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    return {**chat(0), **exact, **options}
