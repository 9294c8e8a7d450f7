"""Agents and a monitor over real sockets on the loopback interface, and ways to watch them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from vllm_tetri.control.agent import Agent
from vllm_tetri.control.monitor import Monitor
from vllm_tetri.messages import Dispatched, OfRequest, ToEngine
from vllm_tetri.security import Secret
from vllm_tetri.types import (
    ClusterView,
    Flip,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    RequestId,
    Role,
    TransferId,
)

PERIOD_S = 0.02
INFO = InstanceInfo(
    InstanceId("i"), "http://127.0.0.1:1", Role.BOTH, ("m",), "127.0.0.1:2", {"a": "b"}, 9,
    16, 1, "0",
)  # fmt: skip
DISPATCHED = Dispatched(RequestId("r"), TransferId("t"), InstanceId("d"))


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


class FakeEngine:
    """What an agent asks of an engine; each option replaces one method."""

    def __init__(self, **options: Callable[..., Any]) -> None:
        self.taken: list[ToEngine] = []
        self.abandoned: list[str] = []
        self.drained = threading.Event()
        self.busy = True
        for name, method in options.items():
            assert hasattr(FakeEngine, name)
            setattr(self, name, method)

    def read_load(self) -> InstanceLoad:
        return InstanceLoad(running=1)

    def read_cache(self, seq: int, *, is_all: bool) -> None: ...

    def unfinished(self, role: Role) -> str:
        return ""

    def is_idle(self) -> bool:
        return not self.busy

    def take(self, message: ToEngine) -> None:
        self.taken.append(message)

    def abandon(self, router: str) -> None:
        self.abandoned.append(router)

    def on_drained(self) -> None:
        self.drained.set()


class FakeRouter:
    """What a monitor asks of a router."""

    def __init__(self) -> None:
        self.hellos: list[InstanceInfo] = []
        self.dispatched: list[OfRequest] = []
        self.cut_off: list[InstanceId] = []
        self.flips: list[tuple[InstanceId, Flip]] = []
        self.in_flight = self.endings = 0

    def on_hello(self, info: InstanceInfo) -> None:
        self.hellos.append(info)

    def on_published(self, instance: InstanceId, message: OfRequest) -> None:
        self.dispatched.append(message)

    def on_cut_off(self, instance: InstanceId) -> None:
        self.cut_off.append(instance)

    def on_flip(self, instance: InstanceId, flip: Flip) -> None:
        self.flips.append((instance, flip))

    def on_ending(self) -> None:
        self.endings += 1

    def num_reaching(self, instance: InstanceId) -> int:
        return self.in_flight


class Joined:
    """An agent and its engine."""

    def __init__(
        self,
        *addresses: str,
        info: InstanceInfo = INFO,
        secret: Secret | None = None,
        **engine: Callable[..., Any],
    ) -> None:
        self.engine = FakeEngine(**{"is_idle": lambda: True, **engine})
        self.agent = Agent(addresses, info, self.engine, period_s=PERIOD_S, secret=secret)
        self.agent.start()

    async def close(self) -> None:
        await asyncio.to_thread(self.agent.close)

    @property
    def view(self) -> ClusterView:
        return self.agent.snapshot().view

    def sees(self) -> list[tuple[str, str]]:
        return [(each.info.id, each.state) for each in self.view.instances]


@asynccontextmanager
async def monitor(
    bind: str = "tcp://127.0.0.1:0",
    name: str = "router",
    side: FakeRouter | None = None,
    secret: Secret | None = None,
) -> AsyncIterator[Monitor]:
    made = Monitor(
        bind, name, side or FakeRouter(), period_s=PERIOD_S, silent_after_s=0.3, secret=secret
    )
    made.start()
    try:
        yield made
    finally:
        made.close()
        made.close()


@asynccontextmanager
async def joined(*addresses: str, **options: Any) -> AsyncIterator[Joined]:
    made = Joined(*addresses, **options)
    try:
        yield made
    finally:
        await made.close()
        await made.close()


def states(made: Monitor) -> dict[str, str]:
    return {each.info.id: each.state.value for each in made.view().instances}
