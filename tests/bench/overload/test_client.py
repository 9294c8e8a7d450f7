"""The client of an overload against servers of every kind."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.router.servers import Serve, says, serving
from vllm_tetri.bench.overload.client import play
from vllm_tetri.bench.overload.talker import Talker
from vllm_tetri.bench.overload.turn import End, Reply, Turn
from vllm_tetri.errors import UnsupportedError

ANSWER_TOKENS = 3
STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


WHOLE = [STREAM, chunk(TOKEN), chunk(TOKEN), chunk(TOKEN), chunk(LAST), b"0\r\n\r\n"]


def refusal(status: bytes, headers: bytes = b"", body: bytes = b'{"error":{}}') -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n%b\r\n%b" % (status, len(body), headers, body)


def turn(url: str, count: int = 1, **more: Any) -> Turn:
    return Turn(
        url=url,
        model="m",
        prompt_tokens=5,
        answer_tokens=ANSWER_TOKENS,
        seed="seed",
        at_s=[0.01 * place for place in range(count)],
        **{"limit_s": 10.0, **more},
    )


async def replies(serve: Serve, count: int = 1, **more: Any) -> list[Reply]:
    async with serving(serve) as server, asyncio.timeout(30):
        return (await play(turn(server.url, count, **more))).replies


async def test_whole_answers_are_served_and_timed() -> None:
    found = await replies(says(*WHOLE), 3)
    assert [each.end for each in found] == [End.SERVED] * 3
    assert [each.at_s for each in found] == [0.0, 0.01, 0.02]
    assert all(0 < each.first_s <= each.done_s for each in found)


async def test_pieces_of_any_size_are_the_same_answer() -> None:
    raw = b"".join(WHOLE)

    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for place in range(len(raw)):
            writer.write(raw[place : place + 1])
            await writer.drain()
            await asyncio.sleep(0)

    (found,) = await replies(serve)
    assert found.end is End.SERVED


@pytest.mark.parametrize("status", [b"503 Service Unavailable", b"429 Too Many Requests"])
async def test_a_refusal_says_when_to_come_again(status: bytes) -> None:
    (found,) = await replies(says(refusal(status, b"Retry-After: 7\r\n")))
    assert (found.end, found.retry_after_s, found.words) == (End.REFUSED, 7, "")
    assert found.done_s > 0


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ([refusal(b"503 Service Unavailable")], "without a Retry-After"),
        ([refusal(b"429 Too Many", b"Retry-After: 0\r\n")], "without a Retry-After"),
        ([refusal(b"429 Too Many", b"Retry-After: 61\r\n")], "without a Retry-After"),
        ([refusal(b"429 Too Many", b"Retry-After: 3\r\n", b"no")], "without an error: no"),
        ([refusal(b"500 Oops", b"Retry-After: 3\r\n")], '500 {"error":{}}'),
        ([STREAM, chunk(TOKEN), chunk(LAST.replace(b"3", b"2")), b"0\r\n\r\n"], "2 of 3 tokens"),
        ([STREAM, chunk(TOKEN), b"0\r\n\r\n"], "0 of 3 tokens"),
        ([STREAM, chunk(TOKEN), chunk(b'data: {"error": "lost"}\n\n')], "lost"),
        ([b"nonsense\r\n\r\n"], "no HTTP"),
        ([b"x" * 70_000], "a head without an end"),
    ],
)
async def test_anything_else_is_bad(parts: list[bytes], complaint: str) -> None:
    (found,) = await replies(says(*parts))
    assert found.end is End.BAD
    assert complaint in found.words


@pytest.mark.parametrize("parts", [[], WHOLE[:1], WHOLE[:3], [refusal(b"503 Busy")[:-1]]])
async def test_an_answer_that_breaks_off_is_bad(parts: list[bytes]) -> None:
    (found,) = await replies(says(*parts, ends=True))
    assert found.end is End.BAD
    assert "connection lost" in found.words


async def test_a_server_that_is_stuck_is_left() -> None:
    (found,) = await replies(says(*WHOLE[:2]), limit_s=0.2)
    assert (found.end, found.words) == (End.BAD, "no answer within 0.2 s")


async def test_nobody_there_is_bad_too() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        (found,) = (await play(turn(url))).replies
    assert found.end is End.BAD
    assert "refused" in found.words.lower()


async def test_requests_are_complete_and_each_has_its_client_s_key() -> None:
    async with serving(says(*WHOLE)) as server:
        await play(turn(server.url, 3, keys=["greedy", "modest"], whose=[0, 1, 0]))
        heads, bodies = zip(*(each.split(b"\r\n\r\n", 1) for each in server.requests), strict=True)
    keys = Counter(
        line for head in heads for line in head.split(b"\r\n") if line.startswith(b"Auth")
    )
    assert keys == {b"Authorization: Bearer greedy": 2, b"Authorization: Bearer modest": 1}
    prompts = [json.loads(body) for body in bodies]
    assert all(len(each["prompt"]) == 5 and each["max_tokens"] == 3 for each in prompts)
    assert len({str(each["prompt"]) for each in prompts}) == 3


async def test_clients_without_a_pause_have_one_request_each() -> None:
    under_way, most = 0, 0

    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        writer.write(b"".join(WHOLE))

    async with serving(serve) as server:
        asked = turn(server.url, 0, clients=4, seconds=0.3)
        played = await play(asked)
    assert most == 4
    assert len(played.replies) > 4
    assert {each.end for each in played.replies} == {End.SERVED}
    assert all(each.at_s < 0.3 for each in played.replies)


async def test_the_process_plays_and_ends(tmp_path: Path) -> None:
    talker = Talker(tmp_path / "client.log")
    try:
        async with serving(says(*WHOLE)) as server, asyncio.timeout(60):
            played = await talker.play(turn(server.url, 2))
        assert [each.end for each in played.replies] == [End.SERVED] * 2
        assert played.took_s > 0
        talker._child.terminate()
        with pytest.raises(UnsupportedError, match="the client ended"):
            await talker.play(turn("http://127.0.0.1:9"))
    finally:
        talker.close()
