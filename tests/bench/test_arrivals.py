"""Requests of two kinds that come in phases."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from random import Random

import pytest
from aiohttp import web

from vllm_tetri.bench import arrivals
from vllm_tetri.bench.arrivals import Answered, Arrival, Kind, Length, Source
from vllm_tetri.bench.flip import command as flip
from vllm_tetri.bench.pace import Pace
from vllm_tetri.errors import ConfigError, UnsupportedError

CUT = Length(3500, 512)
PROMPTS = {Kind.CODE: 1670, Kind.CONVERSATION: 1100}  # mean tokens after the cut
RATES = {Kind.CODE: 1.3, Kind.CONVERSATION: 1.0}
SWING = [Kind.CODE, Kind.CONVERSATION] * 2


def drawn(seed: int = 0, *, phase_s: float = 60.0, **rates: float) -> list[Arrival]:
    sources = {kind: Source(kind, [], CUT) for kind in Kind}
    return arrivals.draw(SWING, phase_s, {**RATES, **rates}, sources, Random(seed))


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert drawn(1) == drawn(1) != drawn(2)


def test_arrivals_come_in_order_each_in_its_phase() -> None:
    found = drawn()
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    assert all(each.phase == int(each.at_s // 60) for each in found)


def test_each_kind_comes_at_its_rate() -> None:
    found = drawn(phase_s=5000.0)
    for phase, kind in enumerate(SWING):
        count = sum(each.phase == phase for each in found)
        assert count == pytest.approx(5000 * RATES[kind], rel=0.05)


def test_built_in_lengths_are_like_the_traces() -> None:
    for kind, prompt, prompts, answer, answers in (
        (Kind.CODE, 1470, 1670, 13, 27),
        (Kind.CONVERSATION, 1020, 1100, 129, 208),
    ):
        source, rng = Source(kind, [], CUT), Random(0)
        found = [source.draw(rng) for _ in range(10000)]
        prompt_tokens = sorted(each.prompt_tokens for each in found)
        output_tokens = sorted(each.output_tokens for each in found)
        assert prompt_tokens[5000] == pytest.approx(prompt, rel=0.05)
        assert sum(prompt_tokens) / 10000 == pytest.approx(prompts, rel=0.05)
        assert output_tokens[5000] == pytest.approx(answer, rel=0.1)
        assert sum(output_tokens) / 10000 == pytest.approx(answers, rel=0.05)
        assert prompt_tokens[-1] <= 3500
        assert 2 <= output_tokens[0] < output_tokens[-1] <= 512


def test_the_right_split_copes_and_the_wrong_one_does_not() -> None:
    pace, kv_tokens = Pace(""), 8192
    prompts_per_s = {kind: 256 / pace.step_s(256, 1000) / mean for kind, mean in PROMPTS.items()}
    batch = kv_tokens / 1300  # a prompt of 1,100 and what is written of long answers
    answers_per_s = batch / pace.step_s(round(batch), kv_tokens) / 208
    code, conversation = flip._RATES
    assert code < 0.8 * 2 * prompts_per_s[Kind.CODE]
    assert code > 1.4 * prompts_per_s[Kind.CODE]
    assert conversation < 0.8 * prompts_per_s[Kind.CONVERSATION]
    assert conversation < 0.8 * 2 * answers_per_s
    assert conversation > 1.3 * answers_per_s


def test_a_trace_gives_its_lengths_and_they_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n\n,20,900\n,7,1\n"
    )
    known = arrivals.read(path, "--code")
    assert known == [Length(4808, 10), Length(20, 900), Length(7, 1)]
    source, rng = Source(Kind.CODE, known, CUT), Random(0)
    assert {source.draw(rng) for _ in range(100)} == {
        Length(3500, 10),
        Length(20, 512),
        Length(7, 2),
    }


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no column ContextTokens"),
        (b"ContextTokens,Other\n1,2\n", "no column GeneratedTokens"),
        (b"ContextTokens,GeneratedTokens\n", "no requests"),
        (b"ContextTokens,GeneratedTokens\n1,2\n3,many\n", "line 3"),
        (b"ContextTokens,GeneratedTokens\n1\n", "line 2"),
        (b"ContextTokens,GeneratedTokens\n0,2\n", "at least 1"),
        (b"\xff", "--code"),
    ],
)
def test_a_wrong_trace_is_named(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as raised:
        arrivals.read(path, "--code")
    assert str(path) in str(raised.value)


def test_a_request_fixes_the_length_of_its_answer() -> None:
    (body,) = arrivals.bodies("model", [Arrival(0.0, 0, Length(5, 7))], Random(0))
    found = json.loads(body)
    assert len(found["prompt"]) == 5
    assert (found["max_tokens"], found["ignore_eos"]) == (7, True)


async def answered_by(tokens: int, asks: list[Arrival]) -> tuple[list[Answered], list[float]]:
    """What a server makes of it that writes so many tokens, and when it was asked."""
    asked = []

    async def complete(request: web.Request) -> web.StreamResponse:
        asked.append(time.monotonic() - started)
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})
        await answer.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        return answer

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        requests = arrivals.bodies("model", asks, Random(0))
        started = time.monotonic()
        send = arrivals.send
        found = await asyncio.to_thread(
            send, url, asks, requests, started=started, scale=0.5, limit_s=10
        )
    finally:
        await runner.cleanup()
    return found, asked


async def test_requests_are_sent_at_their_times() -> None:
    asks = [Arrival(at_s, 0, Length(3, 4)) for at_s in (0.0, 0.4, 0.2)]
    found, asked = await answered_by(4, asks)
    assert [each.arrival for each in found] == asks
    assert all(0 < each.first_s <= each.done_s for each in found)
    for at_s, due in zip(asked, (0.0, 0.1, 0.2), strict=True):
        assert at_s >= due


async def test_an_answer_of_another_length_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match="3 of 4 tokens"):
        await answered_by(3, [Arrival(0.0, 0, Length(3, 4))])
