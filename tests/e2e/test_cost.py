"""What an instance costs when it does nothing, next to a stock one."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.e2e.cluster import ARENA_BYTES, Cluster, Stock

pytestmark = pytest.mark.e2e

WATCH_S = 6.0
MAX_IDLE = 0.02  # of a core
# torch's gloo threads alone take over 1 % in a stock instance on some machines.
MAX_IDLE_OVER_STOCK = 0.01
MAX_EXTRA_BYTES = ARENA_BYTES + (100 << 20)


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def proportional_bytes(processes: list[psutil.Process]) -> int:
    return sum(process.memory_full_info().pss for process in processes)


def test_an_idle_cluster_sleeps(cluster: Cluster, stock: Stock) -> None:
    cluster.rest()
    pids = {entry["id"]: entry["pid"] for entry in cluster.facts["instances"]}
    pids["stock"] = stock.child.pid
    before = {name: cpu_s(tree(pid)) for name, pid in pids.items()}
    start = time.monotonic()
    time.sleep(WATCH_S)
    took_s = time.monotonic() - start
    shares = {name: (cpu_s(tree(pid)) - before[name]) / took_s for name, pid in pids.items()}
    print({name: f"{100 * share:.2f} % of a core" for name, share in shares.items()})
    limit = max(MAX_IDLE, shares.pop("stock") + MAX_IDLE_OVER_STOCK)
    assert max(shares.values()) < limit, shares


def test_memory_over_stock_is_the_arena_and_little_more(cluster: Cluster, stock: Stock) -> None:
    baseline = proportional_bytes(stock.tree())
    for entry in cluster.facts["instances"]:
        extra = proportional_bytes(tree(entry["pid"])) - baseline
        print(f"{entry['id']}: {extra / 2**20:.0f} MiB over stock")
        assert extra < MAX_EXTRA_BYTES, entry["id"]
