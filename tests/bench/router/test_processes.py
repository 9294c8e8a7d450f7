"""The router benchmark's client against its instances, mostly without a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.router.fakes import eventually, router
from vllm_tetri.bench.router.client import Turn, play
from vllm_tetri.bench.router.stub import Arrivals, Pacer, Stub
from vllm_tetri.bench.router.systems import PAIR_HEADERS
from vllm_tetri.router.scheduler import GlobalScheduler
from vllm_tetri.types import InstanceState, Role

NOBODY = "tcp://127.0.0.1:9"


@asynccontextmanager
async def stub(
    role: Role = Role.BOTH, control: str = NOBODY, arrivals: Arrivals | None = None
) -> AsyncIterator[tuple[str, Pacer]]:
    pacer = Pacer()
    made = Stub(role, role, 10, pacer, arrivals or Arrivals())
    url = await made.start(control)
    try:
        yield url, pacer
    finally:
        await made.close()


async def test_requests_are_timed_beside_streams_that_flow() -> None:
    async with stub() as (url, _):
        found = await play(Turn(url, streams=3, step_s=0.005, requests=4))
    assert len(found.first_s) == len(found.second_s) == 4
    assert all(first > 0 for first in found.first_s)
    assert found.events > 0


async def test_both_legs_are_asked_one_after_the_other() -> None:
    async with stub(Role.PREFILL) as (prefill, _), stub(Role.DECODE) as (decode, _):
        found = await play(Turn(prefill, decode_url=decode, streams=2, step_s=0.005, requests=4))
    assert len(found.first_s) == len(found.second_s) == 4
    assert all(0 < a < b for a, b in zip(found.first_s, found.second_s, strict=True))


@pytest.mark.parametrize("step_s", [0.0, 0.001])
async def test_streams_flow_until_the_client_leaves(step_s: float) -> None:
    async with stub() as (url, pacer):
        found = await play(Turn(url, streams=3, step_s=step_s, seconds=0.2))
        assert found.events > 0
        async with asyncio.timeout(10):
            while pacer.num_streams:
                await asyncio.sleep(0.01)


async def test_a_loop_counts_whole_answers() -> None:
    async with stub() as (url, _):
        found = await play(Turn(url, streams=2, loops=True, seconds=0.05))
    assert found.events > 0
    assert found.took_s >= 0.05


async def test_an_answer_without_the_expected_head_is_no_measurement() -> None:
    turn = Turn("", requests=1, headers="x-tetri-prefill: prefill")
    async with stub() as (url, _):
        with pytest.raises(ConnectionError):
            await play(replace(turn, url=url))


async def test_the_router_takes_the_instances_for_a_pair() -> None:
    async with router() as (scheduler, url):
        pair = (scheduler.monitor.address, Arrivals())
        async with stub(Role.PREFILL, *pair), stub(Role.DECODE, *pair) as (_, pacer):
            await eventually(lambda: len(_ready(scheduler)) == 2)
            turn = Turn(url, headers=PAIR_HEADERS, streams=3, step_s=0.001, requests=4)
            found = await play(turn)
            assert len(found.second_s) == 4
            assert all(0 < a <= b for a, b in zip(found.first_s, found.second_s, strict=True))
            await eventually(lambda: not pacer.num_streams)
            looped = await play(replace(turn, requests=0, loops=True, seconds=0.05))
            assert looped.events > 0
            assert b"tetri_fallbacks_total{" not in scheduler.metrics.render()


def _ready(scheduler: GlobalScheduler) -> list[str]:
    view = scheduler.monitor.view()
    return [each.info.id for each in view.instances if each.state is InstanceState.READY]
