"""A whole soak of a cluster that is none: its members sleep, its routers always say the same."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import psutil
import pytest

from tests.router.servers import serving
from vllm_tetri.bench.soak import run, watch
from vllm_tetri.bench.soak.cluster import Cluster
from vllm_tetri.bench.soak.faults import Kind
from vllm_tetri.bench.soak.report import promises
from vllm_tetri.bench.soak.run import Plan, Soak
from vllm_tetri.bench.soak.tally import End
from vllm_tetri.bench.soak.watch import Seen
from vllm_tetri.errors import UnsupportedError

INSTANCES = {"prefill-0": "prefill", "prefill-1": "prefill"}
ROUTERS = ("router-0", "router-1")
KINDS = [Kind.KILL_PREFILL, Kind.STOP_PREFILL, Kind.KILL_ROUTER, Kind.STOP_ROUTER]
CHOICE = {"text": "a", "message": {"content": "a"}, "token_ids": [1]}


class Sleepers:
    """Members that sleep; one that was killed is started again when somebody asks for it."""

    def __init__(self) -> None:
        self._children = {name: self._start() for name in (*INSTANCES, *ROUTERS)}
        self.starts = len(self._children)

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"])

    def is_well(self, name: str) -> bool:
        child = self._children[name]
        if child.poll() is None:
            return psutil.Process(child.pid).status() != psutil.STATUS_STOPPED
        self._children[name] = self._start()
        self.starts += 1
        return False

    def members(self) -> dict[str, list[psutil.Process]]:
        return {name: [psutil.Process(child.pid)] for name, child in self._children.items()}

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process()]

    def is_running(self) -> bool:
        return True

    def close(self) -> None:
        for child in self._children.values():
            child.kill()
            child.wait()

    def table(self) -> dict[str, Any]:
        states = {name: "ready" if self.is_well(name) else "silent" for name in INSTANCES}
        return {
            "instances": [
                {"id": name, "role": role, "state": states[name], "leftovers": []}
                for name, role in INSTANCES.items()
            ]
        }


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    made = Sleepers()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CALM_S", 0.05)
    monkeypatch.setattr(run, "LOOK_S", 0.01)
    values = {"LOOK_S": 0.01, "_QUIET_S": 0.02, "_DYING_S": 0.0}
    for name, value in values.items():
        monkeypatch.setattr(watch, name, value)


def answer(sleepers: Sleepers, request: bytes) -> bytes:
    path = request.split(b" ", 2)[1]
    if path == b"/v1/models":
        return whole({"data": [{"max_model_len": 256}]})
    if path == b"/tetri/v1/instances":
        return whole(sleepers.table())
    if path == b"/tetri/v1/requests":
        return whole({"requests": []})
    if json.loads(request.partition(b"\r\n\r\n")[2]).get("stream"):
        event = json.dumps({"choices": [{**CHOICE, "delta": {"content": "a"}}]}).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        return head + b"data: " + event + b"\n\ndata: [DONE]\n\n"
    return whole({"choices": [CHOICE]})


def whole(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(text) + text


@asynccontextmanager
async def routers(sleepers: Sleepers) -> AsyncIterator[dict[str, Any]]:
    """What the cluster says of itself when it is ready."""
    async with AsyncExitStack() as stack:
        found = []
        for name in ROUTERS:

            async def serve(
                request: bytes,
                _: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                name: str = name,
            ) -> None:
                if sleepers.is_well(name):
                    writer.write(answer(sleepers, request))
                    await writer.drain()
                writer.close()

            server = await stack.enter_async_context(serving(serve))
            found.append({"id": name, "url": server.url})
        instances = [{"id": name} for name in INSTANCES]
        yield {"model": "m", "routers": found, "instances": instances}


def plan(**more: Any) -> Plan:
    usual = {"seconds": 2.4, "every_s": 0.3, "rest_every": 3, "stop_s": 0.05, "clients": 2}
    return Plan(**{**usual, "kinds": KINDS, "seed": 0, **more})


async def test_every_kind_hits_and_the_cluster_rests_in_between(sleepers: Sleepers) -> None:
    seen, told = Seen(), list[str]()
    async with asyncio.timeout(60), routers(sleepers) as facts:
        cluster = cast(Cluster, sleepers)
        await Soak(cluster, facts, plan(), seen, told.append).run()
    assert sorted(each.kind for each in seen.faults) == sorted([*KINDS, *KINDS])
    assert [each.faults for each in seen.rests] == [0, 3, 6, 8]
    assert all(not each.missed for each in seen.rests)
    assert len(seen.samples) == 4
    assert sleepers.starts == 4 + 4  # those that were killed
    assert seen.count(End.GOOD) > 10
    assert not seen.count(End.WRONG)
    assert any(each.again for each in seen.asked)
    kept = {each.text: each.is_kept for each in promises(seen)}
    assert kept["everything comes back and comes to rest"]
    assert kept["no answer is wrong"]


async def test_predictors_that_are_not_there_cannot_be_hit(sleepers: Sleepers) -> None:
    async with asyncio.timeout(60), routers(sleepers) as facts:
        soak = Soak(
            cast(Cluster, sleepers), facts, plan(kinds=[Kind.KILL_PREDICTOR]), Seen(), print
        )
        with pytest.raises(UnsupportedError, match="no instance has a predictor process"):
            await soak.run()
