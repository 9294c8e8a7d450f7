"""A cluster on several hosts, and clients that note what a cut network does to them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.client import TIMEOUT
from tests.e2e.cluster import ARENA_BYTES, CHUNK, SERVE, UNIPROC, Cluster, Process, answers
from tests.faults.hosts import Hosts

# Shorter than the defaults (30 s, 60 s), so that tests take seconds.
TRANSFER_TIMEOUT_S, HOLD_TIMEOUT_S = 5, 10
CONTROL_PORT, HTTP_PORT = 18555, 8000
INSTANCES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
PASSIVE = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Hosted(Cluster):
    """A router and three instances, each on a host of its own.

    Attributes:
        parts: The instances' processes by name.
    """

    def __init__(self, model: Path, folder: Path, hosts: Hosts, secret: Path) -> None:
        address = hosts.addresses["router"]
        self.url = f"http://{address}:{HTTP_PORT}"
        control = f"tcp://{address}:{CONTROL_PORT}"
        Process.__init__(
            self,
            ["vllm_tetri.cli", "router", "--host", address, "--port", str(HTTP_PORT),
             "--control", control, "--secret-file", str(secret), "--flip", "off"],
            folder / "router.log",
            within=hosts.within("router"),
        )  # fmt: skip
        self.parts = {
            name: _instance(name, role, model, folder, hosts, secret, control)
            for name, role in INSTANCES.items()
        }

    def ready(self) -> None:
        self.wait_for(lambda: answers(f"{self.url}/health"), "the router")
        for name, part in self.parts.items():
            part.wait_for(partial(self.is_ready, name), name)

    def is_ready(self, name: str) -> bool:
        """Whether the router gives it requests."""
        return bool(self.instances().get(name, {}).get("state") == "ready")

    def stop(self) -> int:
        for part in self.parts.values():
            part.stop()
        return super().stop()


def _instance(
    name: str, role: str, model: Path, folder: Path, hosts: Hosts, secret: Path, control: str
) -> Process:
    address = hosts.addresses[name]
    return Process(
        ["vllm.entrypoints.cli.main", "serve", str(model), *SERVE, "--role", role,
         "--distributed-executor-backend", UNIPROC, "--host", address, "--port", str(HTTP_PORT),
         "--tetri-instance", name, "--tetri-host", address, "--tetri-control", control,
         "--tetri-url", f"http://{address}:{HTTP_PORT}", "--tetri-secret-file", str(secret),
         "--tetri-link", "tcp",  # they share memory, which no cut of the network touches
         "--tetri-arena-bytes", str(ARENA_BYTES), "--tetri-chunk-size", str(CHUNK),
         "--tetri-transfer-timeout", str(TRANSFER_TIMEOUT_S),
         "--tetri-hold-timeout", str(HOLD_TIMEOUT_S)],
        folder / f"{name}.log",
        within=hosts.within(name),
        VLLM_HOST_IP=address,
        **PASSIVE,
    )  # fmt: skip


@contextmanager
def hosted(cluster: Hosted) -> Iterator[Hosted]:
    """Ready; gone afterwards."""
    try:
        cluster.ready()
        yield cluster
    finally:
        cluster.stop()


@dataclass
class Seen:
    """What one client saw of one request.

    Attributes:
        index: Which of the bodies it asked for.
        error: What it was told, if that is no answer.
    """

    index: int
    begin_s: float
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    decode: str = ""
    is_whole: bool = False
    pause_s: float = 0.0
    end_s: float = 0.0

    @property
    def answer(self) -> tuple[list[int], str | None]:
        return self.token_ids, self.finish_reason


async def ask(url: str, index: int, body: dict[str, Any]) -> Seen:
    """One completion; a connection that breaks is an error like others."""
    seen = Seen(index, time.monotonic())
    try:
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
            session.post(f"{url}/v1/completions", json=body) as response,
        ):
            seen.status = response.status
            seen.decode = response.headers.get("x-tetri-decode", "")
            await _read(response, seen, is_streamed=bool(body.get("stream")))
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.error = f"connection: {error!r}"
    seen.end_s = time.monotonic()
    return seen


async def _read(response: aiohttp.ClientResponse, seen: Seen, *, is_streamed: bool) -> None:
    last_s = seen.begin_s
    if not is_streamed or response.status != 200:
        body = await response.json()
        seen.pause_s = time.monotonic() - last_s
        if response.status != 200:
            seen.error = str(body["error"]["message"])
            return
        _take(seen, body)
        seen.is_whole = True
        return
    async for line in response.content:
        seen.pause_s = max(seen.pause_s, time.monotonic() - last_s)
        last_s = time.monotonic()
        if line.strip() == b"data: [DONE]":
            seen.is_whole = True
        elif line.startswith(b"data: "):
            _take(seen, json.loads(line[6:]))


def _take(seen: Seen, chunk: dict[str, Any]) -> None:
    if chunk.get("error"):
        seen.error = str(chunk["error"]["message"])
    for choice in chunk.get("choices", []):
        seen.token_ids += choice.get("token_ids") or []
        seen.finish_reason = choice["finish_reason"] or seen.finish_reason


class Clients:
    """They ask for all bodies in turn, again and again, and note everything."""

    def __init__(
        self, url: str, bodies: list[dict[str, Any]], expected: list[Seen], num: int
    ) -> None:
        self._url = url
        self._next = cycle(enumerate(bodies))
        self._expected = [each.answer for each in expected]
        self._is_over = False
        self.num = num
        self.all: list[Seen] = []

    async def run(self) -> None:
        """One of them."""
        while not self._is_over:
            index, body = next(self._next)
            seen = await ask(self._url, index, body)
            self.all.append(seen)
            if seen.error:
                await asyncio.sleep(0.2)

    def end(self) -> None:
        """What they have asked for is still answered."""
        self._is_over = True

    @property
    def wrong(self) -> list[Seen]:
        """Answers that are not those of a well cluster: other tokens, or fewer."""
        return [
            seen
            for seen in self.all
            if not seen.error and (not seen.is_whole or seen.answer != self._expected[seen.index])
        ]

    def is_prefix(self, seen: Seen) -> bool:
        """Whether what came before an error is right."""
        tokens = self._expected[seen.index][0]
        return seen.token_ids == tokens[: len(seen.token_ids)]

    def since(self, begin_s: float) -> list[Seen]:
        """Those that ended after a time."""
        return [seen for seen in self.all if seen.end_s >= begin_s]

    def has_served(self, name: str, since_s: float) -> bool:
        """Whether an instance answered something that was asked after a time."""
        return any(s.decode == name and not s.error for s in self.all if s.begin_s >= since_s)


@asynccontextmanager
async def busy(
    url: str, bodies: list[dict[str, Any]], expected: list[Seen], num: int = 6
) -> AsyncIterator[Clients]:
    """Clients while the block runs; what they have asked for then is waited for."""
    made = Clients(url, bodies, expected, num)
    tasks = [asyncio.create_task(made.run()) for _ in range(num)]
    try:
        yield made
        made.end()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def eventually(condition: Callable[[], object], what: str, timeout_s: float) -> float:
    """Wait for something; the seconds that it took."""
    begin_s = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - begin_s < timeout_s, f"not in {timeout_s:g} s: {what}"
        await asyncio.sleep(0.05)
    return time.monotonic() - begin_s
