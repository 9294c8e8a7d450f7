"""Running outputs move between decode instances, and clients notice nothing: answers are stock's,
token for token, also where an instance dies in the middle of a move."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks.faults import send
from tests.e2e.client import order, until
from tests.e2e.cluster import ByHand, Cluster, Stock, post, running
from tests.e2e.compare import difference, merged, replies_to
from tests.e2e.moving import Persistent, move_on, outcomes
from tests.e2e.prompts import STREAM, chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

SEEDED = {"temperature": 0.9, "seed": 5}
TOKENS = 500
# A grammar of many tokens, and arguments of a tool that have as many.
REGEX = "([a-f]{9}[0-9]{5}){20}"
TOOL = {
    "name": "note",
    "parameters": {
        "type": "object",
        "properties": {"words": {"type": "string", "pattern": f"^{REGEX}$"}},
        "required": ["words"],
    },
}
TOOLS = {
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": {"type": "function", "function": {"name": "note"}},
}
# The same call as text, which the server parses.
CALL = '<tool_call>\n{"name": "note", "arguments": {"words": "%s"}}\n</tool_call>'
CALLING = {
    "tools": TOOLS["tools"],
    "structured_outputs": {"regex": re.escape(CALL).replace("%s", REGEX)},
}
SHAPES: list[dict[str, Any]] = [
    {**STREAM},
    {**STREAM, **SEEDED},
    {**STREAM, **SEEDED, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {**STREAM, "min_tokens": TOKENS - 50, "ignore_eos": False, "logit_bias": {"2": 90}},
    {**STREAM, "logprobs": 2},
    {**STREAM, "structured_outputs": {"regex": REGEX}, "ignore_eos": False},
    {},
    {**SEEDED},
    {**STREAM, **SEEDED, "n": 3},
    {**SEEDED, "n": 2},
]
BODIES = [
    completion(40 + 31 * at, **{"max_tokens": TOKENS, **shape}) for at, shape in enumerate(SHAPES)
]
BODIES += [
    chat(20, max_tokens=TOKENS, **STREAM),
    chat(30, max_tokens=TOKENS, ignore_eos=True),
    chat(25, max_tokens=TOKENS, **TOOLS, **STREAM),
    chat(26, max_tokens=TOKENS, **TOOLS),
    chat(28, max_tokens=TOKENS, **CALLING, **STREAM),
    chat(27, max_tokens=TOKENS, ignore_eos=True, n=2, **SEEDED, **STREAM),
]
# What another instance continues that has nothing of it: one choice of text, or a whole response.
RESUMABLE = [body for body in BODIES if not body.get("stream") or not {"n", "tools"} & body.keys()]
SERVE = ("--tetri-decode-policy", "greedy")
OWN = {"roles": ("--prefill", "1", "--decode", "2"), "serve": SERVE}
REST_S, IS_AUDITED = 6, True


async def replies(url: str, bodies: list[Any]) -> list[Any]:
    found = await replies_to(url, bodies)
    assert [(each.status, each.raw) for each in found if each.status != 200] == []
    return list(map(merged, found))


def assert_equal(bodies: list[Any], ours: list[Any], theirs: dict[int, Any]) -> None:
    for body, mine in zip(bodies, ours, strict=True):
        assert not difference(mine, theirs[BODIES.index(body)]), body


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What stock says; seeded requests are asked alone, whose prompts it must not cut."""

    async def ask(url: str) -> list[Any]:
        return [(await replies(url, [body]))[0] for body in BODIES]

    with running(Stock(tiny_llama, tmp_path_factory.mktemp("stock"))) as stock:
        return dict(enumerate(asyncio.run(ask(stock.url))))


def refusal(url: str, request: str, to: Any) -> tuple[int, str]:
    try:
        post(f"{url}/tetri/v1/requests/{request}/move", {"to": to})
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]
    return 202, ""


