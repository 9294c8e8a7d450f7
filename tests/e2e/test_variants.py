"""The other ways: TCP instead of shared memory, one push per request, background
loads. The cluster is this module's own, so a test may stop it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.client import assert_handed_over_as_stock
from tests.e2e.cluster import SERVE, Cluster, Process, Stock, answers, get
from tests.e2e.prompts import chat, completion
from vllm_tetri.launch.machine import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


OWN = {
    "serve": ("--tetri-link", "tcp", "--tetri-preset", "paper", "--tetri-load-budget-bytes", "1")
}


async def test_equal_over_tcp_alone_and_together(stock: Stock, own: Cluster) -> None:
    asked = [completion(n) for n in (3, 127, 128, 129, 513, 1025, 1500)] + [chat(100)]
    await assert_handed_over_as_stock(stock, own, asked)


def test_stopping_leaves_nothing_behind(own_started: Cluster) -> None:
    assert stop_without_trace(own_started) == 0


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
    name = f"both-{platform.node()}-{port}"
    assert get(f"http://127.0.0.1:{port}/tetri/v1/instance")["id"] == name
    stop_without_trace(instance)


def stop_without_trace(root: Process) -> int:
    """Its exit status; no process and no arena is left."""
    processes = root.tree()
    arenas = set(_arenas_of(processes))
    assert arenas
    status = root.stop()
    assert not psutil.wait_procs(processes, timeout=10)[1]
    assert not {arena for arena in arenas if Path(arena).exists()}
    return status


def _arenas_of(processes: list[psutil.Process]) -> Iterator[str]:
    for process in processes:
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            path = line.split()[-1]
            if path.startswith("/dev/shm/tetri-"):
                yield path
