"""What a soak makes of what it sees, and its client against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from tests.router.servers import Server, serving
from vllm_tetri.bench.soak import load
from vllm_tetri.bench.soak.client import Answer, Client, Failed, difference, loop
from vllm_tetri.bench.soak.faults import Deck, Fault, Kind, victims
from vllm_tetri.bench.soak.load import CHAT, COMPLETIONS, Request
from vllm_tetri.bench.soak.processes import name_of
from vllm_tetri.bench.soak.report import plain, show
from vllm_tetri.bench.soak.run import Seen, busy_of
from vllm_tetri.bench.soak.tally import (
    CALM,
    LASTS_S,
    Asked,
    End,
    Leftovers,
    promise_of_audits,
    promises_of_answers,
    rows,
)
from vllm_tetri.bench.soak.usage import Usage, promises_of_usage, trends

PAIRS = {
    "prefill-0": ("prefill", "ready"),
    "prefill-1": ("prefill", "ready"),
    "decode-0": ("decode", "ready"),
    "decode-1": ("decode", "ready"),
}


def asked(end: End, at_s: float, **more: Any) -> Asked:
    return Asked(end, at_s - 1, at_s, **more)


# -- faults ------------------------------------------------------------------------


def test_the_last_of_a_role_is_spared() -> None:
    assert victims(Kind.KILL_PREFILL, PAIRS) == ["prefill-0", "prefill-1"]
    alone = {**PAIRS, "prefill-1": ("prefill", "silent")}
    assert victims(Kind.STOP_PREFILL, alone) == []
    assert victims(Kind.KILL_ROUTER, alone) == ["router"]
    assert victims(Kind.KILL_ROUTER, {}) == []


def test_every_kind_comes_as_often_as_any_other_and_a_seed_decides() -> None:
    decks = [Deck(list(Kind), Random(7)) for _ in range(2)]
    drawn = [[deck.draw(PAIRS) for _ in range(2 * len(Kind))] for deck in decks]
    assert drawn[0] == drawn[1]
    kinds = [found[0] for found in drawn[0] if found]
    assert sorted(kinds) == sorted([*Kind, *Kind])


def test_what_is_not_possible_now_comes_later() -> None:
    deck = Deck([Kind.KILL_PREFILL, Kind.STOP_DECODE], Random(0))
    alone = {**PAIRS, "prefill-1": ("prefill", "silent")}
    first = deck.draw(alone)
    assert first is not None
    assert first[0] is Kind.STOP_DECODE
    assert deck.draw({}) is None
    second = deck.draw(PAIRS)
    assert second is not None
    assert second[0] is Kind.KILL_PREFILL


def test_a_victim_is_back_when_it_was_gone_and_is_ready() -> None:
    fault = Fault(Kind.KILL_DECODE, "decode-0", 10.0)
    fault.look(PAIRS, 10.5)  # the router has not noticed
    assert fault.whole_s is None
    fault.look({}, 11.0)  # nobody to ask
    assert not fault.was_gone
    fault.look({**PAIRS, "decode-0": ("decode", "silent")}, 12.0)
    fault.look(PAIRS, 20.0)
    fault.look(PAIRS, 30.0)
    assert fault.whole_s == 20.0


def test_a_router_is_back_when_it_answers() -> None:
    fault = Fault(Kind.KILL_ROUTER, "router", 10.0)
    fault.look({}, 10.5)
    fault.look(PAIRS, 13.0)
    assert fault.whole_s == 13.0


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["-m", "vllm_tetri.launch.guard", "--", "py", "serve", "--tetri-instance", "d-0"], "d-0"),
        (
            ["-m", "vllm_tetri.launch.guard", "--", "py", "-m", "vllm_tetri.cli", "router"],
            "router",
        ),
        (["-m", "vllm_tetri.launch.guard", "--", "py", "-m", "vllm_tetri.cli", "up", "m"], ""),
        (["py", "serve", "--tetri-instance", "d-0"], ""),
    ],
)
def test_a_guard_tells_whose_it_is(words: list[str], name: str) -> None:
    assert name_of(["python", *words]) == name


# -- figures -----------------------------------------------------------------------


def test_a_request_is_on_the_account_of_the_newest_fault() -> None:
    faults = [Fault(Kind.KILL_DECODE, "d", 10.0, whole_s=14.0), Fault(Kind.STOP_ROUTER, "r", 20.0)]
    found = rows(
        [
            asked(End.GOOD, 9.0, gap_s=0.5),
            asked(End.LOST, 10.0),
            asked(End.GOOD, 19.0, gap_s=2.0, again=3),
            asked(End.WRONG, 21.0),
            asked(End.LEFT, 22.0),
        ],
        faults,
    )
    by_name = {row.name: row for row in found}
    assert list(by_name) == [CALM, "kill-decode", "stop-router", "all"]
    assert (by_name[CALM].good, by_name[CALM].faults) == (1, 0)
    killed = by_name["kill-decode"]
    assert (killed.lost, killed.good, killed.again, killed.gap_s, killed.whole_s) == (
        1, 1, 3, 2.0, 4.0,
    )  # fmt: skip
    stopped = by_name["stop-router"]
    assert (stopped.wrong, stopped.left, stopped.whole_s) == (1, 1, 0.0)
    assert (by_name["all"].faults, by_name["all"].lost, by_name["all"].good) == (2, 1, 2)


def test_only_what_went_with_a_router_may_be_lost() -> None:
    faults = [Fault(Kind.KILL_ROUTER, "router", 10.0), Fault(Kind.KILL_DECODE, "d", 20.0)]
    with_router = [asked(End.GOOD, 5.0), asked(End.LOST, 11.0)]
    kept = {each.text: each for each in promises_of_answers(rows(with_router, faults))}
    assert kept["no request is lost"].is_kept
    assert kept["no request is lost"].found == "0, 1 with a router"
    without = [*with_router, asked(End.LOST, 21.0), asked(End.WRONG, 22.0), asked(End.ERROR, 23.0)]
    broken = [each.text for each in promises_of_answers(rows(without, faults)) if not each.is_kept]
    assert broken == [
        "no request is lost",
        "no answer ends with an error",
        "no answer is wrong",
    ]


def test_a_soak_without_an_answer_kept_nothing() -> None:
    assert not promises_of_answers(rows([], []))[-1].is_kept


def test_only_leftovers_that_stay_break_a_promise() -> None:
    leftovers = Leftovers()
    leftovers.note({"d": ["3 blocks"], "p": []}, 0.0)
    leftovers.note({"d": ["4 blocks"]}, LASTS_S - 0.1)
    assert promise_of_audits(leftovers).is_kept
    assert promise_of_audits(leftovers).found == "nothing (for less than 5 s: d: blocks)"
    leftovers.note({"d": ["4 blocks"]}, LASTS_S)
    assert not promise_of_audits(leftovers).is_kept
    assert promise_of_audits(leftovers).found == "d: blocks"


def test_leftovers_that_come_and_go_or_wait_for_somebody_stopped_do_not_stay() -> None:
    leftovers = Leftovers()
    leftovers.note({"d": ["3 blocks"]}, 0.0)
    leftovers.note({"d": []}, 3.0)
    leftovers.note({"d": ["3 blocks"]}, 6.0)
    leftovers.excuse()
    leftovers.note({"d": ["3 blocks"]}, 12.0)
    assert leftovers.stayed == set()


def usage(minute: float, processes: int = 10, **more: int) -> Usage:
    usual = {"rss_bytes": 1 << 30, "descriptors": 500, "threads": 200, "shared_bytes": 1 << 28}
    return Usage(at_s=60 * minute, processes=processes, **{**usual, **more})


def test_slopes_leave_out_times_when_somebody_was_missing() -> None:
    samples = [usage(0), usage(1, processes=9, descriptors=9), usage(2, descriptors=700)]
    found = {each.name: each for each in trends(samples)}
    descriptors = found["file descriptors"]
    assert (descriptors.start, descriptors.end) == (500, 700)
    assert descriptors.per_minute == pytest.approx(100)
    assert found["threads"].per_minute == 0


@pytest.mark.parametrize(
    ("last", "broken"),
    [
        (usage(30), None),
        (usage(30, descriptors=540), None),
        (usage(30, descriptors=541), "file descriptors: no growth"),
        (usage(30, threads=221), "threads: no growth"),
        (usage(30, shared_bytes=(1 << 28) + 1), "/dev/shm (MiB): no growth"),
        (usage(30, rss_bytes=3 << 29), "memory (MiB): no growth"),
    ],
)
def test_growth_breaks_a_promise(last: Usage, broken: str | None) -> None:
    found = promises_of_usage([usage(0), last])
    assert [each.text for each in found if each.is_kept is False] == ([broken] if broken else [])


def test_memory_is_not_judged_after_a_short_time() -> None:
    found = promises_of_usage([usage(0), usage(3, rss_bytes=3 << 29)])
    assert [each.text for each in found if each.is_kept is None] == ["memory (MiB): no growth"]


def test_the_table_says_what_was_broken() -> None:
    seen = Seen(asked=[asked(End.GOOD, 1.0), asked(End.ERROR, 12.0, words="HTTP 502 it broke")])
    seen.faults.append(Fault(Kind.KILL_DECODE, "decode-0", 10.0, whole_s=12.5))
    seen.samples += [usage(0), usage(1)]
    console = Console(width=150, record=True, quiet=False, force_terminal=False)
    with console.capture() as shown:
        assert not show(console, seen)
    text = shown.get()
    assert "BROKEN" in text
    assert "1 × error: HTTP 502 it broke" in text
    found = plain(seen, {"seed": 0})
    assert json.loads(json.dumps(found))["faults"][0]["whole_s"] == 2.5


def test_what_is_busy_is_named() -> None:
    table = {
        "d": {"state": "ready", "running": 0, "held": 2},
        "gone": {"state": "silent", "running": 5},
    }
    assert busy_of(table) == ["d: held 2"]


# -- requests ----------------------------------------------------------------------


def test_requests_have_every_shape_that_fits_the_window() -> None:
    found = load.requests("m", 2048, Random(0))
    assert {each.path for each in found} == {CHAT, COMPLETIONS}
    assert len(found) == 20
    assert len(load.requests("m", 256, Random(0))) == 10  # of prompts of up to 150 tokens
    assert found[0].streamed().body == {**found[0].body, "stream": True}
    assert found == load.requests("m", 2048, Random(0))


# -- the client --------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
GOOD = Answer("ab", [1, 2])
STREAM = [
    b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n',
    b'data: {"choices": [{"text": "b", "token_ids": [2]}]}\n\n',
    b"data: [DONE]\n\n",
]
ASK = Request(COMPLETIONS, {"model": "m", "prompt": [1]})


def message(status: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status.encode(), b"Content-Type: application/json", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


def whole(text: str, token_ids: list[int]) -> bytes:
    return message(
        "200 OK", json.dumps({"choices": [{"text": text, "token_ids": token_ids}]}).encode()
    )


ERROR = b'{"error": {"message": "it broke", "code": 502}}'
FULL = message("503 Service Unavailable", ERROR, b"Retry-After: 1")


@asynccontextmanager
async def answering(*answers: bytes, **options: Any) -> AsyncIterator[tuple[Client, Server]]:
    """A client of a server that gives these answers in turn, the last one again and again,
    and closes each connection."""
    left = list(answers)

    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()
        writer.close()

    async with serving(serve) as server:
        client = Client(server.url, **options)
        try:
            yield client, server
        finally:
            await client.close()


@pytest.mark.parametrize(
    ("request_", "answer", "end"),
    [
        (ASK, whole("ab", [1, 2]), End.GOOD),
        (ASK.streamed(), HEAD + b"".join(STREAM), End.GOOD),
        (ASK, whole("ab", [1, 3]), End.WRONG),
        (ASK, whole("ax", [1, 2]), End.WRONG),
        (ASK.streamed(), HEAD + STREAM[0] + STREAM[2], End.WRONG),
        (ASK.streamed(), HEAD + b"".join(STREAM[:2]), End.LOST),
        (ASK.streamed(), HEAD + STREAM[0] + b"data: " + ERROR + b"\n\n", End.ERROR),
        (ASK, message("502 Bad Gateway", ERROR), End.ERROR),
        (ASK, message("500 Internal Server Error", b"oops"), End.LOST),
        (ASK, whole("ab", [1, 2])[:-5], End.LOST),
        (ASK, b"", End.LOST),
        (ASK, message("200 OK", b"{}"), End.LOST),
    ],
)
async def test_every_end_has_a_name(request_: Request, answer: bytes, end: End) -> None:
    async with answering(answer) as (client, _):
        found = await client.ask(request_, GOOD)
        assert found.end is end, found.words
        assert bool(found.words) == (end is not End.GOOD)


async def test_a_client_comes_again_when_it_is_told_to() -> None:
    async with answering(FULL, FULL, whole("ab", [1, 2])) as (client, server):
        found = await client.ask(ASK, GOOD)
        assert (found.end, found.again, len(server.requests)) == (End.GOOD, 2, 3)


async def test_a_client_does_not_come_again_for_ever() -> None:
    async with answering(FULL, patience_s=0.0) as (client, _):
        found = await client.ask(ASK, GOOD)
        assert (found.end, "it broke" in found.words) == (End.ERROR, True)


async def test_nobody_to_ask_is_a_reason_to_come_again() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    client = Client(url, patience_s=0.5)
    found = await client.ask(ASK, GOOD)
    assert (found.end, found.again > 0) == (End.LOST, True)
    assert await client.get("/tetri/v1/instances") is None
    with pytest.raises(Failed, match="nobody listens"):
        await client.answer(ASK)
    await client.close()


async def test_a_client_may_leave_and_an_answer_may_be_too_late() -> None:
    async def hang(_: bytes, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client has gone

    async with serving(hang) as server:
        client = Client(server.url, limit_s=0.1)
        assert (await client.ask(ASK, GOOD, leaves_after_s=0.01)).end is End.LEFT
        late = await client.ask(ASK, GOOD)
        assert (late.end, "no answer within 0.1 s" in late.words) == (End.LOST, True)
        await client.close()


async def test_silence_of_a_stream_is_measured() -> None:
    async def serve(_: bytes, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + STREAM[0])
        await asyncio.sleep(0.2)
        writer.write(b"".join(STREAM[1:]))
        await writer.drain()
        writer.close()

    async with serving(serve) as server:
        client = Client(server.url)
        found = await client.ask(ASK.streamed(), GOOD)
        assert found.end is End.GOOD
        assert found.gap_s >= 0.2
        await client.close()


async def test_clients_ask_until_it_is_over() -> None:
    seen: list[Asked] = []
    async with answering(whole("ab", [1, 2])) as (client, _):
        await loop(client, [(ASK, GOOD)], Random(0), seen.append, lambda: len(seen) >= 5)
    assert len(seen) == 5


def test_a_difference_has_a_place() -> None:
    assert difference(Answer("", [1, 2, 4]), Answer("", [1, 2, 3, 4])) == (
        "3 tokens instead of 4, equal up to token 2"
    )


# -- options -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--minutes", "0"], "--minutes 0"),
        (["--faults", "kill-cat"], "--faults kill-cat"),
        (["--prefill", "1"], "--prefill 1"),
        (["--clients", "0"], "--clients 0"),
    ],
)
def test_wrong_options_are_refused_at_once(
    refuses: Callable[[list[str], str], None], words: list[str], option: str
) -> None:
    refuses(["soak", "model", *words], option)


def test_one_instance_of_a_role_is_enough_when_none_is_hit(
    refuses: Callable[[list[str], str], None], tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    words = ["--prefill", "1", "--faults", "kill-decode", "--output", str(blocked / "x")]
    refuses(["soak", "model", *words], "--output")