@pytest.mark.parametrize(
    "num_moves", [100, pytest.param(1_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
async def test_equal(own: Cluster, expected: dict[int, Any], num_moves: int) -> None:
    moving = asyncio.create_task(move_on(own.url))
    before = outcomes(own)["moved"]
    while outcomes(own)["moved"] < before + num_moves:
        assert_equal(BODIES, await replies(own.url, BODIES), expected)
    moving.cancel()


async def test_an_instance_dies_while_outputs_move(own: Cluster, expected: dict[int, Any]) -> None:
    before = outcomes(own)["moved"]
    moving = asyncio.create_task(move_on(own.url))
    asking = asyncio.create_task(replies(own.url, RESUMABLE))
    await until(lambda: outcomes(own)["moved"] > before + 5, "some have moved")
    send(own.processes("decode-0"), signal.SIGKILL)
    assert_equal(RESUMABLE, await asking, expected)
    moving.cancel()
    await until(lambda: own.are_ready(3), "all are ready again", 120)


@pytest.mark.long
@pytest.mark.timeout(2_400)
async def test_both_sides_and_the_router_die_while_outputs_move(
    tiny_llama: Path, tmp_path: Path, expected: dict[int, Any]
) -> None:
    """Outputs survive 200 SIGKILLs; clients ask again for streams of a router that dies."""
    decodes = [f"decode-{at}" for at in range(3)]
    with running(ByHand(tmp_path)) as cluster:
        for name in ("prefill-0", *decodes):
            cluster.start(name, name[:-2], tiny_llama, *SERVE)
        cluster.wait("prefill-0", *decodes)
        theirs = [expected[BODIES.index(body)] for body in RESUMABLE]
        clients = Persistent(cluster.url, RESUMABLE, theirs)
        tasks = [asyncio.create_task(clients.run()) for _ in range(6)]
        turns, killed = cycle(decodes), Counter[str]()
        while killed.total() < 200:
            moving = asyncio.create_task(move_on(cluster.url, 3))
            await until(lambda: outcomes(cluster)["moved"] > 1, "some have moved")
            is_whole = await asyncio.to_thread(cluster.are_ready, 4)
            name = next(turns) if is_whole else "router"
            clients.router_died_s += [time.monotonic()] if name == "router" else []
            await asyncio.to_thread(cluster.kill, name)
            killed[name] += 1
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
            if name == "router":
                cluster.restart()
                await asyncio.to_thread(cluster.ready)
            else:
                await until(lambda: not cluster.are_ready(4), f"{name} is missed")
                cluster.start(name, "decode", tiny_llama, *SERVE)
            assert not any(task.done() for task in tasks), clients.lost
        clients.is_over = True
        await asyncio.gather(*tasks)
        print(f"\n{killed}, {clients.found}")
        assert (clients.wrong, clients.lost) == ([], [])
        assert len(killed) == 4
        await until(lambda: cluster.are_ready(4), "all are ready again", 120)
        cluster.audit()


async def test_what_cannot_move_is_refused_once(own: Cluster) -> None:
    url, body = own.url, completion(40, max_tokens=TOKENS, **STREAM)
    assert refusal(url, "unknown", "decode-0") == (404, "there is no request 'unknown'")
    asking = asyncio.create_task(replies(url, [body]))
    await until(lambda: [row for row in own.requests() if row["generated"] > 5], "it runs")
    (row,) = own.requests()
    there = {"decode-0": "decode-1", "decode-1": "decode-0"}[row["decode"]]
    assert refusal(url, row["id"], "nowhere") == (404, "there is no instance 'nowhere'")
    assert refusal(url, row["id"], 5)[0] == 400
    here = f"{row['id']} is at {row['decode']} already"
    assert refusal(url, row["id"], row["decode"]) == (409, here)
    assert refusal(url, row["id"], there)[0] == 202
    none = f"{row['id']} has no running output that can move now"
    assert refusal(url, row["id"], there) == (409, none)  # it moves already
    await asking
    assert refusal(url, row["id"], there) == (404, f"there is no request {row['id']!r}")


async def test_a_flip_and_a_drain_do_not_wait_for_outputs(
    own: Cluster, expected: dict[int, Any]
) -> None:
    def decodes(name: str) -> bool:
        return bool(own.instances()[name]["running"] > 2)

    def is_prefill() -> bool:
        return bool(own.instances()["decode-1"]["role"] == "prefill")

    asking = asyncio.create_task(replies(own.url, BODIES))
    await until(lambda: decodes("decode-1"), "it decodes")
    before = outcomes(own)["moved"]
    assert (await order(own.url, "decode-1", "prefill"))[0] == 202
    await until(is_prefill, "it has another role")
    assert not asking.done()
    assert outcomes(own)["moved"] > before
    assert_equal(BODIES, await asking, expected)

    assert (await order(own.url, "decode-1", "decode"))[0] == 202
    await until(lambda: not is_prefill(), "it has its role again")
    asking = asyncio.create_task(replies(own.url, BODIES))
    await until(lambda: decodes("decode-0"), "it decodes")
    before = outcomes(own)["moved"]
    post(f"{own.url}/tetri/v1/instances/decode-0/drain", {})
    await until(lambda: "decode-0" not in own.instances(), "it has left")
    assert not asking.done()
    assert outcomes(own)["moved"] > before
    assert_equal(BODIES, await asking, expected)
