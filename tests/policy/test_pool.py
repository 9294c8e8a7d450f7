"""The index of a pool of KV against a model of it."""

from __future__ import annotations

from random import Random

import pytest

from vllm_tetri.policy.pool import PoolIndex

NAMES = [bytes([each]) for each in range(16)]


class Model:
    """A pool that is slow and plain: bytes by place, blocks in the order of their last use."""

    def __init__(self, size: int) -> None:
        self.bytes = [b""] * size
        self.blocks: list[tuple[bytes, int]] = []  # the least recently used one first
        self.pins: list[tuple[bytes, int]] = []  # that are held, each once per pin

    def place(self, name: bytes) -> int | None:
        return dict(self.blocks).get(name)

    def is_pinned(self, place: int) -> bool:
        return any(pinned == place for _, pinned in self.pins)

    def idle(self) -> list[bytes]:
        return [name for name, place in self.blocks if not self.is_pinned(place)]

    def use(self, name: bytes) -> None:
        self.blocks.sort(key=lambda each: each[0] == name)


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_operations_against_a_model(seed: int) -> None:
    """No place is given away while it is pinned, the least recently used block makes room, and at
    the end nothing is pinned."""
    rng, size = Random(seed), 6
    index, model = PoolIndex(size), Model(size)
    held: list[tuple[list[bytes], list[int]]] = []
    num_dropped = num_refused = 0
    for _ in range(10_000):
        action = rng.choices(("put", "pin", "unpin", "clear"), (50, 25, 21, 0.3))[0]
        if action == "put":
            name = rng.choice(NAMES)
            idle, was_here = model.idle(), model.place(name) is not None
            is_full = (
                len(model.blocks)
                + sum(
                    place not in dict(model.blocks).values() for place in {p for _, p in model.pins}
                )
                == size
            )
            place, dropped = index.put(name)
            if was_here:
                assert (place, dropped) == (None, None)
                if name in idle:
                    model.use(name)
            elif is_full and not idle:
                assert (place, dropped) == (None, None)
                num_refused += 1
            else:
                assert place is not None
                assert not model.is_pinned(place)
                assert dropped == (idle[0] if is_full else None)
                num_dropped += dropped is not None
                model.blocks = [each for each in model.blocks if each[0] != dropped]
                assert place not in dict(model.blocks).values()
                model.blocks.append((name, place))
                model.bytes[place] = name
        elif action == "pin":
            first = rng.randrange(len(NAMES))
            names = NAMES[first : first + rng.randint(1, 4)]
            places = index.pin(iter(names))
            found = [model.place(name) for name in names]
            here = found.index(None) if None in found else len(found)
            assert places == found[:here]
            held.append((names[:here], places))
            model.pins += zip(names, places, strict=False)
        elif action == "unpin" and held:
            names, places = held.pop(rng.randrange(len(held)))
            assert [model.bytes[place] for place in places] == names  # still what was pinned
            index.unpin(places)
            for name, place in reversed(list(zip(names, places, strict=True))):
                model.pins.remove((name, place))
                if model.place(name) == place and not model.is_pinned(place):
                    model.use(name)
        elif action == "clear":
            assert sorted(index.clear()) == sorted(name for name, _ in model.blocks)
            model.blocks.clear()
        assert len(index) == len(model.blocks)
        assert index.num_pinned == len({place for _, place in model.pins})
    for _, places in held:
        index.unpin(places)
    assert index.num_pinned == 0
    assert min(num_dropped, num_refused) > 50
    fresh = [index.put(b"new %d" % each)[0] for each in range(size)]
    assert sorted(fresh) == list(range(size))  # every place is free again, once


def test_the_end_of_a_prefix_makes_room_first() -> None:
    index = PoolIndex(3)
    for name in (b"a", b"b", b"c"):
        index.put(name)
    index.unpin(index.pin([b"a", b"b", b"c"]))
    assert [index.put(name)[1] for name in (b"x", b"y", b"z")] == [b"c", b"b", b"a"]


def test_a_pool_without_places_keeps_nothing() -> None:
    index = PoolIndex(0)
    assert index.put(b"a") == (None, None)
    assert index.pin([b"a"]) == []
    assert len(index) == 0
