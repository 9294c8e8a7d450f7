"""How long flips take under load: one after the other, half of them drained first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tetri.bench.fleet import Fleet
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.types import Role

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_PAUSE_S = 0.2  # between two flips


@dataclass(frozen=True, slots=True)
class Times:
    """One flip, in real seconds; `drain_s` is 0 for one at once."""

    source: str
    drain_s: float
    commit_s: float


def time_flips(cluster: Fleet, send: Callable[[], object]) -> list[Times]:
    """Flip whoever is not the last of its role, until `send` has returned.

    Raises:
        UnsupportedError: A flip did not succeed, or a request failed.
    """
    failed: list[BaseException] = []

    def sending() -> None:
        try:
            send()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=sending, daemon=True)
    thread.start()
    found: list[Times] = []
    turns: Counter[str] = Counter()
    while thread.is_alive():
        name, role = _next(cluster.instances(), turns)
        flip = cluster.flip(name, role, now=len(found) % 4 >= 2)["flip"]
        found.append(Times(flip["source"], flip["drain_s"], flip["commit_s"]))
        turns[name] += 1
        time.sleep(_PAUSE_S)
    if failed:
        raise UnsupportedError(f"while roles flipped: {failed[0]}") from failed[0]
    return found


def _next(rows: Mapping[str, Mapping[str, Any]], turns: Counter[str]) -> tuple[str, Role]:
    """Whose turn it is, and what it becomes."""
    roles = Counter(row["role"] for row in rows.values())
    able = [name for name, row in rows.items() if roles[row["role"]] > 1]
    name = min(able, key=lambda each: (turns[each], each))
    return name, _OTHER[Role(rows[name]["role"])]
