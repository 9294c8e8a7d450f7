"""Names that are worth remembering for a while."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Remembered(Generic[Value]):
    """What is known by name, bounded in number and in time: the oldest goes first.
    Thread-safe.

    Args:
        most: Names at a time.
        keep_s: How long one is kept.
        clock: Monotonic seconds.
    """

    def __init__(
        self, *, most: int, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._keep_s = keep_s
        self._clock = clock
        self._lock = Lock()  # guards what follows where it is changed
        self._entries: OrderedDict[str, tuple[float, Value]] = OrderedDict()  # until when

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __setitem__(self, name: str, value: Value) -> None:
        with self._lock:
            self._entries[name] = (self._clock() + self._keep_s, value)
            self._entries.move_to_end(name)
            self._drop_old()

    def pop(self, name: str) -> Value | None:
        """What is remembered of it, for the last time; None if that is nothing."""
        with self._lock:
            found = self._entries.pop(name, None)
        return found[1] if found is not None else None

    def expire(self) -> None:
        """Forget what is too old; done with every new name as well."""
        with self._lock:
            self._drop_old()

    def _drop_old(self) -> None:
        now = self._clock()
        while self._entries:
            until, _ = next(iter(self._entries.values()))
            if until > now and len(self._entries) <= self._most:
                return
            self._entries.popitem(last=False)
