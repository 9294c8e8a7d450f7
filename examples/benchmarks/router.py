"""What a router adds: latency and CPU time, with instances that respond at once.

Fake instances (fake.py) are asked directly, through our router aggregated and as a pair of prefill
and decode, and through vllm-router. Systems take turns in random order. Routers share one core;
instances and this client share another one. In each turn some requests are timed while other
streams flow; then streams flow as fast as they can, and short requests follow one another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import uvloop

from examples.benchmarks.client import Stream
from examples.benchmarks.cluster import VLLM_ROUTER, Site, conditions, get_json
from examples.benchmarks.fake import DIRECT, MODEL
from examples.benchmarks.figures import Results
from vllm_tetri import handover
from vllm_tetri.bench import TETRI, Child
from vllm_tetri.handover import DecodeParams, PrefillParams, PriorOutput
from vllm_tetri.launch.machine import free_port
from vllm_tetri.types import RequestId, TransferId

TOKENS = 16  # of a response that comes at once
STEP_S = 0.05  # of an engine with a full batch
BUSY_STREAMS = 64
FLOW_S = 1.0
WATCH_S = 10.0  # with open pages, which get something every second
WARM_UP = 5
LONGEST_GAP_S = 0.005
PATIENCE_S = 60.0
TURN_S = 180.0


@dataclass(frozen=True, slots=True)
class System:
    """What is asked: a URL; with `decode_url`, both requests of a pair are sent from here."""

    shape: str
    name: str
    url: str
    decode_url: str = ""
    pid: int = 0


def http(url: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a request."""
    raw = json.dumps(body, separators=(",", ":")).encode()
    host = url.removeprefix("http://")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


class Turn:
    """One system asked with prompts of one length."""

    def __init__(self, system: System, input_len: int) -> None:
        self.system = system
        body: dict[str, Any] = {
            "model": MODEL, "prompt": " token" * input_len, "max_tokens": TOKENS,
            "temperature": 0, "stream": True,
        }  # fmt: skip
        prefill = PrefillParams(TransferId(DIRECT), RequestId("direct"))
        decode = DecodeParams(TransferId(DIRECT), "fake", PriorOutput([1]))
        ids = {"prompt": list(range(input_len)), handover.FIELD: handover.to_params(decode)}
        self._second = http(system.decode_url, {**body, **ids}) if system.decode_url else b""
        if system.decode_url:
            own = {**body, "stream": False, handover.FIELD: handover.to_params(prefill)}
        else:
            own = body
        self.first = http(system.url, own)
        self._flow_url = system.decode_url or system.url
        self._flow_body = {**body, **ids} if system.decode_url else body

    async def time(self, streams: int, requests: int, rng: Random) -> list[tuple[float, float]]:
        """Return milliseconds to the first two tokens of requests one after the other."""
        found = []
        async with self.flowing(streams - 1, STEP_S):
            first = await Stream.open(self.system.url, keep_body=bool(self._second))
            second = await Stream.open(self._flow_url)
            for _ in range(requests + WARM_UP):
                await asyncio.sleep(rng.uniform(0, LONGEST_GAP_S))
                started = time.monotonic()
                await first.exchange(self.first)
                times = [time.monotonic()] if self._second else first.event_s[:2]
                if self._second:
                    await second.exchange(self._second)
                    times.append(second.event_s[0])
                found.append((1e3 * (times[0] - started), 1e3 * (times[1] - started)))
            first.close()
            second.close()
        return found[WARM_UP:]

    @asynccontextmanager
    async def flowing(self, count: int, step_s: float) -> AsyncIterator[list[Stream]]:
        """Let streams without an end flow, all of which have begun."""
        raw = http(self._flow_url, {**self._flow_body, "step_s": step_s})
        streams = [await Stream.open(self._flow_url) for _ in range(count)]
        tasks = [asyncio.create_task(each.exchange(raw)) for each in streams]
        while not all(each.event_s for each in streams):
            if any(task.done() for task in tasks):
                raise RuntimeError(f"{self.system}: a stream ended that should go on")
            await asyncio.sleep(0.01)
        yield streams
        if any(task.done() for task in tasks):
            raise RuntimeError(f"{self.system}: a stream ended that should go on")
        for each in streams:
            each.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def flow(
        self, count: int, step_s: float, pages: int = 0, for_s: float = FLOW_S
    ) -> dict[str, float]:
        """Return events per second, and per CPU second of the router, while pages are open."""
        async with self.flowing(count, step_s) as streams, watching(self.system.url, pages):
            before, cpu_s, started = events_of(streams), self._cpu_s(), time.monotonic()
            await asyncio.sleep(for_s)
            events, took_s = events_of(streams) - before, time.monotonic() - started
            return self._rates("events", events, took_s, self._cpu_s() - cpu_s)

    async def loop(self) -> dict[str, float]:
        """Return requests per second, and per CPU second of the router."""
        streams = [await Stream.open(self.system.url) for _ in range(BUSY_STREAMS)]
        await asyncio.gather(*(each.exchange(self.first) for each in streams))
        cpu_s, started, done = self._cpu_s(), time.monotonic(), 0

        async def repeat(stream: Stream) -> None:
            nonlocal done
            while time.monotonic() < started + FLOW_S:
                await stream.exchange(self.first)
                done += 1

        await asyncio.gather(*map(repeat, streams))
        found = self._rates("requests", done, time.monotonic() - started, self._cpu_s() - cpu_s)
        for each in streams:
            each.close()
        return found

    def _cpu_s(self) -> float:
        if not self.system.pid:
            return 0.0
        root = psutil.Process(self.system.pid)
        times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def _rates(self, what: str, count: int, took_s: float, cpu_s: float) -> dict[str, float]:
        found = {f"{what}_per_s": count / took_s}
        if cpu_s > 0:
            found |= {f"{what}_per_cpu_s": count / cpu_s, f"cpu_us_of_{what}": 1e6 * cpu_s / count}
        return found


