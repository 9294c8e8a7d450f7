"""Conversations on instances whose prefix caches are too small, with and without a pool."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.client import ask
from tests.e2e.cluster import MODEL, Cluster, Stock
from tests.e2e.prompts import text_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

CONVERSATIONS, TURNS = 6, 3
# 21 blocks of 128 tokens of the tiny model, in float32, which hold three of the conversations; the
# pool has room for all.
OWN: dict[str, Any] = {"serve": ("--kv-cache-memory-bytes", str(4 << 20), "--tetri-kv-pool", "64M")}


def body_of(messages: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 40,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }


async def test_turns_are_as_stock_and_find_their_kv_in_the_pool(stock: Stock, own: Cluster) -> None:
    held = [
        [{"role": "user", "content": f"{seed}: {text_prompt(600 + seed)}"}]
        for seed in range(CONVERSATIONS)
    ]
    for turn in range(TURNS):
        for messages in held:  # one after another, so that each pushes the others out
            ours, theirs = [await ask(each.url, body_of(messages)) for each in (own, stock)]
            assert ours.token_ids == theirs.token_ids
            messages.append({"role": "assistant", "content": ours.text})
            messages.append({"role": "user", "content": text_prompt(10 + turn)})
    for each in own.instances().values():
        assert each["kv_pool_hit_tokens"] > 0
        assert each["kv_pool_bytes_saved"] > 0
        assert each["kv_gone"] == 0
