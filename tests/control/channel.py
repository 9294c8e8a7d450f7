"""Agents and a monitor over real sockets on the loopback interface, and ways to watch them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from vllm_tetri.control.agent import Agent
from vllm_tetri.control.monitor import Monitor
from vllm_tetri.messages import Dispatched
from vllm_tetri.types import (
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    RequestId,
    Role,
    TransferId,
)

PERIOD_S = 0.02
INFO = InstanceInfo(
    InstanceId("i"),
    "http://127.0.0.1:1",
    Role.BOTH,
    ("m",),
    "127.0.0.1:2",
    {"a": "b"},
    9,
    16,
    1,
    "0",
)
DISPATCHED = Dispatched(RequestId("r"), TransferId("t"), InstanceId("d"), "why")


async def eventually(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


class Joined:
    """An agent with everything that it was told."""

    def __init__(self, *addresses: str, info: InstanceInfo = INFO, **options: Any) -> None:
        self.cancelled: list[TransferId] = []
        defaults = {
            "read_load": lambda: InstanceLoad(running=1),
            "on_cancel": self.cancelled.append,
        }
        self.agent = Agent(
            routers=addresses, info=info, period_s=PERIOD_S, **{**defaults, **options}
        )
        self.agent.start()

    async def close(self) -> None:
        await asyncio.to_thread(self.agent.close)

    def sees(self) -> list[tuple[str, str]]:
        return [(each.info.id, each.state) for each in self.agent.view().instances]


@asynccontextmanager
async def monitor(
    bind: str = "tcp://127.0.0.1:0", name: str = "router", **options: Any
) -> AsyncIterator[Monitor]:
    made = Monitor(bind, name, period_s=PERIOD_S, **{"silent_after_s": 0.3, **options})
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
