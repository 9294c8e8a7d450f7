"""Speculative decoding by n-grams, and by a draft model whose KV is handed over with the model's.

Stock's own outputs differ from run to run where drafts are sampled with a seed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import Answer, ask, ask_all, split_once
from tests.e2e.cluster import Cluster, Stock, metrics, running
from tests.e2e.prompts import STREAM, completion, token_prompt
from tests.tiny_model import tiny_model
from vllm_tetri.router.merged import read_families

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
DRAFT_MODEL = {"method": "draft_model", "model": str(tiny_model()), "num_speculative_tokens": 3}
FEW = {"allowed_token_ids": [20, 30, 40]}  # of which many drafts are accepted, and many are not
SHAPES: list[dict[str, Any]] = [
    {},
    {**FEW, **STREAM},
    {**FEW, "frequency_penalty": 0.3},
    {**FEW, "logprobs": 2, **STREAM},
    {**FEW, "repetition_penalty": 1.2, "presence_penalty": 0.5},
]
ASKED = [
    completion(n, prompt=(token_prompt(n // 3 + 1) * 3)[:n], max_tokens=60, **SHAPES[at % 5])
    for at, n in enumerate((3, 17, 63, 64, 65, 128, 129, 200, 256, 300, 500, 513, 640, 1000, 1400))
]


PLAIN = [completion(n, max_tokens=60) for n in (100, 120, 190, 200, 300, 500, 700, 1000)]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What stock says without drafts, one request after the other."""
    with running(Stock(tiny_llama, tmp_path_factory.mktemp("stock"))) as stock:
        return asyncio.run(one_by_one(stock.url, [*ASKED, *PLAIN]))


@pytest.fixture(scope="module", params=[NGRAM, DRAFT_MODEL], ids=lambda each: each["method"])
def drafts(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def cluster(
    drafts: dict[str, Any],
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
    expected: list[Answer],
) -> Iterator[Cluster]:
    serve = ("--speculative-config", json.dumps(drafts))
    with running(Cluster(tiny_llama, tmp_path_factory.mktemp("spec"), serve=serve)) as cluster:
        yield cluster


async def one_by_one(url: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    return [await ask(url, body) for body in bodies]


def counted(url: str, what: str) -> float:
    """How many tokens an instance has drafted, or accepted."""
    series = read_families([metrics(url)])
    name = f"vllm:spec_decode_num_{what}_tokens_total"
    found = (family.series.items() for family in series.values())
    return sum(sum(values) for each in found for key, values in each if key.startswith(name))


async def test_drafts_change_no_token(
    cluster: Cluster, expected: list[Answer], drafts: dict[str, Any]
) -> None:
    url = cluster.instances()["decode-0"]["url"]
    await split_once(cluster)
    plain = await one_by_one(cluster.url, PLAIN)
    drafted, accepted = counted(url, "draft"), counted(url, "accepted")
    alone = await one_by_one(cluster.url, ASKED)
    together = await ask_all(cluster.url, ASKED)
    for mine, theirs in zip(
        [*alone, *plain, *together], [*expected, *expected[: len(ASKED)]], strict=True
    ):
        assert theirs.token_ids
        assert mine.same_as(theirs), f"{mine} != {theirs}"
        assert mine.decode == "decode-0"
    assert cluster.instances()["decode-0"]["kv_loads_failed"] == 0
    assert counted(url, "accepted") > accepted + 100
    if drafts is DRAFT_MODEL:  # it is the model itself: without its KV it would err
        assert accepted > 0.98 * drafted > 300, f"{accepted} of {drafted} were accepted"
    cluster.audit()
