"""The control port under thousands of malformed frames."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import zmq

from tests.control.channel import INFO
from tests.footprint import footprint
from tests.mutation import COUNTS, mutated, strange_frame
from tests.router.fakes import Cluster, cluster, eventually, pair
from vllm_tetri import messages
from vllm_tetri.messages import Dispatched, Flipped, Goodbye, Hello, LoadReport, PrefillEnding
from vllm_tetri.security import Secret
from vllm_tetri.types import (
    Flip,
    FlipStage,
    InstanceId,
    InstanceLoad,
    Prediction,
    RequestId,
    Role,
    TransferId,
)

BATCH = 100
PREFIX_BYTES = 5
EVIL = replace(INFO, id=InstanceId("evil"), models=("tiny",), identity={"model": "tiny"})
FLIP = Flip(3, Role.PREFILL, Role.DECODE, FlipStage.DONE, 1.0, 2.0, 3.0, "why", "what")
LOAD = InstanceLoad(running=3, step_s=0.1, usual_tokens=300)
GOOD = [
    messages.encode(message)
    for message in (
        Hello(EVIL),
        LoadReport(EVIL.id, 7, LOAD, False, 3, FLIP),
        Dispatched(
            RequestId("r"),
            TransferId("t"),
            InstanceId("d"),
            Prediction.of_bucket(1, 200),
            PrefillEnding(TransferId("t"), "digest", [1, 2, 3]),
        ),
        Flipped(EVIL.id, Role.DECODE, 4),
        Goodbye(EVIL.id, True, "1 request"),
    )
]


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[Cluster, list[dict[str, Any]]]]:
    """A cluster that serves, and whatever its event loop had to complain of."""
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    async with cluster(*pair(), **options) as made:
        yield made, complaints
        assert complaints == []


async def still_serves(made: Cluster) -> None:
    status, answer, _ = await made.ask()
    assert (status, answer["kind"]) == (200, "injected")
    rows = (await made.get("/tetri/v1/instances"))["instances"]
    assert {"p", "d"} <= {row["id"] for row in rows}
    assert "tetri_control_frames_dropped_total" in await made.metrics()


@asynccontextmanager
async def dealer(address: str) -> AsyncIterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        made = context.socket(zmq.DEALER)
        made.setsockopt(zmq.SNDTIMEO, 10_000)
        made.connect(address)
        yield made
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("count", COUNTS)
async def test_a_member_that_sends_malformed_frames_harms_no_other(count: int) -> None:
    """It has joined, so nothing stands between it and the router but the checks."""
    rng = Random(11)
    async with serving() as (made, _), dealer(made.control) as evil:
        counters = made.scheduler.monitor.counters
        for start in range(0, count, BATCH):
            evil.send(GOOD[0])
            for index in range(start, start + BATCH):
                frame = strange_frame(rng, GOOD[index % len(GOOD)], PREFIX_BYTES)
                parts = [frame] if rng.random() > 0.02 else [frame, b"", frame]
                await asyncio.to_thread(evil.send_multipart, parts)
            seen = counters.received.get("Goodbye", 0)
            evil.send(messages.encode(Goodbye(EVIL.id)))  # the last of the batch
            await eventually(lambda seen=seen: counters.received.get("Goodbye", 0) > seen)
            if start % (5 * BATCH) == 0:
                await still_serves(made)
        assert counters.dropped > count / 3
        await still_serves(made)
        assert len(made.scheduler.monitor.view().instances) < 100


@pytest.mark.parametrize("count", COUNTS)
async def test_unauthenticated_peers_are_dropped(count: int) -> None:
    rng, secret = Random(12), Secret(bytes(range(32)))
    greeting = bytes.fromhex("ff00000000000000017f0301") + b"CURVE".ljust(20, b"\0") + bytes(32)
    async with serving(secret=secret) as (made, _):
        await still_serves(made)
        gc.collect()
        open_before = footprint().files
        port = int(made.control.rpartition(":")[2])
        for index in range(count):
            stranger = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 10)
            with stranger:
                raw = greeting + GOOD[index % len(GOOD)]
                stranger.send(mutated(rng, raw) or b"\0")
            if index % 500 == 0:
                await still_serves(made)
        await eventually(lambda: made.scheduler.monitor.counters.dropped > 0)
        await still_serves(made)
        await eventually(lambda: footprint().files <= open_before + 2)
        assert set(made.scheduler.monitor.counters.received) <= {
            "Hello",
            "LoadReport",
            "CacheReport",
            "Dispatched",
        }
