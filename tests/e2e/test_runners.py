"""What a GPU runs by default, on a CPU: vLLM's V2 model runner and asynchronous scheduling, each
with and without the other (`tests/runners`; all other tests have neither). They are equal to stock,
also when clients leave, when requests are preempted, and when an instance is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks.faults import send
from tests.e2e.client import Answer, ask_all, assert_same, struck, until
from tests.e2e.cluster import Cluster, Stock, running
from tests.e2e.compare import Reply, difference, merged, replies_to
from tests.e2e.moving import move_on, outcomes
from tests.e2e.prompts import STREAM, chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

RUNNERS = Path(__file__).parents[1] / "runners"
REST_S = 30.0  # the interpreter is slow; what is left then is a leak
NUM_BLOCKS = 26
BLOCK_BYTES = 48 << 10  # of 32 tokens
SERVE = ("--max-model-len", "768", "--block-size", "32",
         "--kv-cache-memory-bytes", str(NUM_BLOCKS * BLOCK_BYTES))  # fmt: skip
SEEDED = {"temperature": 0.8, "seed": 11}
SHAPES: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"max_tokens": 1},
    {"max_tokens": 2, "logprobs": 0},
    SEEDED,
    {**SEEDED, "top_p": 0.9, "top_k": 20, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3, "frequency_penalty": 1.2, "logprobs": 1},
    {"min_tokens": 10, "ignore_eos": False, "logit_bias": {"2": 90}},
    {"structured_outputs": {"regex": "[a-f]{9}[0-9]{5}"}, "ignore_eos": False},
    {"n": 2, **SEEDED},
    {"prompt_logprobs": 1},  # not streamed
]
ASKED = [
    completion(length, **{"max_tokens": 12, **shape}, **(STREAM if at % 2 else {}))
    for at, shape in enumerate(SHAPES)
    for length in (63 + at, 200 - 7 * at)
] + [chat(30, max_tokens=12, logprobs=True, top_logprobs=2, **STREAM)]  # fmt: skip
# More than fit together into the KV caches of two decode instances.
LONG = [
    completion(50 + 9 * at, max_tokens=80, **STREAM, **(SEEDED if at % 2 else {}))
    for at in range(10)
]


@dataclass(frozen=True)
class Cell:
    runner: str
    scheduling: str

    def chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let processes that are started now compute so."""
        monkeypatch.setenv("PYTHONPATH", str(RUNNERS), prepend=os.pathsep)
        monkeypatch.setenv("ANY_RUNNER_SCHEDULING", self.scheduling)
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # a forked engine has imported Triton before
        if self.runner == "v1":  # else it is vLLM's default, as on a GPU
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


@cache
def stock_answers(runner: str, model: Path, folder: Path) -> tuple[list[Reply], list[Answer]]:
    """What a stock instance says to ASKED and LONG with this model runner."""

    async def ask_stock(url: str) -> tuple[list[Reply], list[Answer]]:
        return await replies(url), await ask_all(url, LONG)

    with pytest.MonkeyPatch.context() as monkeypatch:
        Cell(runner, "async" if runner == "v2" else "sync").chosen(monkeypatch)
        made = Stock(model, folder, serve=SERVE)
    with running(made) as stock:
        return asyncio.run(ask_stock(stock.url))


async def replies(url: str) -> list[Reply]:
    """Ask those with min_tokens after the others: in vLLM 0.32's V1 runner with asynchronous
    scheduling, a running request forgets all but one of its output tokens when one with penalties
    joins (`InputBatch.update_async_output_token_ids`), so stock itself returns too many."""
    found: dict[int, Reply] = {}
    for is_last in (False, True):
        wave = [at for at, body in enumerate(ASKED) if ("min_tokens" in body) == is_last]
        found |= zip(wave, await replies_to(url, [ASKED[at] for at in wave]), strict=True)
    return [found[at] for at in range(len(ASKED))]


