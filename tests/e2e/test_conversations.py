"""Conversations: every turn says what one stock instance says, and finds its cache."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.e2e.client import Answer, ask, until
from tests.e2e.cluster import Cluster, Stock, get, post
from tests.e2e.prompts import STREAM, text_prompt, turn_of
from vllm_tetri.types import Mode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TURNS, CONVERSATIONS = 3, 2


async def converse(url: str, seed: int, **more: Any) -> list[Answer]:
    """Hold a conversation; its answers."""
    messages = [{"role": "user", "content": f"{seed}: {text_prompt(150 + seed)}"}]
    found = []
    for turn in range(TURNS):
        answer = await ask(url, turn_of(messages, 90, **STREAM, **more))
        found.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": text_prompt(20 + turn)})
    return found


@pytest.mark.parametrize("mode", [Mode.SPLIT, pytest.param(Mode.ADAPTIVE, marks=pytest.mark.slow)])
async def test_turns_are_as_stock_and_computed_where_the_last_ones_are(
    stock: Stock, free: Cluster, mode: Mode
) -> None:
    post(f"{free.url}/tetri/v1/mode", {"mode": mode})
    before = free.instances()
    ours = await asyncio.gather(
        *(converse(free.url, seed, cache_salt=mode.value) for seed in range(CONVERSATIONS))
    )
    for seed, answers in enumerate(ours):
        theirs = await converse(stock.url, seed)
        for mine, other in zip(answers, theirs, strict=True):
            assert mine.token_ids == other.token_ids
    rows = partial(get, f"{free.url}/tetri/v1/cache")
    await until(lambda: any(row["blocks"] for row in rows()["instances"]), "caches are reported")
    after = free.instances()
    done = {name: after[name]["prompt_tokens_done"] - before[name]["prompt_tokens_done"]
            for name in after}  # fmt: skip
    prompts = sum(answer.usage["prompt_tokens"] for answers in ours for answer in answers)
    # Without caches all prompts would be computed in full.
    assert sum(done.values()) < 0.75 * prompts
    if mode is Mode.SPLIT:  # and all of every prompt would be sent
        kept = after["prefill-0"]["kv_bytes_kept"] - before["prefill-0"]["kv_bytes_kept"]
        sent = after["prefill-0"]["kv_bytes_sent"] - before["prefill-0"]["kv_bytes_sent"]
        assert kept > 0.3 * (kept + sent)
        assert after["decode-0"]["kv_gone"] == before["decode-0"]["kv_gone"]
