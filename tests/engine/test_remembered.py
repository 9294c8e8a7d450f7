"""Names that are remembered for a while."""

from __future__ import annotations

from vllm_tetri.engine.remembered import Remembered


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_name_is_there_until_it_is_taken() -> None:
    names = Remembered[int](most=4, keep_s=1.0)
    names["a"] = 1
    assert "a" in names
    assert names.pop("a") == 1
    assert names.pop("a") is None
    assert len(names) == 0


def test_the_oldest_goes_when_there_are_too_many() -> None:
    names = Remembered[int](most=2, keep_s=1.0)
    names["a"], names["b"] = 1, 2
    names["a"] = 3  # newer than b now
    names["c"] = 4
    assert ("a" in names, "b" in names, "c" in names) == (True, False, True)


def test_what_is_too_old_is_forgotten() -> None:
    clock = Clock()
    names = Remembered[int](most=4, keep_s=1.0, clock=clock)
    names["a"] = 1
    clock.now = 0.6
    names["b"] = 2
    names.expire()
    assert len(names) == 2
    clock.now = 1.0
    names.expire()
    assert ("a" in names, "b" in names) == (False, True)
    clock.now = 2.0
    names["c"] = 3
    assert len(names) == 1