@pytest.fixture(scope="module", params=["v2-async", "v2-sync", "v1-async"])
def cell(request: pytest.FixtureRequest) -> Cell:
    return Cell(*request.param.split("-"))


@pytest.fixture(scope="module")
def expected(
    cell: Cell, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Reply], list[Answer]]:
    return stock_answers(cell.runner, tiny_llama, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def started(
    cell: Cell, expected: Any, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder, roles = tmp_path_factory.mktemp("cell"), ("--prefill", "1", "--decode", "2")
    serve = (*SERVE, "--tetri-decode-policy", "greedy", "--tetri-predictor", "head",
             "--tetri-decode-order", "shortest")  # fmt: skip
    with pytest.MonkeyPatch.context() as monkeypatch:
        cell.chosen(monkeypatch)
        made = Cluster(tiny_llama, folder, roles=roles, serve=serve)
    with running(made) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """Every test leaves it at rest."""
    yield started
    started.rest(REST_S)


def test_the_instances_compute_so(cell: Cell, cluster: Cluster) -> None:
    kind = "TetriAsyncScheduler" if cell.scheduling == "async" else "TetriScheduler"
    for name in cluster.instances():
        log = (cluster.logs / f"{name}.log").read_text()
        assert re.findall("any_runner: .*", log) == [f"any_runner: {kind} on {cell.runner}"]


async def test_equal(cell: Cell, cluster: Cluster, expected: Any) -> None:
    for body, ours, theirs in zip(ASKED, await replies(cluster.url), expected[0], strict=True):
        assert theirs.status == ours.status == 200, (body, ours.raw, theirs.raw)
        assert not difference(merged(ours), merged(theirs)), (body, ours.raw, theirs.raw)
    rows = cluster.instances()
    decodes = [row for name, row in rows.items() if name.startswith("decode")]
    assert [row["kv_loads_failed"] for row in decodes] == [0, 0]
    # An instance that cannot continue samples the first token again.
    can_continue = cell != Cell("v1", "async")
    assert (sum(row["continued"] for row in decodes) > 0) == can_continue
    assert rows["prefill-0"]["kv_bytes_sent"] > 0
    # Hidden states were read, of prompts whose outputs ended by themselves elsewhere.
    await until(lambda: cluster.instances()["prefill-0"]["length_states"], "lengths are learnt")


async def test_clients_that_leave(cluster: Cluster) -> None:
    async def leave_when(is_time: Callable[[], bool]) -> None:
        asking = asyncio.gather(*(ask_all(cluster.url, [body]) for body in LONG))
        await until(is_time, "the moment came")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.to_thread(cluster.rest, REST_S)

    await leave_when(lambda: "prefilling" in cluster.phases())
    await leave_when(lambda: cluster.instances()["decode-0"]["running"] > 2)


async def test_preempted_requests(cluster: Cluster, expected: Any) -> None:
    assert_same(await ask_all(cluster.url, LONG), expected[1])
    rows = cluster.instances()
    assert rows["decode-0"]["preemptions"] + rows["decode-1"]["preemptions"] > 0


async def test_outputs_that_move(cell: Cell, cluster: Cluster, expected: Any) -> None:
    before = outcomes(cluster)
    moving = asyncio.create_task(move_on(cluster.url))
    assert_same(await ask_all(cluster.url, LONG[:4]), expected[1][:4])
    moving.cancel()
    found = outcomes(cluster) - before
    assert (found["moved"] > 0) == (cell != Cell("v1", "async"))
    assert found["moved"] + found["refused"] > 0


async def test_a_decode_instance_is_killed(cluster: Cluster, expected: Any) -> None:
    before = cluster.resumed()

    def kill(seen: list[Answer]) -> None:
        send(cluster.processes(seen[0].decode), signal.SIGKILL)

    assert_same(await struck(cluster.url, LONG[:6], kill), expected[1][:6])
    assert cluster.resumed() > before
    await until(lambda: cluster.are_ready(3), "all are ready again", 120)
