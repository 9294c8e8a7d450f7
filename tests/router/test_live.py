"""The page at `/`, and the events that it shows."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from tests.router.fakes import (
    Cluster,
    begin,
    both,
    cluster,
    door,
    eventually,
    held_back,
    let_go,
    pair,
)
from tests.router.raw import post, read_answer
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.router import live
from vllm_tetri.router.auth import Limits
from vllm_tetri.router.history import Ended
from vllm_tetri.types import InstanceId, RequestId

PERIOD_S = 0.05
EVENTS = "/tetri/v1/events"
HEAD = b"GET /tetri/v1/events HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_S", PERIOD_S)
    monkeypatch.setattr(live, "BIN_S", 0.2)


async def snapshots(made: Cluster) -> AsyncIterator[dict[str, Any]]:
    """What a page that is open gets."""
    async with asyncio.timeout(20), made.client.get(made.url + EVENTS) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def some(made: Cluster, count: int) -> list[dict[str, Any]]:
    """That many snapshots, one after the other; the page is closed then."""
    found = []
    async with aclosing(snapshots(made)) as events:
        async for each in events:
            found.append(each)
            if len(found) == count:
                break
    return found


async def shown(made: Cluster, condition: Any) -> dict[str, Any]:
    """The first snapshot for which a condition holds."""
    async with aclosing(snapshots(made)) as events:
        async for each in events:
            if condition(each):
                return each
    raise AssertionError("the stream ended")


async def test_the_page_needs_no_key_and_allows_nothing_but_itself() -> None:
    async with cluster(both(), keys=("k",)) as made, made.client.get(made.url + "/") as response:
        assert response.status == 200
        assert response.content_type == "text/html"
        policy, text = response.headers["Content-Security-Policy"], await response.text()
    rules = dict(each.strip().split(" ", 1) for each in policy.split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (source,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert re.findall(r'(?:src|href)="(?!data:,)', text) == []
    assert not re.search(r'\b(?:style|on\w+)="', text)  # which the policy forbids


async def test_events_need_a_key() -> None:
    async with cluster(both(), keys=("k",)) as made:
        for key, status in (("", 401), ("x", 401), ("k", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            async with made.client.get(made.url + EVENTS, headers=headers) as response:
                assert response.status == status
                if status == 401:
                    assert "known key" in (await response.json())["error"]["message"]


async def test_a_snapshot_shows_instances_and_requests() -> None:
    prefill, decode = pair()
    async with cluster(*held_back(prefill), decode) as made:
        await made.report("d", running=3, blocks_used=10)
        asks = await begin(made, 2)
        found = await shown(made, lambda each: each["in_flight"] == 2)
        let_go(prefill)
        await asyncio.gather(*asks)
        rows = {each["id"]: each for each in found["instances"]}
        assert (rows["p"]["role"], rows["p"]["in_flight"]) == ("prefill", 2)
        assert (rows["d"]["running"], rows["d"]["blocks_used"]) == (3, 10)
        assert found["phases"] == {"prefilling": 2}
        assert [each["prefill"] for each in found["requests"]] == ["p", "p"]
        assert found["mode"] == "split"
        assert found["objective"] == {"ttft_s": None, "tpot_s": None}
        await shown(made, lambda each: sum(each["bins"]["served"]) == 2 and not each["in_flight"])


async def test_a_refusal_is_shown_with_its_reason_and_those_of_one_kind_as_one() -> None:
    async with cluster(both(), max_in_flight_each=1) as made:
        asks = await begin(made, 1) if held_back(made["b"]) else []
        for _ in range(3):
            assert (await made.ask())[0] == 503
        found = await shown(made, lambda each: each["events"])
        let_go(made["b"])
        await asyncio.gather(*asks)
    (one,) = found["events"]
    assert (one["kind"], one["count"]) == ("refused: busy", 3)
    assert "at their limits" in one["words"]


async def test_flips_and_moves_are_shown_newest_first() -> None:
    async with cluster(both("a"), both("b")) as made:
        status, _ = await made.order("instances/b/flip", {"role": "decode", "reason": "as told"})
        assert status == 202
        found = await shown(made, lambda each: each["events"])
        assert found["events"][0]["kind"] == "flip"
        assert "b both → decode" in found["events"][0]["words"]
        assert "as told" in found["events"][0]["words"]
        made.scheduler.metrics.record_move(RequestId("r"), InstanceId("a"), "memory", "moved")
        found = await shown(made, lambda each: len(each["events"]) == 2)
        assert [each["kind"] for each in found["events"]] == ["move", "flip"]


async def test_pages_that_are_open_at_once_get_the_same_snapshots() -> None:
    async with cluster(both()) as made:
        all_found = await asyncio.gather(*(some(made, 6) for _ in range(5)))
    by_seq: dict[int, dict[str, Any]] = {}
    for each in (each for found in all_found for each in found):
        assert by_seq.setdefault(each["seq"], each) == each
    assert len(by_seq) < 5 * 6  # as many as if each had its own
    assert sorted(by_seq) == list(range(min(by_seq), max(by_seq) + 1))


async def test_nothing_is_computed_while_no_page_is_open() -> None:
    async with cluster(both()) as made:
        (before,) = await some(made, 1)
        await asyncio.sleep(20 * PERIOD_S)
        (after,) = await some(made, 1)
    assert after["seq"] - before["seq"] < 5


async def test_what_ended_while_no_page_was_open_is_shown() -> None:
    async with cluster(both()) as made:
        assert (await made.ask(stream=True))[0] == 200
        found = await shown(made, lambda each: any(each["bins"]["served"]))
        assert sum(found["bins"]["served"]) == sum(found["bins"]["in_time"]) == 1
        (first_s,) = filter(None, found["bins"]["ttft_p50_s"])
        (whole_s,) = filter(None, found["bins"]["jct_s"])
        assert 0 < first_s <= whole_s


async def test_a_page_that_never_reads_is_cut_off_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.002)
    limits = Limits(stalled_s=0.5)
    async with cluster(*held_back(both()), first_byte_s=60.0, limits=limits) as made:
        asks = await begin(made, 50)
        tasks = len(asyncio.all_tasks())
        with socket.socket() as page:
            page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            page.connect(made.listener.address)
            page.sendall(HEAD)
            name = page.getsockname()
            await eventually(lambda: name in peers(made))
            await eventually(lambda: name not in peers(made), 30)
            assert (await some(made, 1))[0]["in_flight"] == 50
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
        let_go(made["b"])
        await asyncio.gather(*asks)


def peers(made: Cluster) -> set[Any]:
    """Addresses of clients with open connections."""
    transports = (each.transport for each in made.listener.connections)
    return {each.get_extra_info("peername") for each in transports if each is not None}


async def test_an_open_page_does_not_hold_up_the_end_of_the_router() -> None:
    async with door() as (_, listener, _):
        listener.stop_s = 60.0
        reader, writer = await asyncio.open_connection(*listener.address)
        writer.write(HEAD)
        await reader.readuntil(b"data: ")
        ended_s = time.monotonic()
    assert time.monotonic() - ended_s < 10
    rest = await reader.read()
    assert rest.endswith(b"0\r\n\r\n")  # it ends as it should
    writer.close()


async def test_a_request_that_has_just_come_is_served_though_the_router_ends() -> None:
    """While it waits for a body, it closes connections that are idle."""
    async with door() as (_, listener, _):
        listener.stop_s = 60.0
        reader, writer = await asyncio.open_connection(*listener.address)
        sending = (await asyncio.open_connection(*listener.address))[1]
        sending.write(post(b'{"model": ')[:-1])
        await eventually(lambda: any(not each.is_idle for each in listener.connections))
        (idle,) = (each for each in listener.connections if each.is_idle)
        idle.data_received(b"GET /livez HTTP/1.1\r\nHost: r\r\n\r\n")
        asyncio.get_running_loop().call_later(1.0, sending.close)
    assert (await read_answer(reader)).status == 200
    writer.close()


async def test_a_response_that_is_not_sent_yet_is_sent_though_the_router_ends() -> None:
    with socket.socket() as page:
        page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with door() as (_, listener, _):
            listener.stop_s = 60.0
            page.connect(listener.address)
            await eventually(lambda: listener.connections)
            (connection,) = listener.connections
            stream = connection.transport
            assert stream is not None
            stream.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            page.sendall(b"GET / HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
            await eventually(lambda: stream.get_write_buffer_size() and not connection.task)
            reading = asyncio.create_task(asyncio.to_thread(page.makefile("rb").read))
        assert not stream.get_write_buffer_size()
        assert b"</html>" in await reading


def ended(at_s: float, outcome: str = "ok", **more: Any) -> Ended:
    """A request of a second with a first token after 0.2 s and eight more."""
    usual: dict[str, Any] = dict.fromkeys(Ended.__annotations__)
    usual |= {"arrival_s": at_s - 1.0, "first_byte_s": at_s - 0.8, "generated": 9}
    usual |= {"problem": "", "prefill": "p", "decode": "d", "marks": [], "served": []}
    return Ended(**{**usual, "id": "r", "ended_s": at_s, "outcome": outcome, **more})


def test_a_bin_sums_up_what_ended_in_it() -> None:
    rows = [ended(9.0, first_byte_s=8.0 + 0.01 * number) for number in range(1, 101)]
    rows += [ended(9.0, each) for each in ("busy", "late", "poison", "error", "cancelled")]
    rows += [ended(9.0, "rejected"), ended(9.0, generated=0, arrival_s=6.0)]
    found = live.bin_of(rows, Objective(ttft_s=0.505))
    assert found.ttft_p50_s == pytest.approx(0.5)
    assert found.ttft_p99_s == pytest.approx(0.99)
    assert found.jct_s == pytest.approx((100 * 1.0 + 3.0) / 101)
    assert found.tpot_s == pytest.approx((1 - 0.505) / 8)
    assert (found.served, found.in_time, found.refused, found.failed) == (101, 51, 3, 1)


def test_a_slow_output_is_not_in_time() -> None:
    rows = [ended(9.0), ended(9.0, generated=2)]
    assert live.bin_of(rows, Objective(tpot_s=0.2)).in_time == 1
    assert live.bin_of(rows).in_time == 2


def test_an_empty_bin_has_no_latencies() -> None:
    assert live.bin_of([]) == (None, None, None, None, 0, 0, 0, 0)


def test_bins_follow_one_another_whenever_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "BIN_S", 5.0)
    recent = live.Recent()
    recent.take([ended(1001.0), ended(1004.0), ended(1006.0)], 1007.0)
    assert [each.served for each in recent.bins] == [0] * 59 + [2]
    recent.take([ended(1008.0)], 1009.9)
    assert recent.bins[-1].served == 2
    recent.take([], 1021.0)
    assert [each.served for each in recent.bins][-4:] == [2, 2, 0, 0]
    recent.take([ended(9001.0)], 9001.0)  # nothing was asked for two hours
    assert [each.served for each in recent.bins] == [0] * 60


def test_lengths_are_those_of_served_outputs_with_a_prediction() -> None:
    recent = live.Recent()
    rows = [ended(3.0, predicted=12), ended(3.0), ended(3.0, "error", predicted=5)]
    recent.take([*rows, ended(3.0, predicted=7, generated=0)], 10.0)
    assert list(recent.outputs) == [(12, 9)]


def test_troubles_are_bounded_in_number_and_length() -> None:
    recent = live.Recent()
    kinds = ["busy", "error"] * 100
    recent.take([ended(3.0, kind, problem="x" * 10_000) for kind in kinds], 10.0)
    assert len(recent.troubles) <= 100
    assert max(len(each.words) for each, _ in recent.troubles) < 1000
