"""What instances cost while nothing is asked, and how long a pair takes to start.

One stock instance, then one prefill and one decode instance of ours, each system alone; after a
warm-up request every process is watched for a while.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import suppress
from pathlib import Path

import psutil

from examples.benchmarks.client import Request, Target, send
from examples.benchmarks.cluster import System, add_site, conditions, our_cluster, parse, stock
from examples.benchmarks.faults import members
from examples.benchmarks.figures import Results

SPLIT = ("--mode", "split", "--prefill", "1", "--decode", "1", "--flip", "off")
SETTLE_S = 5.0


def usage(processes: list[psutil.Process]) -> tuple[float, float]:
    """Return CPU seconds and MiB of private and shared resident memory of processes."""
    cpu_s = mib = 0.0
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            cpu_s += times.user + times.system
            mib += each.memory_full_info().pss / (1 << 20)
    return cpu_s, mib


def watch(groups: dict[str, list[psutil.Process]], seconds: float) -> dict[str, dict[str, float]]:
    """Return the share of a core and the memory of each group over some seconds."""
    time.sleep(SETTLE_S)
    before, began = {name: usage(each)[0] for name, each in groups.items()}, time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - began
    after = {name: usage(each) for name, each in groups.items()}
    return {
        name: {"core_percent": 100 * (cpu_s - before[name]) / took_s, "pss_mib": mib}
        for name, (cpu_s, mib) in after.items()
    }


def warm_up(url: str, model: str) -> None:
    """Send one request, so that everything is loaded."""
    reply = asyncio.run(send(Target(url, model), Request(0.0, list(range(10, 200)), 16)))
    if reply.error:
        raise RuntimeError(f"{url}: {reply.error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_site(parser)
    parser.add_argument("--seconds", type=float, default=30.0, help="to watch; 30")
    parser.add_argument("--output", type=Path, default=Path("idle.jsonl"), help="result file")
    options, site = parse(parser)
    metrics = ["core_percent", "pss_mib", "ready_after_s"]
    given = conditions(site, seconds=options.seconds)
    results = Results.of(options.output, ["system"], metrics, given, is_new=True)
    began = time.monotonic()
    with stock(site, "stock", System(2), site.cores[:1]) as url:
        ready_s = time.monotonic() - began
        warm_up(url, site.name)
        root = psutil.Process()
        found = watch({"stock": root.children(recursive=True)}, options.seconds)
        results.add(system="stock", ready_after_s=ready_s, **found["stock"])
    began = time.monotonic()
    with our_cluster(site, SPLIT, system=System(2)) as facts:
        ready_s = time.monotonic() - began
        warm_up(facts["url"], site.name)
        ports = {int(facts["url"].rpartition(":")[2]): "router"}
        groups = members(psutil.Process(facts["guard"]), ports)
        for name, cell in watch(groups, options.seconds).items():
            results.add(system=name, ready_after_s=ready_s, **cell)


if __name__ == "__main__":
    main()
