"""Requests go where the KV of their prompts is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.fakes import (
    FREE,
    Cluster,
    FakeInstance,
    cluster,
    eventually,
    metric,
    until_reported,
)
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
    """An instance sends a report, until the router has read it, and all have reported after what
    was sent to them, which counts until then."""
    view, received = made.scheduler.monitor.view, made.scheduler.monitor.counters.received
    before, seqs = received["CacheReport"], {each.info.id: each.seq for each in view().instances}
    made[name].cache_report = report
    await eventually(lambda: received["CacheReport"] > before)
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
