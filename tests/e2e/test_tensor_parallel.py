"""Instances of two tensor-parallel workers each, on shared cores: equal to stock, also when one
of them is killed."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from examples.benchmarks.faults import send
from tests.e2e.client import (
    Answer,
    ask,
    ask_all,
    assert_same,
    flip,
    split_once,
    stock_answers,
    struck,
    until,
)
from tests.e2e.cluster import Cluster
from tests.e2e.prompts import LENGTHS, STREAM, completion

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

WORKERS = ("--tensor-parallel-size", "2")
# Four workers that poll share two cores, on which torch compiles for the first requests, and
# one that slept may miss a step's message for 5 s: vLLM's SHM_READER_RECHECK_INTERVAL_MS.
OWN = {"serve": (*WORKERS, "--tetri-transfer-timeout", "30")}
REST_S = 60.0  # a core that four polling workers share comes late; what is left then is a leak
SEEDED = {"temperature": 0.9, "seed": 11}
ASKED = [
    completion(n, max_tokens=12, **(SEEDED if at % 3 == 0 else {}), **(STREAM if at % 2 else {}))
    for at, n in enumerate(LENGTHS)
]
LONG = [completion(300 + 7 * at, max_tokens=250, **STREAM) for at in range(4)]
PROMPTS = [completion(1400 + at, max_tokens=6) for at in range(6)]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What stock says with as many workers."""
    serve = (*WORKERS, "--distributed-executor-backend", "mp")
    folder = tmp_path_factory.mktemp("stock")
    return stock_answers(tiny_llama, folder, [*ASKED, *LONG, *PROMPTS], serve)


async def test_equal_alone_and_together(expected: list[Answer], own: Cluster) -> None:
    await split_once(own)
    alone = [await ask(own.url, body) for body in ASKED[::5]]
    assert_same(alone, expected[: len(ASKED) : 5])
    together = await ask_all(own.url, ASKED)
    assert_same(together, expected[: len(ASKED)])
    decodes = [each.decode for each in (*alone, *together)]
    assert decodes.count("decode-0") > len(decodes) / 2  # the rest while it was silent for a second
    decode = own.instances()["decode-0"]  # KV that comes too late on a busy core is no error
    assert decode["kv_bytes_received"] > decode["kv_loads_failed"]


async def test_clients_that_leave_take_everything_with_them(own: Cluster) -> None:
    asked = [{**body, "cache_salt": "again"} for body in (*LONG, *PROMPTS)]
    for delay_s in (0.2, 0.8, 2.0):
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await ask_all(own.url, asked)
    await asyncio.to_thread(own.rest, REST_S)
    await asyncio.to_thread(own.audit)


async def test_kv_goes_the_other_way_after_a_flip(expected: list[Answer], own: Cluster) -> None:
    await flip(own, "prefill-0", "both")
    await flip(own, "decode-0", "prefill")
    received = own.instances()["prefill-0"]["decodes_done"]
    assert_same(await ask_all(own.url, PROMPTS), expected[-len(PROMPTS) :])

    def is_known() -> bool:
        rows = own.instances()
        return (
            rows["prefill-0"]["decodes_done"] > received and rows["decode-0"]["kv_bytes_sent"] > 0
        )

    await until(is_known, "reports tell of the hand-over", 10)
    await flip(own, "decode-0", "decode")
    await flip(own, "prefill-0", "prefill")


async def test_a_worker_of_a_decode_instance_is_killed(
    expected: list[Answer], own: Cluster
) -> None:
    def kill(_: list[Answer]) -> None:
        workers = [each for each in own.processes("decode-0") if "Worker_TP1" in each.name()]
        send(workers, signal.SIGKILL)

    assert_same(await struck(own.url, LONG, kill), expected[len(ASKED) :][: len(LONG)])
