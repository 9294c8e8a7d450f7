"""Two routers over two real instances: one dies in the middle, and starts again.

Only here has an instance more than one router, so nothing started by others fits.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.client import ask
from tests.e2e.cluster import ARENA_BYTES, CHUNK, SERVE, Process, answers, free_port, get
from tests.e2e.prompts import completion
from vllm_tetri.secret import VARIABLE, write_secret

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
FIELDS = ("running", "waiting", "held", "blocks_used", "arena_used_bytes")


class Router(Process):
    def __init__(self, folder: Path, control: str, secret: str, port: int = 0) -> None:
        self.port = port or free_port()
        self.control = control
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            ["vllm_tetri.cli", "router", "--port", str(self.port), "--control", control,
             "--mode", "split", "--flip-lease", str(folder / "lease")],
            folder / f"router-{self.port}.log",
            **{VARIABLE: secret},
        )  # fmt: skip

    def instances(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in get(f"{self.url}/tetri/v1/instances")["instances"]}

    def serves(self) -> bool:
        if not answers(f"{self.url}/health"):
            return False
        states = [row["state"] for row in self.instances().values()]
        return states == ["ready", "ready"]

    def die(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()

    def busy(self) -> dict[str, Any]:
        return {
            f"{name}.{field}": row[field]
            for name, row in self.instances().items()
            for field in FIELDS
            if row[field]
        }


@pytest.fixture(scope="module")
def routers(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Router, Router]]:
    folder = tmp_path_factory.mktemp("routers")
    folder.chmod(0o700)
    secret = folder / "secret"
    write_secret(secret)
    controls = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    two = [Router(folder, control, str(secret)) for control in controls]
    serving = [
        Process(
            ["vllm.entrypoints.cli.main", "serve", str(tiny_llama), *SERVE, "--role", role,
             "--port", str(free_port()), "--tetri-control", ",".join(controls),
             "--tetri-arena-bytes", str(ARENA_BYTES), "--tetri-chunk-size", str(CHUNK),
             "--tetri-hold-timeout", "2", "--tetri-transfer-timeout", "2"],
            folder / f"{role}.log",
            **{VARIABLE: str(secret)}, **SHARED_CORES,
        )
        for role in ("prefill", "decode")
    ]  # fmt: skip
    try:
        for each in two:
            each.wait_for(each.serves, "a router with both instances")
        yield two[0], two[1]
    finally:
        for process in (*two, *serving):
            if process.child.poll() is None:
                process.stop()


async def eventually(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"not in {timeout_s:.0f} s: {what}"
        await asyncio.sleep(0.02)


def phases(router: Router) -> list[str]:
    return [request["phase"] for request in get(f"{router.url}/tetri/v1/requests")["requests"]]


async def test_what_a_dead_router_asked_for_is_freed_and_the_next_one_serves(
    routers: tuple[Router, Router],
) -> None:
    one, other = routers
    expected = await ask(one.url, completion(300))
    prompts = [completion(1500 - index, max_tokens=500) for index in range(6)]
    for index, body in enumerate(prompts):
        body["prompt"] = [index + 10, *body["prompt"][1:]]
    streams = [completion(100 + index, max_tokens=1500, stream=True) for index in range(3)]
    async with aiohttp.ClientSession() as session:
        orphans = [_post(session, other.url, body) for body in streams]
        await eventually(lambda: phases(other).count("decoding") >= 3, "answers are written")
        orphans += [_post(session, other.url, body) for body in prompts]
        await eventually(lambda: "prefilling" in phases(other), "prompts are computed")
        mine = asyncio.create_task(ask(one.url, completion(300)))
        other.die()
        await asyncio.wait(orphans, timeout=20.0)
        assert all(orphan.exception() is not None for orphan in orphans)
    assert (await mine).same_as(expected)
    await eventually(lambda: not one.busy(), "nothing of the dead router's is left")
    again = Router(other.log.parent, other.control, str(other.log.parent / "secret"), other.port)
    try:
        again.wait_for(again.serves, "the router that was started again")
        assert (await ask(again.url, completion(300))).same_as(expected)
    finally:
        again.stop()


def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> asyncio.Task[bytes]:
    async def post() -> bytes:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            return await response.read()

    return asyncio.create_task(post())
