"""When an engine has nothing left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_tetri.engine.departure import unfinished
from vllm_tetri.engine.own import OWN_PREFIX


def request(name: str, *, is_finished: bool = False) -> Any:
    return SimpleNamespace(request_id=name, is_finished=lambda: is_finished)


def left(*requests: Any, outbox: int = 0, slots: int = 0) -> str:
    scheduler: Any = SimpleNamespace(requests={each.request_id: each for each in requests})
    entries: Any = range(outbox)
    arena: Any = SimpleNamespace(slots=slots)
    return unfinished(scheduler, entries, arena)


def test_an_engine_without_requests_and_transfers_is_done() -> None:
    assert left() == ""
    assert left(request("kept until its blocks are sent", is_finished=True)) == ""
    assert left(request(OWN_PREFIX + "its own measurement")) == ""


def test_everything_that_is_left_is_named() -> None:
    assert left(request("a"), request("b")) == "2 unfinished requests"
    assert left(outbox=1) == "1 hand-overs to other instances"
    assert left(request("a"), slots=3) == "1 unfinished requests, 3 transfers in the arena"
