"""What an instance costs when it does nothing, next to a stock one."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import ARENA_BYTES, Cluster, Stock

pytestmark = [pytest.mark.e2e, pytest.mark.long]

WATCH_S = 6.0
# Loads are reported every 100 ms, by two processes of an instance. Waking counts, not
# the time that it takes, which depends on how busy the machine's owner is elsewhere.
MAX_WAKES_PER_S = 120
# Against work of some length behind each of them; torch's gloo threads alone take
# several percent in a stock instance on some machines.
MAX_IDLE_OVER_STOCK = 0.05  # of a core
MAX_EXTRA_BYTES = ARENA_BYTES + (100 << 20)


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def wakes(processes: list[psutil.Process]) -> int:
    """How often their threads went to sleep so far."""
    states = (
        state
        for process in processes
        for state in Path(f"/proc/{process.pid}/task").glob("*/status")
    )
    return sum(
        int(line.split()[1])
        for state in states
        for line in state.read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


def proportional_bytes(processes: list[psutil.Process]) -> int:
    return sum(process.memory_full_info().pss for process in processes)


def test_an_idle_cluster_sleeps(cluster: Cluster, stock: Stock) -> None:
    cluster.rest()
    pids = {entry["id"]: entry["pid"] for entry in cluster.facts["instances"]}
    pids["stock"] = stock.child.pid
    trees = {name: tree(pid) for name, pid in pids.items()}
    before = {name: (cpu_s(each), wakes(each)) for name, each in trees.items()}
    start = time.monotonic()
    time.sleep(WATCH_S)
    took_s = time.monotonic() - start
    shares = {name: (cpu_s(each) - before[name][0]) / took_s for name, each in trees.items()}
    rates = {name: (wakes(each) - before[name][1]) / took_s for name, each in trees.items()}
    print({name: f"{100 * shares[name]:.2f} % of a core, {rates[name]:.0f}/s" for name in pids})
    limit = shares.pop("stock") + MAX_IDLE_OVER_STOCK
    del rates["stock"]
    assert max(rates.values()) < MAX_WAKES_PER_S, rates
    assert max(shares.values()) < limit, shares


def test_memory_over_stock_is_the_arena_and_little_more(cluster: Cluster, stock: Stock) -> None:
    baseline = proportional_bytes(stock.tree())
    for entry in cluster.facts["instances"]:
        extra = proportional_bytes(tree(entry["pid"])) - baseline
        print(f"{entry['id']}: {extra / 2**20:.0f} MiB over stock")
        assert extra < MAX_EXTRA_BYTES, entry["id"]