@asynccontextmanager
async def watching(url: str, pages: int) -> AsyncIterator[None]:
    """Read what a router shows, as open pages do."""
    host, port = url.removeprefix("http://").split(":")
    head = f"GET /tetri/v1/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()

    async def watch() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        try:
            while await reader.read(1 << 20):
                pass
            raise RuntimeError(f"{url} shows nothing")
        finally:
            writer.close()

    tasks = [asyncio.create_task(watch()) for _ in range(pages)]
    yield
    if any(task.done() for task in tasks):
        raise RuntimeError(f"{url}: a page lost its connection")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def events_of(streams: Sequence[Stream]) -> int:
    """Count the events of all streams."""
    return sum(len(each.event_s) for each in streams)


@contextmanager
def systems(
    folder: Path, routers: set[int], others: set[int], input_len: int, before: Path | None = None
) -> Iterator[Any]:
    """Run fake instances, every router that is installed, and ours of another checkout; yield the
    systems to ask."""
    controls = [f"tcp://127.0.0.1:{free_port()}" for _ in range(4 if before else 2)]
    command = [sys.executable, "-m", "examples.benchmarks.fake", "--input-len", str(input_len)]
    command += ["--aggregated", ",".join(controls[::2]), "--split", ",".join(controls[1::2])]
    with ExitStack() as stack:
        fakes = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            preexec_fn=lambda: os.sched_setaffinity(0, others),
        )
        stack.callback(fakes.communicate)
        assert fakes.stdout is not None
        urls = json.loads(fakes.stdout.readline())
        found = [
            System("aggregated", "direct", urls["aggregated"]),
            System("pair", "direct", urls["prefill"], urls["decode"]),
        ]
        for shape, name, words in commands(urls, controls, before):
            port = free_port()
            log = folder / f"{name}-{shape}.log"
            process = stack.enter_context(
                Child([*words, "--port", str(port)], log, None, list(routers))
            )
            url = f"http://127.0.0.1:{port}"
            process.wait_until(partial(completes, url), PATIENCE_S)
            found.append(System(shape, name, url, pid=process.pid))
        yield found


def commands(
    urls: dict[str, str], controls: list[str], before: Path | None
) -> Iterator[tuple[str, str, list[str]]]:
    """Return shape, name and command of every router."""
    for number, control in enumerate(controls):
        shape, name, where = ("aggregated", "pair")[number % 2], "ours", list[str]()
        if number >= 2:
            name, where = "before", ["env", "-C", str(before), f"PYTHONPATH={before}"]
        words = [*where, *TETRI, "router", "--control", control]
        yield shape, name, [*words, "--mode", "split", "--silent-after", "10"]
    pair = ["--vllm-pd-disaggregation", "--prefill", urls["prefill"], "--decode", urls["decode"]]
    for shape, workers in (("aggregated", ["--worker-urls", urls["aggregated"]]), ("pair", pair)):
        words = [VLLM_ROUTER, *workers, "--policy", "round_robin", "--log-level", "error"]
        words += ["--max-concurrent-requests", "4096", "--prometheus-port", str(free_port())]
        yield shape, "vllm-router", words


