"""Requests go where the KV of their prompts is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import (
    FREE,
    Cluster,
    FakeInstance,
    cluster,
    eventually,
    metric,
    until_reported,
)
from vllm_tetri.handover import Fetch, PrefillParams
from vllm_tetri.messages import CacheReport, RequestChain
from vllm_tetri.router import placement
from vllm_tetri.types import Mode, Role

FIRST = [{"role": "user", "content": "What is a tree? " * 200}]
NEXT = [*FIRST, {"role": "assistant", "content": "A plant."}, {"role": "user", "content": "Oh"}]
TOKENS = 800


def names(first: int, count: int) -> bytes:
    return b"".join(each.to_bytes(8, "big") for each in range(first, first + count))


def split() -> list[FakeInstance]:
    roles = {"a": Role.PREFILL, "b": Role.PREFILL, "c": Role.DECODE}
    made = [FakeInstance(name, role, decode="c") for name, role in roles.items()]
    for each in made:
        each.load = FREE
    return made


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent counts until the next report, and no longer."""
    monkeypatch.setattr(placement, "_GRACE_S", 0.0)


async def blocks(made: Cluster, name: str) -> int:
    rows = (await made.get("/tetri/v1/cache"))["instances"]
    return sum(row["blocks"] for row in rows if row["id"] == name)


async def chat(made: Cluster, messages: list[dict[str, str]], name: str, **more: Any) -> Any:
    """Ask, and return the prefill and decode instance of the answer."""
    headers = {"X-Request-Id": name}
    body = {"messages": messages, **more}
    status, answer, got = await made.ask("/v1/chat/completions", headers=headers, **body)
    assert status == 200, answer
    return got["x-tetri-prefill"], got["x-tetri-decode"]


