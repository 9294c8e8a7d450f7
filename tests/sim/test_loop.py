"""Virtual time."""

from __future__ import annotations

from functools import partial

from vllm_tetri.sim.loop import Loop


def test_calls_run_in_order_of_time_and_then_of_scheduling() -> None:
    loop, found = Loop(), []

    def call(name: str, now: float) -> None:
        found.append((name, now))
        if name == "a":
            loop.at(2.0, partial(call, "later"))
            loop.at(1.5, partial(call, "soon"))

    for name, at_s in (("a", 1.0), ("b", 3.0), ("c", 1.0), ("d", 2.0)):
        loop.at(at_s, partial(call, name))
    loop.run()

    assert [name for name, _ in found] == ["a", "c", "soon", "d", "later", "b"]
    assert [now for _, now in found] == [1.0, 1.0, 1.5, 2.0, 2.0, 3.0]
    assert not len(loop)
