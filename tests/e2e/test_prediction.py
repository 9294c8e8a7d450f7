"""A predictor beside the prefill instance of a real cluster."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.client import ask, ask_all
from tests.e2e.cluster import Cluster, running
from tests.e2e.prompts import chat
from tests.eventually import eventually
from tests.predictor.tiny_artefact import make

pytestmark = [pytest.mark.e2e, pytest.mark.long]

COMEBACK_S = 60.0
GRANULARITY = 30


@pytest.fixture(scope="module")
def started(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("prediction")
    artefact = make(folder / "artefact", granularity=GRANULARITY)
    options = ("--tetri-predictor", str(artefact))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TETRI_CACHE", str(folder / "cache"))
        with running(Cluster(tiny_llama, folder, serve=options)) as cluster:
            eventually(lambda: predictor(cluster), COMEBACK_S, "the predictor has started")
            yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    yield started
    started.rest()


def predictor(cluster: Cluster) -> psutil.Process | None:
    """The process beside the prefill instance; the only one there is."""
    found = [
        process for process in cluster.tree() if "examples.predictor.server" in process.cmdline()
    ]
    assert len(found) <= 1
    return found[0] if found else None


def num_learnt() -> float:
    """Answers that ended on the decode instance with a prediction from the other one."""
    files = list(Path(os.environ["TETRI_CACHE"], "lengths").glob("*.json"))
    return sum(json.loads(file.read_text())["sums"][0] for file in files)


def counts(cluster: Cluster, outcome: str) -> int:
    count = cluster.instances()["prefill-0"][f"predictions_{outcome}"]
    assert isinstance(count, int)
    return count


async def predict_one(cluster: Cluster) -> None:
    """Ask until a prediction was made; the process may only just have started."""
    made, deadline = counts(cluster, "made"), time.monotonic() + COMEBACK_S
    while counts(cluster, "made") == made:
        assert time.monotonic() < deadline, "no prediction"
        assert (await ask(cluster.url, body(0))).status == 200
        await asyncio.sleep(0.3)  # longer than a report takes


def body(index: int) -> dict[str, Any]:
    made = chat(300 + index, stream=True)
    usage = {"include_usage": True}
    return {**made, "max_tokens": 60, "ignore_eos": True, "stream_options": usage}


@asynccontextmanager
async def watched(cluster: Cluster) -> AsyncIterator[list[Any]]:
    """What the request table says of predictions, as long as this lasts."""
    seen: list[Any] = []

    async def look() -> None:
        while True:
            rows = await asyncio.to_thread(cluster.requests)
            seen.extend(row["predicted"] for row in rows)
            await asyncio.sleep(0.01)

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        looking.cancel()


async def test_predictions_reach_the_router_and_the_decode_instance(cluster: Cluster) -> None:
    await predict_one(cluster)
    async with watched(cluster) as seen:
        answers = await ask_all(cluster.url, [body(index) for index in range(12)])

    assert [answer.status for answer in answers] == [200] * 12
    assert {value for value in seen if value is not None} <= {15, 45, 75, 105}
    assert any(value is not None for value in seen)


async def test_a_killed_predictor_costs_no_request_and_comes_back(cluster: Cluster) -> None:
    await predict_one(cluster)
    killed = predictor(cluster)
    assert killed is not None
    load = asyncio.create_task(ask_all(cluster.url, [body(index) for index in range(16)]))
    await asyncio.sleep(0.2)
    killed.kill()
    answers = await load

    assert [answer.status for answer in answers] == [200] * 16
    assert all(answer.error is None and answer.usage for answer in answers)
    await predict_one(cluster)
    restarted = predictor(cluster)
    assert restarted is not None
    assert restarted.pid != killed.pid


def test_at_the_end_nothing_runs_and_what_was_learnt_is_kept(started: Cluster) -> None:
    process = predictor(started)
    assert process is not None
    # vLLM kills its engine at once, so what counts is what was saved while it served.
    eventually(
        lambda: asyncio.run(predict_one(started)) or num_learnt(), COMEBACK_S, "lengths were saved"
    )
    started.stop()
    eventually(lambda: not process.is_running(), COMEBACK_S, "the predictor ended")
    assert num_learnt() > 0
