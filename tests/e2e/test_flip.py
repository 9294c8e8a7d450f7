"""Instances change role again and again under load: nothing is lost, nothing is wrong."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import aiohttp
import pytest

from examples.benchmarks.faults import send
from tests.e2e.client import Answer, ask, ask_all, flipped, instances, load, order, until
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.prompts import STREAM, completion

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # five instances on two cores

EACH = 30  # requests for each flip
CLIENTS = 12
# Prompts of less than a chunk to many, short and long answers, every other one streamed.
BODIES = [
    completion(num_tokens, max_tokens=max_tokens, **(STREAM if index % 2 else {}))
    for index, (num_tokens, max_tokens) in enumerate(
        [(5, 3), (30, 20), (64, 6), (65, 2), (100, 12), (200, 4), (33, 40), (300, 3), (129, 8),
         (450, 2), (17, 5)]
    )
]  # fmt: skip


def other(role: str) -> str:
    return "decode" if role == "prefill" else "prefill"


async def flip_one(cluster: Cluster, rng: Random, *, is_now: bool) -> dict[str, Any]:
    """Any instance that is not the last of its role."""
    rows = await instances(cluster)
    roles = Counter(row["role"] for row in rows.values())
    name = rng.choice([name for name, row in rows.items() if roles[row["role"]] > 1])
    role = other(rows[name]["role"])
    status, answer = await order(cluster.url, name, role, now=is_now)
    assert (status, answer["is_new"]) == (202, True), answer
    row = await flipped(cluster, name, answer["epoch"])
    assert (row["role"], row["flip"]["stage"], row["flip"]["problem"]) == (role, "done", "")
    assert row["flip"]["target"] == role
    return dict(row["flip"])


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.long)])
async def test_many_flips_under_load_lose_nothing_and_change_nothing(
    stock: Stock, many: Cluster, count: int
) -> None:
    expected = [await ask(stock.url, body) for body in BODIES]
    assert all(answer.token_ids for answer in expected)
    rng = Random(7)
    flips: list[dict[str, Any]] = []
    before = sum(row["flips"] for row in many.instances().values())
    async with load(many.url, BODIES, expected, CLIENTS) as clients:
        while len(flips) < count:
            flips.append(await flip_one(many, rng, is_now=len(flips) % 2 == 1))
            # So that the flips are spread over all of the load.
            await clients.more(max(0, len(flips) * EACH - len(clients.all)))
    assert (clients.wrong, clients.failed) == ([], [])
    assert len({answer.decode for answer in clients.all}) == 4  # all of them have decoded
    assert sum(row["flips"] for row in many.instances().values()) == before + len(flips)
    drained = sorted(flip["commit_s"] for flip in flips if flip["drain_s"])
    at_once = sorted(flip["commit_s"] for flip in flips if not flip["drain_s"])
    assert len(drained) == len(at_once)
    for what, seconds in (("drained first", drained), ("at once", at_once)):
        print(f"commit, {what}: median {seconds[len(seconds) // 2]:.4f} s, worst {seconds[-1]:.4f}")


async def split(cluster: Cluster) -> tuple[list[str], list[str]]:
    """Two prefill and two decode instances, whatever their roles."""
    while True:
        rows = await instances(cluster)
        of = {
            role: sorted(name for name, row in rows.items() if row["role"] == role)
            for role in ("prefill", "decode")
        }
        if len(of["prefill"]) == 2:
            return of["prefill"], of["decode"]
        many = max(of, key=lambda role: len(of[role]))
        _, answer = await order(cluster.url, of[many][0], other(many), now=True)
        await flipped(cluster, of[many][0], answer["epoch"])


async def test_while_kv_is_in_the_air_for_it(stock: Stock, many: Cluster) -> None:
    """Long prompts are on their way to both decode instances when one of them flips."""
    await split(many)
    bodies = [completion(n, max_tokens=20) for n in (1500, 1400, 1300, 1200)]
    expected = await ask_all(stock.url, bodies)
    for is_now in (False, True):
        asking, name = await until_in_the_air(many, bodies)
        status, answer = await order(many.url, name, "prefill", now=is_now)
        assert status == 202
        answers = await asking
        assert all(a.same_as(b) for a, b in zip(answers, expected, strict=True))
        row = await flipped(many, name, answer["epoch"])
        assert row["role"] == "prefill"
        await split(many)


async def running_on(cluster: Cluster, names: list[str]) -> str:
    """The first of these instances that has something to do."""
    while True:
        rows = await instances(cluster)
        for name in names:
            if rows[name]["running"]:
                return name


async def until_in_the_air(
    cluster: Cluster, bodies: list[Any]
) -> tuple[asyncio.Task[list[Answer]], str]:
    """Ask, until a prompt is seen that is being computed and sent to a decode instance."""
    for salt in range(50):
        own = [{**body, "cache_salt": f"{time.monotonic()} {salt}"} for body in bodies]
        asking = asyncio.create_task(ask_all(cluster.url, own))
        while not asking.done():
            for row in await asyncio.to_thread(cluster.requests):
                if row["phase"] == "prefilling" and row["decode"]:
                    return asking, row["decode"]
    raise AssertionError("no KV was seen in the air")


def stays(max_tokens: int) -> dict[str, Any]:
    """An output that does not move: nothing keeps its log probabilities meanwhile."""
    return completion(9, max_tokens=max_tokens, logprobs=1)


async def test_what_is_not_done_in_time_is_rolled_back(many: Cluster) -> None:
    _, decodes = await split(many)
    asking = asyncio.create_task(ask_all(many.url, [stays(600)] * 4))
    name = await running_on(many, decodes)
    status, answer = await order(many.url, name, "prefill", deadline_s=0.3)
    assert (status, answer["state"]) == (202, "flipping")
    row = await flipped(many, name, answer["epoch"])
    assert (row["role"], row["flip"]["stage"]) == ("decode", "rolled_back")
    assert "not drained in time: " in row["flip"]["problem"]
    assert all(answer.status == 200 for answer in await asking)


async def test_a_flip_goes_on_while_the_router_is_started_anew(stock: Stock, many: Cluster) -> None:
    _, decodes = await split(many)
    asking = asyncio.create_task(ask_all(many.url, [stays(1500)] * 4))
    name = await running_on(many, decodes)
    assert (await order(many.url, name, "prefill"))[1]["state"] == "flipping"
    while not (await instances(many))[name]["flip"]["is_heard"]:
        await asyncio.sleep(0.02)
    send([each for each in many.tree() if "router" in each.cmdline()][::-1], signal.SIGKILL)
    with pytest.raises(aiohttp.ClientError):
        await asking

    def is_back() -> bool:
        with suppress(OSError):
            return many.instances().get(name, {}).get("role") == "prefill"
        return False

    await until(is_back, "the router knows the new role")
    row = (await instances(many))[name]
    assert (row["role"], row["flip"]["stage"]) == ("prefill", "done"), row["flip"]
    await until(lambda: many.are_ready(4), "all are ready", 120)
    expected = await ask_all(stock.url, BODIES)
    answers = await ask_all(many.url, BODIES)
    assert all(a.same_as(b) for a, b in zip(answers, expected, strict=True))


@pytest.mark.long
async def test_one_that_dies_while_it_drains_costs_a_pause_and_no_token(many: Cluster) -> None:
    prefills, decodes = await split(many)
    long = [completion(9, max_tokens=1500, **STREAM)] * 4
    asking = asyncio.create_task(ask_all(many.url, long))
    name = await running_on(many, decodes)
    status, _ = await order(many.url, name, "prefill")
    assert status == 202
    send(many.processes(name)[::-1], signal.SIGKILL)
    # Now, not after the answers: those may take longer than its next start.
    await until(lambda: many.state_of(name) != "flipping", "its silence is noticed")
    assert (await order(many.url, name, "decode"))[0] in (404, 409)
    for answer in await asking:
        assert (answer.error, len(answer.token_ids)) == (None, 1500)
    assert all(answer.status == 200 for answer in await ask_all(many.url, BODIES))
    await until(lambda: many.are_ready(4), "`up` has started it in its first role", 120)
    row = (await instances(many))[name]
    assert (row["role"], row["flip"]) == (name.partition("-")[0], None)
    assert set(prefills) <= set(await instances(many))
