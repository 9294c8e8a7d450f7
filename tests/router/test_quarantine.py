"""Requests that engines died with: who is accused, who is in, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from tests.router.fakes import FakeInstance, eventually
from vllm_tetri.router import quarantine as module
from vllm_tetri.router.answers import Refusal
from vllm_tetri.router.call import Call, parse_call
from vllm_tetri.router.fault_metrics import FaultMetrics
from vllm_tetri.router.quarantine import Quarantine
from vllm_tetri.types import InstanceInfo, Role

PATH = "/v1/completions"


def call(prompt: str = "x", path: str = PATH) -> Call:
    return parse_call(path, b'{"prompt": "%b"}' % prompt.encode(), {})


def instance(name: str) -> InstanceInfo:
    return FakeInstance(name, Role.DECODE).info()


def quarantine(has_crashed: Callable[[InstanceInfo], Awaitable[bool]]) -> Quarantine:
    return Quarantine(has_crashed, FaultMetrics(CollectorRegistry()))


async def yes(_: InstanceInfo) -> bool:
    return True


async def no(_: InstanceInfo) -> bool:
    return False


async def test_two_engines_that_died_with_it_are_enough() -> None:
    asked = quarantine(yes)
    asked.accuse(call(), instance("a"))
    assert not await asked.holds(call())
    asked.accuse(call(), instance("b"))
    assert await asked.holds(call())
    with pytest.raises(Refusal, match="2 engines died") as refused:
        asked.check(call())
    assert (refused.value.status, refused.value.code) == (500, "quarantined")
    for other in (call("y"), call(path="/v1/chat/completions")):
        asked.check(other)
        assert not await asked.holds(other)


async def test_one_that_was_answered_in_between_is_innocent() -> None:
    asked = quarantine(yes)
    for name in "ab":
        asked.accuse(call(), instance(name))
        assert not await asked.holds(call())
        asked.acquit(call())
    await asyncio.sleep(0.01)
    asked.check(call())
    assert len(asked) == 0


async def test_engines_that_live_or_left_are_no_evidence() -> None:
    asked = quarantine(no)
    for name in "abc":
        asked.accuse(call(), instance(name))
        assert not await asked.holds(call())
    await eventually(lambda: not len(asked))


async def test_one_engine_is_one_however_many_requests_say_so() -> None:
    asks = 0

    async def slowly(_: InstanceInfo) -> bool:
        nonlocal asks
        asks += 1
        await asyncio.sleep(0.05)
        return True

    asked = quarantine(slowly)
    for _ in range(5):
        asked.accuse(call(), instance("a"))
        asked.accuse(call("y"), instance("a"))
    await asyncio.sleep(0.1)
    assert asks == 1
    asked.accuse(call(), instance("a"))  # one that was slower to notice
    await asyncio.sleep(0.1)
    assert not await asked.holds(call())
    asked.check(call())


async def test_a_process_that_came_back_under_its_number_counts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_RESTART_S", 0.0)
    asked = quarantine(yes)
    for _ in range(2):
        asked.accuse(call(), instance("a"))
        await asyncio.sleep(0.01)
    assert await asked.holds(call())


async def test_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRY_S", 0.1)
    asked = quarantine(yes)
    for name in "ab":
        asked.accuse(call(), instance(name))
    assert await asked.holds(call())

    def is_free() -> bool:
        try:
            asked.check(call())
        except Refusal:
            return False
        return True

    await asyncio.to_thread(lambda: None)
    await eventually(is_free)
    assert len(asked) == 0


async def test_the_oldest_is_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CASES", 3)
    asked = quarantine(yes)
    for prompt in "vwxyz":
        for name in "ab":
            asked.accuse(call(prompt), instance(name))
    assert len(asked) == 3
    await asyncio.sleep(0.01)
    assert not await asked.holds(call("v"))
    assert await asked.holds(call("z"))


async def test_what_is_being_found_out_ends_with_it() -> None:
    async def never(_: InstanceInfo) -> bool:
        await asyncio.sleep(60)
        return True

    asked = quarantine(never)
    asked.accuse(call(), instance("a"))
    async with asyncio.timeout(5):
        await asked.close()
    await eventually(lambda: not len(asked))
