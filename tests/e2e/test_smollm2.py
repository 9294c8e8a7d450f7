"""Invariant 1 on a real chat model: SmolLM2-135M-Instruct in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.smollm2 import prepare
from tests.e2e.client import ask, ask_all
from tests.e2e.cluster import MODEL, Cluster, Stock, side_by_side
from tests.e2e.prompts import chat, completion

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SERVE = ("--kv-cache-memory-bytes", str(1 << 30), "--tetri-chunk-size", "256")
LENGTHS = (3, 10, 50, 127, 128, 129, 200, 255, 256, 257, 300, 400, 511, 513, 700, 1025, 1500)
QUESTIONS = (
    "What is the capital of France?",
    "Name three things to see in Rome.",
    "Write one sentence about the sea.",
    "How many legs has a spider?",
)


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare("float32")


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stock, Cluster]]:
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("PYTHONPATH")  # as users start servers, without tests/forked
        stock = Stock(model, folder, serve=SERVE[:2])
        cluster = Cluster(model, folder, serve=SERVE, arena_bytes=1 << 29)
    with side_by_side(stock, cluster) as pair:
        yield pair


def asked(**options: Any) -> list[dict[str, Any]]:
    short: dict[str, Any] = {"max_tokens": 16, **options}
    chats = [
        {**chat(1, **short), "messages": [{"role": "user", "content": question}]}
        for question in QUESTIONS
    ]
    return [completion(n, **short) for n in LENGTHS] + chats


async def test_alone_and_streamed(both: tuple[Stock, Cluster]) -> None:
    stock, cluster = both
    for index, body in enumerate(asked()):
        theirs = await ask(stock.url, body)
        streamed = {**body, "stream": bool(index % 2), "model": MODEL}
        mine = await ask(cluster.url, streamed)
        assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text), body
        assert mine.headers["x-tetri-decode"] == "decode-0"
    cluster.rest()
    assert cluster.instances()["decode-0"]["kv_loads_failed"] == 0


async def test_eight_at_once(both: tuple[Stock, Cluster]) -> None:
    stock, cluster = both
    group = [body for body in asked() if len(body.get("prompt", ())) < 600][-8:]
    for mine, theirs in zip(
        await ask_all(cluster.url, group), await ask_all(stock.url, group), strict=True
    ):
        assert mine.same_as(theirs)
    cluster.rest()


async def test_it_answers_sensibly(both: tuple[Stock, Cluster]) -> None:
    body = chat(1, max_tokens=20)
    body["messages"][0]["content"] = QUESTIONS[0]
    assert "Paris" in (await ask(both[1].url, body)).text
