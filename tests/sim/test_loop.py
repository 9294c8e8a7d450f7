"""Virtual time."""

from __future__ import annotations

from functools import partial

from vllm_tetri.sim.loop import Loop


def test_what_was_given_goes_before_others_of_its_time() -> None:
    loop, found = Loop(), []

    def note(name: str, now: float) -> None:
        found.append((name, now))
        if name == "c":
            loop.at(2.0, partial(note, "later"))
            loop.at(1.5, partial(note, "soon"))

    loop.at(1.0, partial(note, "a"))
    loop.at(3.0, partial(note, "b"))
    loop.run([(1.0, partial(note, "c")), (2.0, partial(note, "d")), (4.0, partial(note, "e"))])

    assert [name for name, _ in found] == ["c", "a", "soon", "d", "later", "b", "e"]
    assert [now for _, now in found] == [1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0]


def test_only_the_next_of_what_was_given_is_due() -> None:
    loop, lengths = Loop(), []

    loop.run((float(at), lambda _: lengths.append(len(loop))) for at in range(3))

    assert lengths == [1, 1, 0]
