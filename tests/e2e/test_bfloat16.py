"""Instances in bfloat16, whose attention uses AMX where the CPU has it, from the first token on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.client import ask, split_once
from tests.e2e.cluster import Cluster, running
from tests.e2e.prompts import completion

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_instances_in_bfloat16_begin_with_short_prompts(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with running(Cluster(tiny_llama, tmp_path, serve=("--dtype", "bfloat16"))) as cluster:
        await split_once(cluster)
        for num_tokens in (3, 200):
            body = completion(num_tokens, max_tokens=16)
            answer = await ask(cluster.url, body)
            assert len(answer.token_ids) == 16
            assert answer.headers["x-tetri-prefill"] != answer.decode
        assert cluster.are_ready(2)
