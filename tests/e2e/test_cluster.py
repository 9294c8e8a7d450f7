"""Two prefill and two decode instances: every class of load, joining and leaving."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks.faults import alive
from tests.e2e.client import ask, ask_all, load, until
from tests.e2e.cluster import Cluster, Stock, by_hand
from tests.e2e.prompts import STREAM, completion

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # six instances on two cores
]

# The paper's classes (section 5.1.1), scaled to the tiny model: prompts of less than a
# chunk or of many, answers of a few tokens or of many.
LIGHT_PROMPTS, HEAVY_PROMPTS = (9, 20, 33, 47, 58, 63), (300, 450, 600, 801, 1000, 1300)
LIGHT_ANSWER, HEAVY_ANSWER = 6, 60
LOAD = 3  # requests at a time while instances come and go


def of_class(prompts: tuple[int, ...], max_tokens: int) -> list[dict[str, Any]]:
    """Six requests, every other one streamed."""
    return [
        completion(n, max_tokens=max_tokens, **(STREAM if index % 2 else {}))
        for index, n in enumerate(prompts)
    ]


CLASSES = {
    "LPLD": of_class(LIGHT_PROMPTS, LIGHT_ANSWER),
    "LPHD": of_class(LIGHT_PROMPTS, HEAVY_ANSWER),
    "HPLD": of_class(HEAVY_PROMPTS, LIGHT_ANSWER),
    "HPHD": of_class(HEAVY_PROMPTS, HEAVY_ANSWER),
}
CLASSES["mixed"] = [body for bodies in CLASSES.values() for body in bodies[1::2]]


async def drain(cluster: Cluster, name: str, *options: str) -> tuple[int, str]:
    """`vllm-tetri drain`: its status, and its output."""
    words = [sys.executable, "-m", "vllm_tetri.cli", "drain", name, "--url", cluster.url, *options]
    done = await asyncio.to_thread(
        subprocess.run, words, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", CLASSES)
async def test_a_class_of_load_is_answered_as_by_stock(
    stock: Stock, many: Cluster, name: str
) -> None:
    asked = CLASSES[name]
    ours = await ask_all(many.url, asked)
    theirs = await ask_all(stock.url, asked)
    for mine, its, body in zip(ours, theirs, asked, strict=True):
        assert its.token_ids
        assert mine.same_as(its), f"{len(body['prompt'])}: {mine} != {its}"
        assert mine.headers["x-tetri-prefill"].startswith("prefill-")
        assert mine.decode.startswith("decode-")


async def test_every_instance_takes_part(many: Cluster) -> None:
    for _ in range(3):
        await ask_all(many.url, CLASSES["mixed"])
    instances = many.instances()
    assert set(instances) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    for name, row in instances.items():
        assert row["prefills_done" if row["role"] == "prefill" else "decodes_done"] > 0, name


async def test_instances_join_and_leave_under_load(
    stock: Stock, many: Cluster, tiny_llama: Path, tmp_path: Path
) -> None:
    mixed = CLASSES["mixed"]
    expected = [await ask(stock.url, body) for body in mixed]
    joiner = by_hand(
        tmp_path, "decode-2", "decode", tiny_llama, many.facts["control"],
        "--tetri-secret-file", many.facts["secret_file"],
    )  # fmt: skip
    below = [many.processes(name) for name in ("decode-0", "prefill-1")]
    try:
        # Importing takes longest and has nothing to do with the cluster.
        await until(lambda: "Starting to load model" in joiner.log.read_text(), "it loads")
        async with load(many.url, mixed, expected, LOAD) as clients:
            await until(lambda: many.state_of("decode-2") == "ready", "it joins")
            await clients.until_served("decode-2")
            for name in ("decode-0", "prefill-1"):
                status, output = await drain(many, name)
                assert (status, output.splitlines()[-1]) == (0, f"{name} has left")
                await clients.more(3 * LOAD)
            below.append(joiner.tree())
            assert (await drain(many, "decode-2"))[0] == 0
            assert await asyncio.to_thread(joiner.child.wait, 30) == 0, joiner.log.read_text()
            await clients.more(3 * LOAD)
        assert (clients.wrong, clients.failed) == ([], [])
    finally:
        joiner.stop()
    assert set(many.instances()) == {"prefill-0", "decode-1"}
    await until(lambda: not any(map(alive, below)), "nothing is left")
    log = many.log.read_text()
    for name in ("decode-0", "prefill-1"):
        assert f"{name}: drained" in log
        assert f"{name}: ended" not in log


@pytest.mark.long
async def test_the_last_of_its_kind_stays_unless_it_is_forced(stock: Stock, many: Cluster) -> None:
    for name in [each for each in many.instances() if each not in ("prefill-0", "decode-1")]:
        assert (await drain(many, name))[0] == 0
    for name, problem in (
        ("decode-1", "is the last instance for decode"),
        ("unknown", "there is no instance 'unknown'"),
    ):
        status, output = await drain(many, name)
        assert (status, problem in output) == (1, True)

    long = completion(20, max_tokens=1500, **STREAM)
    expected = await ask(stock.url, long)
    asking = asyncio.create_task(ask(many.url, long))
    await until(lambda: many.instances()["decode-1"]["running"], "it decodes")
    status, output = await drain(many, "decode-1", "--force", "--deadline", "0.3")
    assert (status, "decode-1 has left; cut off: 1 unfinished requests" in output) == (0, True)
    assert (await asking).same_as(expected)  # what was cut off went on

    alone = await ask(many.url, completion(20))
    assert (alone.status, alone.decode) == (200, "prefill-0")
