"""The prefix cache of an instance: which named blocks lie in its KV pool.

A name stands for `workload.NAME_TOKENS` tokens and all tokens before them, so it is many blocks of
the engine. Running requests that begin alike share them. What no request uses stays until its
memory is needed: the least recently used names go first, and the end of a prefix goes before its
start, as in vLLM.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


class PrefixCache:
    """Owner: its instance, which counts the memory. `changes` tells of every name that came or went
    since the reader took them whether it is here now."""

    def __init__(self) -> None:
        self.changes: dict[int, bool] = {}
        self._users: dict[int, int] = {}  # running requests by name
        self._kept: OrderedDict[int, None] = OrderedDict()  # unused, the first one to go first

    def __contains__(self, name: int) -> bool:
        return name in self._users or name in self._kept

    def find(self, names: Sequence[int]) -> tuple[int, int]:
        """Return how many of the names from the first one on are here, and how many of these are
        in use."""
        found = sum(1 for _ in takewhile(self.__contains__, names))
        return found, sum(name in self._users for name in names[:found])

    def use(self, names: Sequence[int]) -> int:
        """Add a user to each name, which is here from now on. Returns how many were in use before:
        these take no memory on top."""
        shared = 0
        for name in names:
            users = self._users.get(name, 0)
            self._users[name] = users + 1
            if users:
                shared += 1
            elif name in self._kept:
                del self._kept[name]
            else:
                self.changes[name] = True
        return shared

    def let_go(self, names: Sequence[int]) -> int:
        """Remove a user from each name. Returns how many are still in use."""
        shared = 0
        for name in reversed(names):
            self._users[name] -= 1
            if self._users[name]:
                shared += 1
            else:
                del self._users[name]
                self._kept[name] = None
        return shared

    def touch(self, names: Sequence[int]) -> None:
        """Keep what is unused of these names longer than all others."""
        for name in reversed(names):
            if name in self._kept:
                self._kept.move_to_end(name)

    def shrink(self, most: int) -> None:
        """Evict unused names until there are at most so many."""
        while len(self._kept) > most:
            name, _ = self._kept.popitem(last=False)
            self.changes[name] = False
