"""The other ways: TCP instead of shared memory, one push per request, background
loads. The cluster is this module's own, so a test may stop it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.client import ask, ask_all
from tests.e2e.cluster import SERVE, Cluster, Process, Stock, answers, free_port, get, running
from tests.e2e.prompts import chat, completion

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def started(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = ("--tetri-link", "tcp", "--tetri-preset", "paper", "--tetri-load-budget-bytes", "1")
    with running(Cluster(tiny_llama, tmp_path_factory.mktemp("variant"), serve=options)) as cluster:
        yield cluster


@pytest.fixture
def variant(started: Cluster) -> Iterator[Cluster]:
    yield started
    started.rest()


async def test_equal_over_tcp_alone_and_together(stock: Stock, variant: Cluster) -> None:
    asked = [completion(n) for n in (3, 127, 128, 129, 513, 1025, 1500)] + [chat(100)]
    ours = [await ask(variant.url, body) for body in asked]
    together = await ask_all(variant.url, asked)
    for mine, again, body in zip(ours, together, asked, strict=True):
        theirs = await ask(stock.url, body)
        assert mine.same_as(theirs)
        assert again.same_as(theirs)
    moved = variant.instances()
    assert moved["prefill-0"]["kv_bytes_sent"] > 0
    assert moved["decode-0"]["kv_loads_failed"] == 0


def test_stopping_leaves_nothing_behind(started: Cluster) -> None:
    processes = started.tree()
    arenas = set(_arenas_of(processes))
    assert arenas
    assert started.stop() == 0
    assert not psutil.wait_procs(processes, timeout=5)[1]
    assert not {arena for arena in arenas if Path(arena).exists()}


def test_an_instance_by_hand_leaves_nothing_behind(tiny_llama: Path, tmp_path: Path) -> None:
    """`vllm serve --role`, without `up`, and without a router at the control address."""
    port = free_port()
    instance = Process(
        ["vllm.entrypoints.cli.main", "serve", str(tiny_llama), "--port", str(port), *SERVE,
         "--role", "both", "--tetri-arena-bytes", "16M", "--tetri-control",
         f"tcp://127.0.0.1:{free_port()}"],
        tmp_path / "serve.log",
    )  # fmt: skip
    instance.wait_for(lambda: answers(f"http://127.0.0.1:{port}/health"), "vllm serve --role both")
    assert get(f"http://127.0.0.1:{port}/tetri/v1/instance")["id"] == f"both-{port}"
    processes = instance.tree()
    arenas = set(_arenas_of(processes))
    assert arenas
    instance.stop()
    assert not psutil.wait_procs(processes, timeout=10)[1]
    assert not {arena for arena in arenas if Path(arena).exists()}


def _arenas_of(processes: list[psutil.Process]) -> Iterator[str]:
    for process in processes:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            path = line.split()[-1]
            if path.startswith("/dev/shm/tetri-"):
                yield path
