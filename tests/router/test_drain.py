"""Instances that are drained: who may, what they still get, and the command."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.router.fakes import Cluster, FakeInstance, cluster, eventually, four, hang
from vllm_tetri import admin
from vllm_tetri.handover import DecodeParams
from vllm_tetri.types import Role


async def drain(made: Cluster, name: str, body: Any = None) -> tuple[int, Any]:
    return await made.order(f"instances/{name}/drain", body)


async def test_a_draining_instance_gets_no_new_requests_and_ends_when_done() -> None:
    async with cluster(*four()) as made:
        made["p1"].unfinished = "1 request"
        answer = {"id": "p1", "state": "draining"}
        assert await drain(made, "p1") == (202, answer)
        assert await drain(made, "p1", {"force": False}) == (202, answer)
        assert made.state("p1") == "draining"
        for _ in range(4):
            status, _, headers = await made.ask()
            assert (status, headers["x-tetri-prefill"]) == (200, "p2")
        assert made["p1"].calls == []
        assert not made["p1"].has_left.is_set()

        made["p1"].unfinished = ""
        await eventually(made["p1"].has_left.is_set)
        await eventually(lambda: made.state("p1") == "absent")
        assert (await made.get("/tetri/v1/instances"))["departed"] == {"p1": ""}


@pytest.mark.parametrize("order", [("drain", None), ("flip", {"role": "prefill"})])
async def test_a_decode_request_still_goes_to_where_its_kv_is(order: tuple[str, Any]) -> None:
    async with cluster(*four()) as made:
        made["d1"].unfinished = "1 transfer"
        await made.order(f"instances/d1/{order[0]}", order[1])
        status, answer, headers = await made.ask()  # dispatched by a view that was older
        assert (status, answer["kind"], headers["x-tetri-decode"]) == (200, "injected", "d1")
        assert isinstance(made["d1"].leg(), DecodeParams)


async def test_it_stays_while_this_router_has_something_for_it() -> None:
    async with cluster(*four()) as made:
        made["d1"].chunk_gate.clear()
        asking = asyncio.create_task(made.ask(stream=True))
        await eventually(lambda: made["d1"].calls)
        await drain(made, "d1")
        (row,) = [r for r in (await made.get("/tetri/v1/instances"))["instances"] if r["in_flight"]]
        assert (row["id"], row["in_flight"], row["state"]) == ("d1", 1, "draining")
        await asyncio.sleep(1.0)  # longer than it waits when all is quiet
        assert not made["d1"].has_left.is_set()
        made["d1"].chunk_gate.set()
        assert (await asking)[0] == 200
        await eventually(made["d1"].has_left.is_set)


async def test_a_dispatch_keeps_the_decode_instance_that_it_names() -> None:
    async def announce_and_wait(fake: FakeInstance, request: Any, body: Any) -> Any:
        leg = fake.leg()
        fake.announce(leg)  # type: ignore[arg-type]
        await fake.chunk_gate.wait()
        return await fake.answer(request, body)

    async with cluster(*four()) as made:
        for name in ("p1", "p2"):
            made[name].handler = announce_and_wait
            made[name].chunk_gate.clear()
        asking = asyncio.create_task(made.ask())
        table = made.scheduler.table
        await eventually(lambda: any(each.decode == "d1" for each in table))
        await drain(made, "d1")
        await drain(made, "d2", {"force": True})
        await eventually(made["d2"].has_left.is_set)
        assert not made["d1"].has_left.is_set()
        for name in ("p1", "p2"):
            made[name].chunk_gate.set()
        assert (await asking)[1]["by"] == "d1"
        await eventually(made["d1"].has_left.is_set)


async def test_requests_cut_off_by_a_deadline_end_or_move() -> None:
    """The instance answers nothing any more, but does not close its connections either."""
    async with cluster(*four()) as made:
        d1 = made["d1"]
        d1.chunk_gate.clear()
        streaming = asyncio.create_task(made.ask(stream=True))
        table = made.scheduler.table
        await eventually(lambda: any(each.generated for each in table))
        waiting = asyncio.create_task(made.ask())  # its answer does not begin either
        d1.handler = hang
        await eventually(lambda: len(d1.calls) == 2)
        d1.unfinished = "2 unfinished requests"
        assert (await drain(made, "d1", {"deadline_s": 0.2}))[0] == 202

        status, answer, _ = await asyncio.wait_for(streaming, 5)
        assert status == 200
        assert answer.startswith(b'data: {"index": 0}\n\ndata: {"error":{"message":"instance d1')
        status, answer, headers = await asyncio.wait_for(waiting, 5)
        assert (status, answer["kind"], headers["x-tetri-decode"]) == (200, "whole", "d2")
        await eventually(lambda: d1.aborted == 2)
        assert (await made.get("/tetri/v1/instances"))["departed"] == {
            "d1": "2 unfinished requests"
        }


async def test_unknown_and_needed_instances_are_refused() -> None:
    async with cluster(*four()) as made:
        status, answer = await drain(made, "absent")
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")
        assert (await drain(made, "d2"))[0] == 202
        status, answer = await drain(made, "d1")
        assert (status, answer["error"]["type"]) == (409, "ConflictError")
        assert "d1 is the last instance for decode" in answer["error"]["message"]
        assert made.state("d1") == "ready"
        assert (await drain(made, "d1", {"force": True}))[0] == 202
        await eventually(made["d1"].has_left.is_set)


async def test_the_command_waits_and_says_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    async with cluster(*four()) as made:
        assert await made.command("drain", "p1") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "p1 is draining: 0 running, 0 waiting, 0 held, 0 in flight"
        assert lines[-1] == "p1 has left"

        made["d1"].unfinished = "2 unfinished requests"
        assert await made.command("drain", "d1", "--deadline", "0.2") == 0
        assert "d1 has left; cut off: 2 unfinished requests" in capsys.readouterr().out

        assert await made.command("drain", "p2") == 1
        assert "p2 is the last instance for prefill" in capsys.readouterr().err
        assert await made.command("drain", "p2", "--force") == 0


async def test_the_command_asks_an_instance_for_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with cluster(*four()) as made:
        assert await made.command("drain", made["p1"].url) == 0
        assert "p1 has left" in capsys.readouterr().out
        made["d1"].id = None  # type: ignore[assignment]
        assert await made.command("drain", made["d1"].url) == 1
        assert f"{made['d1'].url} is no instance" in capsys.readouterr().err
        assert await made.command("drain", "http://127.0.0.1:1") == 1
        assert "no instance answers at http://127.0.0.1:1" in capsys.readouterr().err


async def test_the_command_says_when_an_instance_has_started_anew(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_COMMIT_S", 0.1)
    async with cluster(*four()) as made:
        made["p1"].unfinished = "1 request"
        draining = asyncio.create_task(made.command("drain", "p1"))
        await eventually(lambda: made.state("p1") == "draining")
        again = FakeInstance("p1", Role.PREFILL)
        again.pid += 1
        before = made["p1"]
        await made.add(again)
        await before.close()
        assert await draining == 1
        assert "p1 has started anew: the order was lost" in capsys.readouterr().err


async def test_the_command_says_when_an_instance_died_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with cluster(*four()) as made:
        made["p1"].unfinished = "1 request"
        draining = asyncio.create_task(made.command("drain", "p1"))
        await eventually(lambda: made.state("p1") == "draining")
        await made["p1"].close()
        assert await draining == 1
        assert "did not say goodbye" in capsys.readouterr().err
