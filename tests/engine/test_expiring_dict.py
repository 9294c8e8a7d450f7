"""A dict bounded in size and time."""

from __future__ import annotations

from vllm_tetri.engine.receive import ExpiringDict


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_entry_is_there_until_it_is_removed() -> None:
    names = ExpiringDict[int](4, 1.0)
    names["a"] = 1
    assert "a" in names
    assert names.pop("a") == 1
    assert names.pop("a") is None
    assert len(names) == 0


def test_the_oldest_entry_is_evicted_when_there_are_too_many() -> None:
    names = ExpiringDict[int](2, 1.0)
    names["a"], names["b"] = 1, 2
    names["a"] = 3  # newer than b now
    names["c"] = 4
    assert ("a" in names, "b" in names, "c" in names) == (True, False, True)


def test_entries_expire() -> None:
    clock = Clock()
    names = ExpiringDict[int](4, 1.0, clock=clock)
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
