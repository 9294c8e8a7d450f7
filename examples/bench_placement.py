"""Which placement should `vllm-tetri up` use on this CPU host? Measures both, in turn.

    python examples/bench_placement.py MODEL [--rounds 2] [--requests 24] [--rate 1.0]

Every round starts a fresh 1P+1D cluster per placement and plays the same seeded
Poisson load of short and long prompts and answers, so rounds differ only in
placement. Prints means over rounds; the machine should be doing nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

PLACEMENTS = ("split", "shared")
PROMPT_TOKENS = (20, 60, 250, 500)
ANSWER_TOKENS = (8, 24, 64)
START_S = 300.0


@dataclass
class Result:
    """Seconds, one entry per request (or per gap between tokens)."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    jct: list[float] = field(default_factory=list)


async def one(
    session: aiohttp.ClientSession, url: str, prompt: int, answer: int, into: Result
) -> None:
    body = {
        "prompt": [random.Random(prompt * 31 + answer).randrange(100, 9000) for _ in range(prompt)],
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    start = last = time.monotonic()
    async with session.post(url + "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            (into.ttft if last == start else into.gaps).append(now - last)
            last = now
    into.jct.append(last - start)


async def play(url: str, requests: int, rate: float, into: Result) -> None:
    rng = random.Random(7)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await one(session, url, 20, 4, Result())  # warm
        tasks = []
        for _ in range(requests):
            sizes = rng.choice(PROMPT_TOKENS), rng.choice(ANSWER_TOKENS)
            tasks.append(asyncio.create_task(one(session, url, *sizes, into)))
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*tasks)


def measure(options: argparse.Namespace, placement: str, into: Result) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [
            sys.executable, "-m", "vllm_tetri.cli", "up", options.model, "--port", "0",
            "--mode", "split", "--placement", placement, "--ready-file", str(ready),
            "--", "--max-model-len", "1024", "--dtype", options.dtype,
        ]  # fmt: skip
        cluster = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_S
            while not ready.exists():
                if cluster.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the cluster did not start; try: {' '.join(command)}")
                time.sleep(0.2)
            url = json.loads(ready.read_text())["url"]
            asyncio.run(play(url, options.requests, options.rate, into))
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.wait(60)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", help="model folder, as for vllm serve")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=24, help="per round and placement")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    results = {placement: Result() for placement in PLACEMENTS}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=options.rounds * len(PLACEMENTS))
        for _ in range(options.rounds):
            for placement in PLACEMENTS:
                progress.update(task, description=f"measuring {placement}")
                measure(options, placement, results[placement])
                progress.advance(task)
    columns = ("placement", "TTFT mean ms", "TTFT p99", "ITL mean", "ITL p99", "JCT mean")
    table = Table(*columns)
    for placement, result in results.items():
        figures = (
            statistics.mean(result.ttft), percentile(result.ttft, 0.99),
            statistics.mean(result.gaps), percentile(result.gaps, 0.99),
            statistics.mean(result.jct),
        )  # fmt: skip
        table.add_row(placement, *(f"{1000 * figure:,.0f}" for figure in figures))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
