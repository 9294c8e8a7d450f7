"""Requests that engines crashed with are refused for some time."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from tests.router.fakes import FakeInstance, eventually
from vllm_tetri.router import retry as module
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.metrics import Metrics
from vllm_tetri.router.request import ApiRequest, parse_request
from vllm_tetri.router.retry import PoisonFilter
from vllm_tetri.types import InstanceInfo, Role

PATH = "/v1/completions"


def request(prompt: str = "x", path: str = PATH) -> ApiRequest:
    return parse_request(path, b'{"prompt": "%b"}' % prompt.encode(), {})


def instance(name: str) -> InstanceInfo:
    return FakeInstance(name, Role.DECODE).info()


class Health:
    """Every instance has crashed."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    async def has_crashed(self, _: InstanceInfo) -> bool:
        await asyncio.sleep(self._delay_s)
        return True


def poison_filter(delay_s: float = 0.0) -> PoisonFilter:
    return PoisonFilter(Health(delay_s), Metrics(Mock(), Mock()))


async def test_a_request_that_two_engines_crashed_with_is_refused() -> None:
    poison = poison_filter()
    poison.record_failure(request(), instance("a"))
    assert await poison.refusal(request()) is None
    poison.record_failure(request(), instance("b"))
    assert await poison.refusal(request())
    with pytest.raises(Refusal, match="2 engines crashed") as refused:
        poison.check(request())
    assert (refused.value.status, refused.value.kind) == (500, "poison_request")
    for other in (request("y"), request(path="/v1/chat/completions")):
        poison.check(other)
        assert await poison.refusal(other) is None


async def test_a_successful_response_clears_a_request() -> None:
    poison = poison_filter()
    for name in "ab":
        poison.record_failure(request(), instance(name))
        assert await poison.refusal(request()) is None
        poison.clear(request())
    await asyncio.sleep(0.01)
    poison.check(request())
    assert len(poison.crashes) == 0


async def test_a_crash_counts_once_however_many_requests_it_failed() -> None:
    poison = poison_filter(0.02)
    for _ in range(5):
        poison.record_failure(request(), instance("a"))
    assert await poison.refusal(request()) is None
    poison.record_failure(request(), instance("a"))  # noticed later
    assert await poison.refusal(request()) is None
    poison.check(request())


async def test_a_restarted_process_of_the_same_number_counts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_RESTART_S", 0.0)
    poison = poison_filter()
    for _ in range(2):
        poison.record_failure(request(), instance("a"))
        await asyncio.sleep(0.01)
    assert await poison.refusal(request())


async def test_the_refusal_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    poison = poison_filter()
    for name in "ab":
        poison.record_failure(request(), instance(name))
    assert await poison.refusal(request())

    monkeypatch.setattr(module, "CRASHES_EXPIRE_S", 0.0)
    poison.check(request())
    assert len(poison.crashes) == 0


async def test_the_oldest_suspect_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SUSPECTS", 3)
    poison = poison_filter()
    for prompt in "vwxyz":
        for name in "ab":
            poison.record_failure(request(prompt), instance(name))
    await eventually(lambda: len(poison.crashes) == 3)
    assert await poison.refusal(request("v")) is None
    assert await poison.refusal(request("z"))
