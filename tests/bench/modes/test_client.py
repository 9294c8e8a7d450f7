"""The client: when tokens came, and what has failed."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from tests.bench.modes.fake_server import Fake
from vllm_tetri.bench.modes import client as modes_client
from vllm_tetri.bench.modes.client import Pulse, Reply, Turn


def turn(url: str, tokens: list[int], quiet_s: float = 60.0) -> Turn:
    at_s = [0.01 * place for place in range(len(tokens))]
    return Turn(url, "m", at_s, [5] * len(tokens), tokens, "seed", quiet_s)


async def played(fake: Fake, tokens: list[int]) -> list[Reply]:
    runner, url = await fake.start()
    try:
        return await modes_client.play(turn(url, tokens))
    finally:
        await runner.cleanup()


async def test_every_token_is_timed() -> None:
    fake = Fake()
    found = await played(fake, [3, 20])
    assert [len(each.gaps_us) for each in found] == [2, 19]
    assert all(0 < each.ttft_s <= each.jct_s and not each.error for each in found)
    for each in found:
        assert sum(each.gaps_us) / 1e6 == pytest.approx(each.jct_s - each.ttft_s, abs=1e-4)
    assert [len(body["prompt"]) for body in fake.bodies] == [5, 5]
    assert fake.bodies[0]["prompt"] != fake.bodies[1]["prompt"]


async def test_a_refused_request_fails_alone() -> None:
    fake = Fake()
    fake.refuse = 1
    first, second = await played(fake, [3, 3])
    assert "503" in first.error
    assert "busy" in first.error
    assert not second.error


@pytest.mark.parametrize(
    ("last_words", "complaint"),
    [
        ("data: [DONE]\n\n", "0 of 3 tokens"),
        ('data: {"usage":{"completion_tokens":2}}\n\n', "2 of 3 tokens"),
        ('data: {"error":{"message":"lost"}}\n\n', "lost"),
    ],
)
async def test_an_answer_that_is_not_whole_has_failed(last_words: str, complaint: str) -> None:
    fake = Fake()
    fake.last_words = last_words
    (found,) = await played(fake, [3])
    assert complaint in found.error


async def test_nobody_there_is_a_failure_too() -> None:
    (found,) = await modes_client.play(turn("http://127.0.0.1:9", [3]))
    assert "refused" in found.error.lower()


async def test_a_server_that_is_stuck_is_given_up() -> None:
    never = asyncio.Event()

    class Stuck(Fake):
        async def complete(self, asked: web.Request) -> web.StreamResponse:
            if (await asked.json())["max_tokens"] == 2:
                await never.wait()
            return await super().complete(asked)

    runner, url = await Stuck().start()
    try:
        fine, late = await modes_client.play(turn(url, [3, 2], quiet_s=1.0))
    finally:
        never.set()
        await runner.cleanup()
    assert not fine.error
    assert "nothing came for 1 s" in late.error


def test_a_slow_server_is_waited_for_as_long_as_something_comes() -> None:
    pulse = Pulse(quiet_s=5.0)
    assert pulse.left_s(100.0) == 5.0  # nobody waits
    pulse.sent(100.0)
    assert pulse.left_s(104.0) == 1.0
    for second in range(101, 200):
        pulse.came(second)
        assert pulse.left_s(second + 4) == 1.0
    pulse.sent(203.0)
    assert pulse.left_s(207.0) == 1.0
    assert pulse.left_s(208.0) == 0.0
    pulse.ended()
    assert pulse.left_s(208.0) == 0.0  # the other one still waits
    pulse.ended()
    assert pulse.left_s(300.0) == 5.0
