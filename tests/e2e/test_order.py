"""What steps really take, by vLLM's own account of every iteration."""

from __future__ import annotations

import asyncio
import re
from random import Random

import pytest

from tests.e2e.client import ask, ask_all, assert_as_stock
from tests.e2e.cluster import CHUNK, Cluster, Stock
from tests.e2e.prompts import chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# One instance that does everything, under a bound that no step can keep.
OWN = {"roles": ("--both", "1"), "serve": ("--tetri-tbt-slo", "0.0001",
       "--tetri-prefill-policy", "srtf")}  # fmt: skip
TILE = 16  # the least that a step with decodes takes of a prompt on CPUs
ITERATION = re.compile(
    r"Iteration\((\d+)\): \d+ context requests, (\d+) context tokens, "
    r"\d+ generation requests, (\d+) generation tokens"
)


class Iterations:
    """What an instance logs from now on: (prompt tokens, decoded tokens) per step."""

    def __init__(self, cluster: Cluster, instance: str) -> None:
        self._log = cluster.logs / f"{instance}.log"
        self._start = self._log.stat().st_size

    def read(self) -> list[tuple[int, int]]:
        with self._log.open("rb") as log:
            log.seek(self._start)
            found = ITERATION.findall(log.read().decode(errors="replace"))
        return [(int(prompt), int(decoded)) for _, prompt, decoded in found]


def unseen(num_tokens: int) -> list[int]:
    """A prompt that no other test has left in a prefix cache."""
    return Random(f"order {num_tokens}").choices(range(10, 1000), k=num_tokens)


async def test_prefill_steps_take_exactly_a_chunk_while_there_is_work(cluster: Cluster) -> None:
    iterations = Iterations(cluster, "prefill-0")
    lengths = (1500, 700, 400, 3, 90, 128, 50, 300)
    asked = [completion(n, prompt=unseen(n)) for n in lengths]
    answers = await ask_all(cluster.url, asked)
    assert all(answer.status == 200 for answer in answers)
    taken = [prompt for prompt, _ in iterations.read() if prompt]
    assert max(taken) == CHUNK
    # The long prompts alone are that many chunks; only what comes before or after
    # the queue has formed may be less.
    assert taken.count(CHUNK) >= sum(lengths) // CHUNK - len(lengths)
    assert sum(taken) >= sum(lengths)


async def test_prompts_leave_room_for_decodes(own: Cluster, stock: Stock) -> None:
    """The bound cannot be kept, so prompts get the least that a step gives them."""
    iterations = Iterations(own, "both-0")
    decoding = asyncio.create_task(ask(own.url, completion(5, max_tokens=400, ignore_eos=True)))
    while not any(decoded for _, decoded in iterations.read()):
        await asyncio.sleep(0.02)
    asked = [completion(n) for n in (600, 40, 200)]
    ours = await ask_all(own.url, asked)
    beside = [prompt for prompt, decoded in iterations.read() if prompt and decoded]
    assert beside
    assert max(beside) <= 2 * TILE
    assert (await decoding).status == 200
    await assert_as_stock(ours, stock.url, asked)


async def test_equal_to_stock_while_prompts_interrupt_each_other(
    own: Cluster, stock: Stock
) -> None:
    asked = [completion(n) for n in (1500, 900, 30, 128, 513, 3, 1000, 255)] + [chat(200)]
    together = await ask_all(own.url, asked)
    await assert_as_stock(together, stock.url, asked)


async def test_seeded_prompts_of_many_steps_equal_stock(own: Cluster, stock: Stock) -> None:
    """Stock computes them in one step, which is all that it can do with a seed."""
    asked = [completion(n, seed=n, temperature=1.0) for n in (3, 40, 200, 700)]
    await assert_as_stock(await ask_all(own.url, asked), stock.url, asked)
