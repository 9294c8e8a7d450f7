"""Receive arenas that are small: a container's, and one that a prompt does not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.client import ask, assert_as_stock
from tests.e2e.cluster import Cluster, Stock, running
from tests.e2e.prompts import STREAM, completion
from tests.needed import shared_memory_of

ARENA_BYTES = 2 << 20
BLOCK_TOKENS = 128  # of a CPU

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize(("shared_memory", "is_split"), [("64m", True), ("16k", False)])
async def test_a_cluster_serves_with_little_shared_memory(
    tiny_llama: Path, tmp_path: Path, stock: Stock, shared_memory: str, is_split: bool
) -> None:
    """64 MiB is what Docker gives; in 16 KiB no KV block fits, and nothing is handed over."""
    within = shared_memory_of(shared_memory)
    with running(Cluster(tiny_llama, tmp_path, arena_bytes=None, within=within)) as cluster:
        asked = [completion(200), completion(1500, stream=True)]
        await assert_as_stock([await ask(cluster.url, body) for body in asked], stock.url, asked)
        decode = cluster.instances()["decode-0"]
        assert decode["decodes_done"] == 2
        assert bool(decode["kv_bytes_received"]) is is_split
        assert bool(decode["arena_total_bytes"]) is is_split
        assert decode["arena_total_bytes"] <= 16 << 20
        cluster.audit()
    log = (cluster.logs / "decode-0.log").read_text()
    assert ("receive arena: none" in log) is not is_split
    assert "of the free /dev/shm" in log
    assert "/dev/shm: " in (tmp_path / "up.log").read_text()


async def test_a_prompt_that_no_arena_holds_is_computed_once(
    tiny_llama: Path, tmp_path: Path, stock: Stock
) -> None:
    """The router sends it to one instance. Of one that is but a little too long the prefill
    instance knows better, and goes on itself."""
    with running(Cluster(tiny_llama, tmp_path, arena_bytes=ARENA_BYTES)) as cluster:
        log = (cluster.logs / "decode-0.log").read_text()
        found = re.search(r"receive arena: \d+ MiB = (\d+) tokens", log)
        assert found is not None
        most = int(found[1])
        asked = [completion(n, **STREAM) for n in (most, most + 1, most + most // 2)]
        served = [await ask(cluster.url, body) for body in asked]
        await assert_as_stock(served, stock.url, asked)
        by = [(each.headers["x-tetri-prefill"], each.decode) for each in served]
        assert by == [
            ("prefill-0", "decode-0"), ("prefill-0", "prefill-0"), ("decode-0", "decode-0")
        ]  # fmt: skip
        cluster.rest()
        instances = cluster.instances()
        computed = {name: each["prompt_tokens_done"] for name, each in instances.items()}
        # But for the last block, which is not cached because it is not full.
        assert 2 * most + 1 <= computed["prefill-0"] <= 2 * most + 1 + BLOCK_TOKENS
        assert most + most // 2 <= computed["decode-0"] <= most + most // 2 + 1
        assert instances["decode-0"]["kv_loads_failed"] == 0
        cluster.audit()
    assert "can never fit" not in (cluster.logs / "prefill-0.log").read_text()
