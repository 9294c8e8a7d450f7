"""Two data-parallel ranks behind one API server: two instances that hand KV to each other."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.client import (
    Answer,
    ask,
    ask_all,
    assert_same,
    flip,
    split_once,
    stock_answers,
    until,
)
from tests.e2e.cluster import Cluster, post
from tests.e2e.prompts import LENGTHS, STREAM, chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

OWN = {"roles": ("--both", "1"), "serve": ("--data-parallel-size", "2")}
RANKS = ("both-0-dp0", "both-0-dp1")
ASKED = [
    *(completion(n, max_tokens=12, **(STREAM if at % 2 else {})) for at, n in enumerate(LENGTHS)),
    *(completion(40 * n, max_tokens=12, temperature=0.9, seed=n) for n in (1, 3, 5)),
    chat(90, max_tokens=12, logprobs=True),
]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    return stock_answers(tiny_llama, tmp_path_factory.mktemp("stock"), ASKED)


async def test_ranks_hand_over_to_each_other_and_answer_like_stock(
    expected: list[Answer], own: Cluster
) -> None:
    rows = own.instances()
    assert sorted(rows) == list(RANKS)
    assert len({each["url"] for each in rows.values()}) == 1
    one, two = RANKS
    turns = [(two, "decode"), (one, "prefill")], [(one, "both"), (two, "prefill"), (one, "decode")]
    for flips, prefill, decode in zip(turns, RANKS, RANKS[::-1], strict=True):
        for name, role in flips:
            await flip(own, name, role)
        await split_once(own)
        alone = [await ask(own.url, body) for body in ASKED[::4]]
        together = await ask_all(own.url, ASKED)
        assert_same([*alone, *together], [*expected[::4], *expected])
        ran = {(each.headers["x-tetri-prefill"], each.decode) for each in (*alone, *together)}
        assert (prefill, decode) in ran
    rows = own.instances()
    assert all(each["kv_bytes_received"] > 0 == each["kv_loads_failed"] for each in rows.values())


async def test_a_server_ends_with_its_last_rank(expected: list[Answer], own: Cluster) -> None:
    server = own.processes("both-0")[1]
    for name, left in zip(RANKS, (["ready"], []), strict=True):
        answer = await asyncio.to_thread(
            post, f"{own.url}/tetri/v1/instances/{name}/drain", {"force": True}
        )
        assert answer["id"] == name
        await until(partial(_are, own, left), f"{name} is gone")
        if left:
            assert_same([await ask(own.url, ASKED[1])], [expected[1]])
            assert server.is_running()
    await asyncio.to_thread(server.wait, 30)


def _are(cluster: Cluster, states: list[str]) -> bool:
    return [each["state"] for each in cluster.instances().values()] == states
