"""Orders to flip: who may, what one that flips still gets, the watcher, and the command."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.fakes import (
    Cluster,
    FakeInstance,
    Watching,
    cluster,
    eventually,
    four,
    hang,
    metric,
    until_reported,
)
from vllm_tetri.types import InstanceId, Role


async def flip(made: Cluster, name: str, role: str, **body: Any) -> tuple[int, Any]:
    return await made.order(f"instances/{name}/flip", {"role": role, **body})


async def row(made: Cluster, name: str) -> dict[str, Any]:
    rows = (await made.get("/tetri/v1/instances"))["instances"]
    return next(each for each in rows if each["id"] == name)


async def until(made: Cluster, name: str, **wanted: Any) -> dict[str, Any]:
    """It is so, and no flip is under way."""
    for _ in range(500):
        found = await row(made, name)
        is_over = not found["flip"] or found["flip"]["stage"] in ("done", "rolled_back")
        if is_over and all(found[key] == value for key, value in wanted.items()):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} is never {wanted}: {found}")


async def test_it_gets_nothing_new_while_it_drains_and_then_work_of_its_new_role() -> None:
    async with cluster(*four()) as made:
        made["d2"].unfinished = "1 request"
        status, answer = await flip(made, "d2", "prefill")
        assert (status, answer["epoch"], answer["state"]) == (202, 1, "flipping")
        for name in ("p1", "p2"):
            made[name].handler = hang
        waiting = [asyncio.create_task(made.ask()) for _ in range(4)]
        await eventually(lambda: len(made["p1"].calls) + len(made["p2"].calls) == 4)
        assert made["d2"].calls == []

        made["d2"].unfinished = ""
        found = await until(made, "d2", role="prefill", state="ready")
        assert found["flip"]["stage"] == "done"
        made["d2"].decode = "d1"
        for name in ("p1", "p2"):
            await made.report(name, queued_prefill_tokens=10_000)
        await until_reported(made)
        status, answer, headers = await made.ask()
        assert (status, headers["x-tetri-prefill"], headers["x-tetri-decode"]) == (200, "d2", "d1")
        for each in waiting:
            each.cancel()


async def test_equal_orders_at_the_same_time_are_one_flip() -> None:
    async with cluster(*four()) as made:
        made["d2"].unfinished = "1 request"
        answers = await asyncio.gather(*(flip(made, "d2", "prefill") for _ in range(5)))
        assert {status for status, _ in answers} == {202}
        assert {answer["epoch"] for _, answer in answers} == {1}
        status, answer = await flip(made, "d2", "both")
        assert status == 409
        words = "d2 is about to become prefill; wait, or order decode to cancel it"
        assert words in answer["error"]["message"]
        assert (await flip(made, "d2", "decode"))[0] == 202
        found = await until(made, "d2", state="ready")
        assert (found["role"], found["flip"]["stage"]) == ("decode", "rolled_back")
        assert found["flip"]["problem"] == "called off: ordered"
        assert (await flip(made, "d2", "prefill"))[1]["epoch"] == 3
        _, answer = await flip(made, "d2", "prefill", now=True)  # cuts the drain short
        assert answer["epoch"] == 4
        await until(made, "d2", role="prefill", state="ready")


async def test_while_one_switches_the_last_of_its_role_stays() -> None:
    async with cluster(*four()) as made:
        assert made["d2"].agent is not None
        made["d2"].is_busy = True  # its engine takes no step
        assert (await flip(made, "d2", "prefill", now=True))[0] == 202
        assert made.state("d2") == "ready"
        assert (await flip(made, "d1", "prefill", now=True))[0] == 409
        assert (await flip(made, "d2", "prefill", now=True))[1]["is_under_way"]
        assert (await flip(made, "d2", "decode"))[0] == 202
        found = await until(made, "d2", role="decode")
        assert found["flip"]["problem"] == "called off: ordered"


async def test_an_instance_without_a_substitute_becomes_both_without_draining() -> None:
    async with cluster(FakeInstance("only", Role.DECODE)) as made:
        made["only"].unfinished = "1 request"
        assert (await flip(made, "only", "both"))[0] == 202
        assert made.state("only") == "ready"
        await until(made, "only", role="both")


async def test_the_command_reports_an_order_that_was_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with cluster(*four()) as made:
        made.scheduler.monitor.send = lambda *_: True  # type: ignore[method-assign]
        assert await made.command("flip", "d2", "prefill", "--deadline", "0") == 1
        assert "d2 is still a decode instance: the order was lost" in capsys.readouterr().err


async def test_the_last_instance_of_a_role_flips_only_with_force() -> None:
    async with cluster(*four()) as made:
        assert (await flip(made, "d2", "prefill"))[0] == 202
        await until(made, "d2", role="prefill", state="ready")
        status, answer = await flip(made, "d1", "prefill")
        assert (status, answer["error"]["type"]) == (409, "ConflictError")
        assert "d1 is the last instance for decode" in answer["error"]["message"]
        assert (await flip(made, "d1", "both"))[0] == 202  # it still decodes
        await until(made, "d1", role="both", state="ready")
        made["d1"].unfinished = "1 request"
        assert (await flip(made, "d1", "prefill", force=True))[0] == 202
        # No other instance can take over, so it does not drain first.
        await until(made, "d1", role="prefill", state="ready")
        status, answer, _ = await made.ask()
        assert (status, answer["kind"]) == (200, "whole")


async def test_those_that_cannot_are_refused_in_words() -> None:
    async with cluster(*four()) as made:
        assert (await flip(made, "absent", "decode"))[0] == 404
        made["p2"].unfinished = "1 request"
        made.scheduler.drain(InstanceId("p2"), force=False, deadline_s=None)
        status, answer = await flip(made, "p2", "decode")
        assert (status, answer["error"]["message"]) == (409, "p2 is draining and cannot flip")
        made["d2"].speaks.clear()
        await eventually(lambda: made.state("d2") == "silent")
        status, answer = await flip(made, "d2", "prefill")
        words = "d2 has stopped reporting and cannot flip"
        assert (status, answer["error"]["message"]) == (409, words)


async def test_the_command_reports_an_instance_that_dies_while_it_drains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_tetri.admin._SILENT_S", 0.5)
    async with cluster(*four()) as made:
        made["d2"].unfinished = "1 request"
        flipping = asyncio.create_task(made.command("flip", "d2", "prefill"))
        await eventually(lambda: made.state("d2") == "flipping")
        made["d2"].speaks.clear()  # as one that is killed: it says nothing any more
        assert await flipping == 1
        assert "d2 does not answer any more" in capsys.readouterr().err
        assert (await made.ask())[0] == 200


async def test_the_command_waits_for_an_instance_that_is_silent_for_a_moment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with cluster(*four()) as made:
        made["d2"].unfinished = "1 request"
        flipping = asyncio.create_task(made.command("flip", "d2", "prefill"))
        await eventually(lambda: made.state("d2") == "flipping")
        made["d2"].speaks.clear()
        await eventually(lambda: made.state("d2") == "silent")
        await asyncio.sleep(0.3)  # the command looks
        made["d2"].unfinished = ""
        made["d2"].speaks.set()
        assert await flipping == 0
        assert "d2 decode → prefill: done" in capsys.readouterr().out


async def test_the_command_waits_and_says_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    async with cluster(*four()) as made:
        assert await made.command("flip", "d2", "decode") == 0
        assert capsys.readouterr().out == "d2 is a decode instance already\n"
        assert await made.command("flip", "d2", "prefill") == 0
        said = capsys.readouterr().out
        assert "d2 decode → prefill: done 0 s ago, drained in 0." in said
        assert "(ordered by vllm-tetri flip)" in said
        assert await made.command("status") == 0
        said = capsys.readouterr().out
        assert "flips:\n  d2 decode → prefill: done" in said
        assert "flip policy: off" in said
        made["d2"].unfinished = "2 unfinished requests"
        assert await made.command("flip", "d2", "decode", "--deadline", "0.2") == 1
        assert "rolled back 0 s ago: not drained in time: 2 unfinished requests" in (
            capsys.readouterr().out
        )
        assert await made.command("flip", "d2", "decode", "--now") == 0
        assert await made.command("flip", "d1", "prefill", "--now") == 0
        for name, count in (
            ('flips_total{outcome="done",source="decode",target="prefill"}', 2),
            ('flips_total{outcome="done",source="prefill",target="decode"}', 1),
            ("flip_commit_seconds_count", 3),
            ("flip_drain_seconds_count", 1),
        ):
            assert await metric(made, f"tetri_{name}") == count
        assert await made.command("flip", "d2", "prefill") == 1
        assert "d2 is the last instance for decode" in capsys.readouterr().err


@pytest.mark.parametrize("is_dry", [False, True])
async def test_the_watcher_flips_and_explains_why_unless_in_a_dry_run(is_dry: bool) -> None:
    watcher = Watching(Role.PREFILL)
    async with cluster(*four(), watcher=watcher, is_watcher_dry=is_dry) as made:
        if not is_dry:
            found = await until(made, "d2", role="prefill", state="ready")
            assert found["flip"]["reason"] == "watcher: 7 s against 1 s"
            assert (await made.get("/tetri/v1/instances"))["watcher"] == "as told"
            return
        await eventually(lambda: made.scheduler.flips.explanation == "as told")
        looks = watcher.looks
        await eventually(lambda: watcher.looks >= looks + 2)
        assert (await row(made, "d2"))["flip"] is None
