"""What the router holds for requests that wait: bytes per request, with instances that hold all.

Fake instances (fake.py) respond to nothing until every request has arrived; then all must get their
responses. Aggregated, a request waits at one instance; as a pair, at the prefill instance. Each has
a connection of its own, so there are at most as many as the router accepts with this machine's hard
limit of open files. The exit status is 1 if one got no response.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import time
from pathlib import Path

import psutil
import uvloop

from examples.benchmarks.client import Stream
from examples.benchmarks.cluster import get_json
from examples.benchmarks.fake import MODEL
from examples.benchmarks.router import System, http, systems

WARM_UP = 100
PATIENCE_S = 300.0


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its children."""
    root = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (root, *root.children(recursive=True)))


async def ask_all(system: System, fake_url: str, count: int, prompt: str) -> tuple[int, int]:
    """Ask for `count` responses at once. Return how many came, and the bytes that the router had
    while all waited; TimeoutError if they do not reach the instances."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": True, "hold": True}
    streams = [await Stream.open(system.url) for _ in range(count)]
    tasks = [asyncio.create_task(each.exchange(http(system.url, body))) for each in streams]
    deadline = time.monotonic() + PATIENCE_S
    while (await asyncio.to_thread(get_json, f"{fake_url}/held")).get("held") != count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {count} requests arrived in {PATIENCE_S:g} s")
        await asyncio.sleep(0.2)
    size = resident_bytes(system.pid)
    await asyncio.to_thread(get_json, f"{fake_url}/release")
    await asyncio.wait(tasks, timeout=PATIENCE_S)
    answered = sum(
        task.done() and task.exception() is None and bool(each.event_s)
        for task, each in zip(tasks, streams, strict=True)
    )
    for each in streams:
        each.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    return answered, size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="that wait; 20000")
    parser.add_argument("--input-len", type=int, default=500, help="tokens of the prompt; 500")
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="for logs; bench")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    cores, prompt, is_right = os.sched_getaffinity(0), " token" * options.input_len, True
    with systems(options.folder, cores, cores, options.input_len) as found:
        fake_url = found[0].url
        for system in (each for each in found if each.name == "ours"):
            _, rest = uvloop.run(ask_all(system, fake_url, WARM_UP, prompt))
            answered, size = uvloop.run(ask_all(system, fake_url, options.requests, prompt))
            is_right = is_right and answered == options.requests
            row = {
                "shape": system.shape,
                "waiting": options.requests,
                "answered": answered,
                "body_bytes": len(prompt),
                "bytes_each": round((size - rest) / (options.requests - WARM_UP)),
            }
            print(json.dumps(row), flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
