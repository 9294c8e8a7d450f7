"""KV over NIXL between real instances."""

from __future__ import annotations

import pytest

from tests.e2e.client import assert_handed_over_as_stock
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.prompts import chat, completion
from tests.needed import needed

needed("nixl._api")
pytestmark = [pytest.mark.e2e, pytest.mark.long]

OWN = {"serve": ("--tetri-link", "nixl")}


async def test_equal_over_nixl_alone_and_together(stock: Stock, own: Cluster) -> None:
    asked = [completion(n) for n in (3, 127, 129, 513, 1500)] + [chat(100)]
    await assert_handed_over_as_stock(stock, own, asked)
    assert not any("link nixl failed" in log.read_text() for log in own.logs.iterdir())