async def report(
    made: Cluster, name: str, request: str, tokens: int = TOKENS, late: int = 0
) -> None:
    """An instance tells of a request that ended there."""
    held = names(tokens, tokens // 16)
    chain = RequestChain(f"chatcmpl-{request}-1a2b3c4d", TOKENS, held)
    made[name].cached = held
    await tell(made, name, CacheReport(made[name].id, late, 16, added=held, chains=[chain]))


async def tell(made: Cluster, name: str, report: CacheReport) -> None:
    """An instance sends a report, until the router has read it."""
    received = made.scheduler.monitor.counters.received
    before = received["CacheReport"]
    made[name].cache_report = report
    await eventually(lambda: received["CacheReport"] > before)
    await settle(made)


async def settle(made: Cluster) -> None:
    """All instances report after what was sent to them, which counts until then."""
    view = made.scheduler.monitor.view
    seqs = {each.info.id: each.seq for each in view().instances}
    await eventually(lambda: all(one.seq > seqs[one.info.id] + 1 for one in view().instances))
    await until_reported(made)


async def test_the_next_turn_goes_to_the_prefill_instance_that_has_the_last() -> None:
    async with cluster(*split()) as made:
        for name in ("a", "b"):
            await chat(made, FIRST, "r1")
            await report(made, name, "r1")
            assert await chat(made, NEXT, "r2") == (name, "c")
            made[name].cached = b""
            await tell(made, name, CacheReport(made[name].id, 0, 16, is_all=True))
        assert await metric(made, "tetri_cached_prompt_tokens_total") >= 2 * TOKENS


async def test_a_prefill_instance_is_told_what_others_hold() -> None:
    async with cluster(*split()) as made:
        await chat(made, FIRST, "r1")
        assert made["a"].leg(0).held == {}
        await report(made, "c", "r1")
        await chat(made, NEXT, "r2")
        prefill = made["b"] if made["b"].calls else made["a"]
        leg = prefill.leg()
        assert leg.held == {"c": TOKENS}
        first, *_, last = leg.marks
        assert first == (TOKENS, TOKENS + TOKENS // 16 - 1)
        assert last[0] < TOKENS


async def test_a_queue_that_takes_longer_than_the_prompt_goes_before_the_cache() -> None:
    async with cluster(*split()) as made:
        await chat(made, FIRST, "r1")
        await report(made, "a", "r1")
        await made.report("a", queued_prefill_tokens=TOKENS // 2)
        await until_reported(made)
        assert await chat(made, NEXT, "r2") == ("a", "c")
        await made.report("a", queued_prefill_tokens=2 * TOKENS)
        await until_reported(made)
        assert await chat(made, NEXT, "r3") == ("b", "c")


async def test_a_conversation_goes_on_where_its_output_was_written_if_that_is_cheaper() -> None:
    async with cluster(*split(), mode=Mode.ADAPTIVE) as made:
        await chat(made, FIRST, "r1")
        await report(made, "c", "r1")
        assert await chat(made, NEXT, "r2") == ("c", "c")
        # Where many decode, they would wait longer than the prompt takes elsewhere.
        await made.report("c", light=200, remaining_tokens=20_000, queued_prefill_tokens=9000)
        await until_reported(made)
        assert (await chat(made, NEXT, "r3"))[0] != "c"


async def test_tenants_with_salts_do_not_find_each_other() -> None:
    async with cluster(*split()) as made:
        await chat(made, FIRST, "r1", cache_salt="one")
        await report(made, "b", "r1")
        assert await chat(made, NEXT, "r2", cache_salt="one") == ("b", "c")
        assert await chat(made, NEXT, "r3", cache_salt="two") == ("a", "c")
        await settle(made)
        assert await chat(made, NEXT, "r4") == ("a", "c")


async def test_after_a_report_that_was_lost_all_is_sent_again() -> None:
    async with cluster(*split()) as made:
        await chat(made, FIRST, "r1")
        await report(made, "b", "r1")
        await report(made, "b", "r1", tokens=160, late=3)
        await eventually(lambda: made.scheduler.placer.cached_blocks()["b"] == 10)
        assert await blocks(made, "b") == 10
        # The chain of the lost report is not known, so its blocks are found by the older one.
        await chat(made, NEXT, "r2")
        assert await metric(made, "tetri_cached_prompt_tokens_total") == 0


async def test_an_instance_that_is_gone_or_new_holds_nothing() -> None:
    async with cluster(*split()) as made:
        await chat(made, FIRST, "r1")
        await report(made, "b", "r1")
        await made["b"].close()
        await eventually(lambda: made.state("b") == "absent")
        assert await blocks(made, "b") == 0
        made["b"].cached = b""
        made["b"].pid += 1
        await made.add(made["b"])
        assert await blocks(made, "b") == 0


async def test_whatever_an_instance_reports_requests_are_served() -> None:
    async with cluster(*split()) as made:
        await chat(made, FIRST, "r1")
        made["b"].cache_report = CacheReport(made["b"].id, 0, 16, added=b"seven b")
        await eventually(lambda: made.scheduler.monitor.counters.dropped == 1)
        lie = RequestChain("chatcmpl-r1", 1, names(0, 1000))  # the prompt had more tokens
        made["b"].cached = names(0, 1000)
        await tell(made, "b", CacheReport(made["b"].id, 0, 1 << 20, chains=[lie]))
        for turn in range(4):
            assert (await chat(made, NEXT, f"r{turn + 2}"))[1] in ("b", "c")


# -- fetches ---------------------------------------------------------------------------


def fetching(made: Cluster, name: str) -> Fetch | None:
    """What an instance was told to fetch with its last request."""
    leg = made[name].leg()
    found = leg.fetch if isinstance(leg, PrefillParams) else leg
    return found if isinstance(found, Fetch) else None


async def fetches(made: Cluster, outcome: str) -> float:
    return await metric(made, f'tetri_fetches_total{{outcome="{outcome}"}}')


async def held_by(made: Cluster, holder: str, *, queued: int = 2 * TOKENS) -> None:
    """An instance holds the first turn, and has a queue that takes longer than the prompt."""
    await chat(made, FIRST, "r1")
    await report(made, holder, "r1")
    await made.report(holder, queued_prefill_tokens=queued)
    await until_reported(made)


@pytest.mark.parametrize("mode", [Mode.SPLIT, Mode.ADAPTIVE, Mode.WHOLE])
async def test_an_idle_instance_fetches_what_one_with_a_queue_holds(mode: Mode) -> None:
    async with cluster(*split(), mode=mode) as made:

        async def waits(fake: FakeInstance, request: web.Request, body: Any) -> Any:
            while not await fetches(made, "sent"):
                await asyncio.sleep(0.01)
            return await fake.answer(request, body)

        await held_by(made, "a", queued=20 * TOKENS)
        made["b"].handler = made["c"].handler = waits
        computes, _ = await chat(made, NEXT, "r2")
        fetch = fetching(made, computes)
        assert computes != "a"
        assert fetch is not None
        assert (fetch.target, fetch.kv_endpoint) == (computes, "127.0.0.1:1")
        assert fetch.marks[0] == (TOKENS, TOKENS + TOKENS // 16 - 1)
        assert fetch.wait_s >= 1.0
        asked = made["a"].calls[-1]
        assert made["a"].leg() == fetch
        assert (asked.body["messages"], asked.body["stream"]) == (NEXT, False)
        await eventually(lambda: fetch.transfer in made[computes].cancelled)  # once it has ended
        assert made[computes].lost == []
        assert await fetches(made, "sent") == 1


async def test_what_a_decode_instance_wrote_is_fetched_by_one_that_prefills() -> None:
    async with cluster(*split()) as made:
        await held_by(made, "c", queued=0)
        computes, decodes = await chat(made, NEXT, "r2")
        assert (computes, decodes) in (("a", "c"), ("b", "c"))
        fetch = fetching(made, computes)
        assert fetch is not None
        assert made["c"].calls[-2].body["messages"] == NEXT


@pytest.mark.parametrize("outcome", ["refused", "failed"])
async def test_the_instance_is_told_at_once_that_nothing_comes(outcome: str) -> None:
    async with cluster(*split()) as made:
        await held_by(made, "a")
        if outcome == "refused":
            made["a"].cached = b""
        else:
            made["a"].handler = refuses
        assert (await chat(made, NEXT, "r2"))[0] == "b"
        fetch = fetching(made, "b")
        assert fetch is not None
        await eventually(lambda: made["b"].lost == [fetch.transfer])
        assert await fetches(made, outcome) == 1
        assert (await chat(made, NEXT, "r3"))[0] == "b"  # which does not try again soon
        assert fetching(made, "b") is None


async def refuses(fake: FakeInstance, _: web.Request, body: dict[str, Any]) -> web.Response:
    return web.Response(status=500)


async def test_a_fetch_that_is_late_ends_with_its_request() -> None:
    async def hangs(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    async with cluster(*split()) as made:
        await held_by(made, "a")
        made["a"].handler = hangs
        assert (await chat(made, NEXT, "r2"))[0] == "b"
        fetch = fetching(made, "b")
        assert fetch is not None
        for name in ("a", "b"):
            await eventually(lambda name=name: fetch.transfer in made[name].cancelled)
        await eventually(lambda: made["a"].aborted == 1)
        assert await fetches(made, "late") == 1


@pytest.mark.parametrize("what", ["short", "salt", "identity", "echo"])
async def test_nothing_is_fetched(what: str) -> None:
    instances = split()
    if what == "identity":
        instances[1].identity = {"model": "other"}
    async with cluster(*instances) as made:
        messages, more = NEXT, {}
        await held_by(made, "a")
        if what == "short":
            messages = [{"role": "user", "content": "What?"}]
        elif what == "salt":
            more = {"cache_salt": "other"}
        elif what == "echo":
            more = {"prompt_logprobs": 1}
        await chat(made, messages, "r2", **more)
        assert all(fetching(made, name) is None for name in "abc" if made[name].calls)
