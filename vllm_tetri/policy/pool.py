"""Which blocks a pool of KV keeps, and where: the least recently used one makes room."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class PoolIndex:
    """Blocks by name at `size` places. A pinned place keeps its bytes, even once its block is
    forgotten: nothing else is put there until the last pin goes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))
        self._places: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}  # by place
        self._idle = OrderedDict[bytes, None]()  # not pinned, the least recently used one first
        self._pins = Counter[int]()  # by place

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    @property
    def num_pinned(self) -> int:
        """Places that are pinned."""
        return len(self._pins)

    def put(self, name: bytes) -> tuple[int | None, bytes | None]:
        """Return the place that a block gets, and the name of the one that made room. There is no
        place if the block is here already, which counts as a use, or all places are pinned."""
        if name in self._places:
            if name in self._idle:
                self._idle.move_to_end(name)
            return None, None
        dropped = None
        if not self._free:
            if not self._idle:
                return None, None
            dropped, _ = self._idle.popitem(last=False)
            self._free.append(self._places.pop(dropped))
        place = self._free.pop()
        self._places[name], self._names[place], self._idle[name] = place, name, None
        return place, dropped

    def pin(self, names: Iterable[bytes]) -> list[int]:
        """Pin the first ones of these blocks that are all here; return their places."""
        places = []
        for name in names:
            place = self._places.get(name)
            if place is None:
                break
            self._idle.pop(name, None)
            self._pins[place] += 1
            places.append(place)
        return places

    def unpin(self, places: list[int]) -> None:
        """Undo a `pin` of these places; the end of a prefix makes room before its beginning."""
        for place in reversed(places):
            self._pins[place] -= 1
            if self._pins[place]:
                continue
            del self._pins[place]
            if (name := self._names.get(place)) is None:
                self._free.append(place)  # forgotten meanwhile
            else:
                self._idle[name] = None

    def clear(self) -> list[bytes]:
        """Forget all blocks and return their names."""
        forgotten = list(self._places)
        self._free += [place for place in self._places.values() if place not in self._pins]
        self._places.clear()
        self._names.clear()
        self._idle.clear()
        return forgotten
