"""Preempted requests are computed again, and their outputs stay the same."""

from __future__ import annotations

import pytest

from tests.e2e.client import ask, ask_all
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.prompts import completion

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# 21 blocks of 128 tokens of the tiny model, in float32.
POOL_BYTES = 4 << 20
OWN = {"serve": ("--kv-cache-memory-bytes", str(POOL_BYTES), "--tetri-decode-policy", "greedy")}


async def test_answers_are_those_of_one_instance_that_preempts_none(
    stock: Stock, own: Cluster
) -> None:
    # vLLM compiles a function at the first log probabilities; transfers would time out.
    await ask(own.url, completion(90, logprobs=3))
    failed_before = own.instances()["decode-0"]["kv_loads_failed"]
    long = {"max_tokens": 350, "ignore_eos": True}
    asked = [
        *(completion(60 + 20 * n) | long for n in range(7)),
        completion(90) | long | {"logprobs": 3},
        completion(130) | long | {"seed": 11, "temperature": 0.8},
        completion(140) | long | {"seed": 12, "temperature": 0.8, "presence_penalty": 0.5},
    ]
    ours = await ask_all(own.url, asked)
    for mine, body in zip(ours, asked, strict=True):
        assert mine.status == 200, mine.error
        assert mine.same_as(await ask(stock.url, body))
    own.rest()
    decode = own.instances()["decode-0"]
    assert decode["preemptions"] > 0
    assert decode["kv_loads_failed"] == failed_before
