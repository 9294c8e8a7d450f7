"""What `vllm-tetri bench paper` simulates: cases, on the paper's device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vllm_tetri.sim.cluster import Outcome, run
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.setting import Setting, Shape, of_profile
from vllm_tetri.sim.workload import Ask, draw

PROFILE = "opt-13b-2xv100"
_BLOCK_SIZE = 16
_ROOM = 8  # KV that may arrive beside a pool, by prompts of a window
_WINDOW_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Size:
    """How much is simulated.

    Attributes:
        requests: By experiment where the paper says how many.
        seeds: Of everything random.
    """

    requests: dict[str, int]
    seeds: int


FULL = Size({"e1": 128, "e2": 128, "e5": 256, "e6": 32, "e12": 1000}, 8)
QUICK = Size({"e1": 64, "e2": 64, "e5": 128, "e6": 16, "e12": 200}, 2)


@dataclass(frozen=True, slots=True)
class Case:
    """One system, asked one thing.

    Attributes:
        experiment: Such as `e1`.
        group: What is asked; systems of a group get the same requests.
        play: Its figures with a seed, by metric (`report.values.METRICS`).
    """

    experiment: str
    group: str
    system: str
    play: Callable[[int], dict[str, float]]


def shape_of(name: str = PROFILE) -> Shape:
    """An instance of a profile, with the paper's chunk."""
    found = profile(name)
    blocks = found.kv_blocks(_BLOCK_SIZE)
    assert blocks is not None, "profiles of this benchmark know their memory"
    arena_tokens = _ROOM * _WINDOW_TOKENS
    shape = Shape(kv_blocks=blocks, block_size=_BLOCK_SIZE, arena_tokens=arena_tokens)
    return of_profile(shape, found)


def at_once(kind: str, count: int, seed: int, accuracy: float = 1.0) -> list[Ask]:
    """Requests that are all there at the beginning."""
    asks = draw(kind, count, 1.0, seed, accuracy=accuracy)
    return [replace(ask, arrival_s=0.0) for ask in asks]


def played(setting: Setting, asks: list[Ask]) -> Outcome:
    """What came of it; nobody is refused."""
    outcome = run(setting, asks)
    assert not outcome.refused
    return outcome
