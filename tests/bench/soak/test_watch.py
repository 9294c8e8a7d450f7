"""What a soak notes of routers that come and go, without a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import psutil
import pytest

from tests.router.servers import serving
from vllm_tetri.bench.soak import watch
from vllm_tetri.bench.soak.client import Client
from vllm_tetri.bench.soak.cluster import Cluster
from vllm_tetri.bench.soak.faults import Fault, Kind
from vllm_tetri.bench.soak.watch import Seen, Watch

PREDICTOR = "p's predictor"


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "role": "prefill", "state": "ready", "leftovers": [], **more}


@dataclass
class World:
    """What two routers say; a router that is None does not answer."""

    routers: list[list[dict[str, Any]] | None]
    requests: int = 0
    members: dict[str, list[psutil.Process]] = field(default_factory=dict)

    async def serve(self, router: int, request: bytes, writer: asyncio.StreamWriter) -> None:
        rows = self.routers[router]
        if rows is not None:
            is_table = b"/tetri/v1/requests" in request
            found = {"requests": [{}] * self.requests} if is_table else {"instances": rows}
            body = json.dumps(found).encode()
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            )
            writer.write(head % len(body) + body)
            await writer.drain()
        writer.close()


class _Cluster:
    """Has the processes that its world says; this one is as large as any."""

    def __init__(self, world: World) -> None:
        self._world = world

    def members(self) -> dict[str, list[psutil.Process]]:
        return self._world.members

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process()]

    def is_running(self) -> bool:
        return True


@asynccontextmanager
async def watching(world: World, seen: Seen) -> AsyncIterator[Watch]:
    async with AsyncExitStack() as stack:
        urls = {}
        for index in range(len(world.routers)):

            async def serve(
                request: bytes,
                _: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                index: int = index,
            ) -> None:
                await world.serve(index, request, writer)

            urls[f"router-{index}"] = (await stack.enter_async_context(serving(serve))).url
        client = Client(urls)
        stack.push_async_callback(client.close)
        yield Watch(cast(Cluster, _Cluster(world)), client, seen, {"p"})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOK_S": 0.01, "_REST_S": 0.1, "_WHOLE_S": 0.1, "_QUIET_S": 0.02}.items():
        monkeypatch.setattr(watch, name, value)


async def test_a_rest_is_noted_with_a_sample() -> None:
    seen = Seen()
    async with watching(World([[row("p")], [row("p")]]), seen) as watched:
        await watched.rest()
    assert [each.missed for each in seen.rests] == [()]
    assert len(seen.samples) == 1


@pytest.mark.parametrize(
    ("world", "missed"),
    [
        (World([[row("p")], None]), "router-1 does not answer"),
        (World([[row("p")], [row("p", state="silent")]]), "p is not ready for router-1"),
        (World([[row("p", running=2)], [row("p", running=2)]]), "p: running 2"),
        (World([[row("p")], [row("p")]], requests=3), "router-0: 3 requests"),
    ],
)
async def test_what_is_not_back_or_not_at_rest_is_named_and_no_sample(
    world: World, missed: str
) -> None:
    seen = Seen()
    async with watching(world, seen) as watched:
        await watched.rest()
    assert missed in seen.rests[0].missed
    assert not seen.samples


async def test_a_predictor_has_to_come_back() -> None:
    seen, world = Seen(), World([[row("p")]], members={PREDICTOR: [psutil.Process()]})
    fault = Fault(Kind.KILL_PREDICTOR, PREDICTOR, at_s=0.0, was_gone=True)
    async with watching(world, seen) as watched:
        assert await watched.find_predictors() == [PREDICTOR]
        process, world.members = world.members[PREDICTOR], {}
        seen.faults.append(fault)
        await watched.rest()
        assert seen.rests[0].missed == (f"{PREDICTOR} does not run",)
        assert fault.whole_s is None
        world.members = {PREDICTOR: process}
        await watched.rest()
        assert seen.rests[1].missed == ()
        assert fault.whole_s is not None


async def test_leftovers_are_noted_as_long_as_nobody_is_stopped() -> None:
    busy = row("d", leftovers=["3 names"], running=1)  # what it said before that came
    seen, world = Seen(), World([None, [row("p", leftovers=["2 blocks"]), busy]])
    async with watching(world, seen) as watched:
        watched.is_stopping = True
        await watched.look()
        assert not seen.leftovers.brief
        watched.is_stopping = False
        await watched.look()
        assert seen.leftovers.brief == {"p: blocks"}