def completes(url: str) -> bool:
    """Whether a request comes through, as a pair if the router knows one."""
    rows = get_json(f"{url}/tetri/v1/instances").get("instances")
    if rows is not None and not all(row["state"] == "ready" for row in rows or [{"state": ""}]):
        return False

    async def ask() -> None:
        stream = await Stream.open(url)
        async with asyncio.timeout(2):
            await stream.exchange(
                http(url, {"model": MODEL, "prompt": "x", "max_tokens": 4, "stream": True})
            )
        if len(stream.event_s) < 2:
            raise OSError("no stream")
        stream.close()

    with suppress(OSError, TimeoutError):
        asyncio.run(ask())
        return True
    return False


async def measure(system: System, options: argparse.Namespace, repeat: int) -> list[dict[str, Any]]:
    """Ask one system for everything; return a cell per number of streams and per kind of load."""
    turn, cells = Turn(system, options.input_len), []
    for streams in options.streams:
        rng = Random(f"{options.seed} {repeat} {streams}")
        times = np.array(await turn.time(streams, options.num_prompts, rng))
        quantiles = {"p50_ms": np.quantile(times, 0.5, 0), "p99_ms": np.quantile(times, 0.99, 0)}
        for place, token in enumerate(("first", "second")):
            cell = {name: float(values[place]) for name, values in quantiles.items()}
            cells.append({"load": f"{streams} streams", "token": token, **cell})
    most = max(options.streams)
    cells.append({"load": f"{most} paced", "token": "", **await turn.flow(most, STEP_S)})
    cells.append({"load": "flood", "token": "", **await turn.flow(BUSY_STREAMS, 0.0)})
    for pages in (0, options.pages) if options.pages and system.name == "ours" else ():
        flow = await turn.flow(most, STEP_S, pages, WATCH_S)
        cells.append({"load": f"{most} paced, {pages} pages", "token": "", **flow})
    if not system.decode_url:
        cells.append({"load": "requests", "token": "", **await turn.loop()})
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--streams",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[1, 64, 512],
        help="N,N streams at a time; 1,64,512",
    )
    parser.add_argument("--num-prompts", type=int, default=80, help="timed requests a turn; 80")
    parser.add_argument("--input-len", type=int, default=500, help="tokens of the prompt; 500")
    parser.add_argument("--repeats", type=int, default=5, help="turns of every system; 5")
    parser.add_argument("--pages", type=int, default=0, help="open pages, also measured; 0")
    parser.add_argument("--before", type=Path, help="another checkout to measure beside this one")
    parser.add_argument("--seed", type=int, default=0, help="of orders and pauses; 0")
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="for logs; bench")
    parser.add_argument("--output", type=Path, default=Path("router.jsonl"), help="result file")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    others, routers = set(cores[:-1][:1] or cores), {cores[-1]}
    metrics = ["added_p50_ms", "added_p99_ms", "p50_ms", "events_per_cpu_s", "cpu_us_of_events",
               "requests_per_cpu_s", "events_per_s", "requests_per_s"]  # fmt: skip
    site = Site("fake", tuple(cores[:2]), options.folder)
    by = ["shape", "load", "token", "system"]
    given = conditions(site, num_prompts=options.num_prompts)
    results = Results.of(options.output, by, metrics, given)
    with systems(options.folder, routers, others, options.input_len, options.before) as found:
        os.sched_setaffinity(0, others)
        for repeat in range(options.repeats):
            cells: list[dict[str, Any]] = []
            for system in Random(f"{options.seed} {repeat}").sample(found, len(found)):
                measuring = asyncio.wait_for(measure(system, options, repeat), TURN_S)
                cells += [
                    {"shape": system.shape, "system": system.name, "repeat": repeat, **cell}
                    for cell in uvloop.run(measuring)
                ]
            keys = [(cell["shape"], cell["load"], cell["token"]) for cell in cells]
            of_direct = zip(keys, cells, strict=True)
            direct = {key: cell for key, cell in of_direct if cell["system"] == "direct"}
            for key, cell in zip(keys, cells, strict=True):
                if cell["system"] != "direct" and "p50_ms" in cell:
                    for name in ("p50_ms", "p99_ms"):
                        cell[f"added_{name}"] = cell[name] - direct[key][name]
                results.add(**cell)
            print(f"repeat {repeat} is done", flush=True)


if __name__ == "__main__":
    main()
