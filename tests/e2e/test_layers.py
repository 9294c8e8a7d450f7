"""KV that leaves layer by layer, as the model computes it."""

from __future__ import annotations

import re

import pytest

from tests.e2e.client import assert_handed_over_as_stock
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.prompts import chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.long]

OWN = {"serve": ("--tetri-push", "layer")}


async def test_equal_alone_together_and_from_the_prefix_cache(stock: Stock, own: Cluster) -> None:
    asked = [completion(n) for n in (3, 127, 128, 129, 256, 257, 513, 1025, 1500)] + [
        chat(100),
        completion(700, seed=11, temperature=0.8, logprobs=2),
    ]
    await assert_handed_over_as_stock(stock, own, asked)
    log = (own.logs / "prefill-0.log").read_text()
    assert re.search(r"[1-9]\d* of \d+ pages of KV left while a last chunk was computed", log)
