"""The length head in a real cluster: it reads hidden states where prompts are computed, and learns
there from outputs that another instance writes."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.client import ask_all, assert_handed_over_as_stock, until
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.prompts import chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

OWN = {"serve": ("--tetri-predictor", "head", "--tetri-decode-order", "shortest")}
# Prompts of one chunk and of several, outputs that the client bounds.
ASKED = [completion(20 + 13 * at, max_tokens=10 + 7 * at, ignore_eos=False) for at in range(12)]


async def test_outputs_teach_the_instance_that_has_their_prompts(
    stock: Stock, own: Cluster
) -> None:
    assert {each.status for each in await ask_all(own.url, ASKED)} == {200}
    # An output that ends with its first token tells nothing.
    await until(
        lambda: own.instances()["prefill-0"]["length_states"] >= len(ASKED) // 2, "it learns", 30
    )
    await asyncio.to_thread(own.audit)  # until all of them are learnt
    assert own.instances()["decode-0"]["length_states"] == 0
    fixed = completion(30, max_tokens=5, ignore_eos=True)  # tells nothing of the model
    before = own.instances()["prefill-0"]["length_states"]
    await assert_handed_over_as_stock(stock, own, [fixed, chat(100, ignore_eos=True)])
    assert own.instances()["prefill-0"]["length_states"] == before
