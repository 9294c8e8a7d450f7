"""Conversations on instances whose prefix caches are too small, with and without a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import ask
from tests.e2e.cluster import Cluster, Stock, side_by_side
from tests.e2e.prompts import STREAM, text_prompt, turn_of
from tests.models.families import FAMILIES

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

CONVERSATIONS, TURNS = 6, 3
# A prefill instance counts an output for half a second, whatever its decode instance reports: with
# shorter ones, it would find no room there and send everything.
OUTPUT_TOKENS = 200
# 21 blocks of 128 tokens of the tiny model, in float32, which hold three of the conversations; the
# pool has room for all.
OWN: dict[str, Any] = {"serve": ("--kv-cache-memory-bytes", str(4 << 20), "--tetri-kv-pool", "64M")}


async def converse(stock: Stock, ours: Cluster) -> None:
    """Turns are as stock's, and find their KV in the pool."""
    held = [
        [{"role": "user", "content": f"{seed}: {text_prompt(600 + seed)}"}]
        for seed in range(CONVERSATIONS)
    ]
    for turn in range(TURNS):
        for messages in held:  # one after another, so that each pushes the others out
            body = turn_of(messages, OUTPUT_TOKENS, **STREAM)
            own, theirs = [await ask(each.url, body) for each in (ours, stock)]
            assert own.token_ids == theirs.token_ids
            messages.append({"role": "assistant", "content": own.text})
            messages.append({"role": "user", "content": text_prompt(10 + turn)})
    for each in ours.instances().values():
        assert each["kv_pool_hit_tokens"] > 0
        assert each["kv_pool_bytes_saved"] > 0


async def test_turns_of_full_attention(stock: Stock, own: Cluster) -> None:
    await converse(stock, own)
    assert [each["kv_gone"] for each in own.instances().values()] == [0, 0]


@pytest.mark.long
async def test_turns_of_layers_with_windows(tmp_path: Path) -> None:
    family = FAMILIES["Gemma-3-text"]
    stock = Stock(family.make(), tmp_path, serve=family.serve)
    room = "--max-model-len", "1900", *OWN["serve"]
    ours = Cluster(family.make(), tmp_path, serve=(*family.serve, *room))
    with side_by_side(stock, ours):
        await converse(stock, ours)
        assert [each["kv_gone"] for each in ours.instances().values()] == [0, 0]
        ours.rest()
