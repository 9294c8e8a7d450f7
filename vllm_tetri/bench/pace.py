"""How long a step of an imagined device takes, and how well an engine keeps to it.

Benchmarks of scheduling need several instances that do not slow each other down,
on machines with fewer cores than instances. So their engines compute a small
model, which takes little, and then wait until the step has taken as long as it
would on a device of its own (`vllm_tetri.bench.paced`). A step takes

    scale · (base_s + token_s · tokens + context_s · tokens that attention reads)

The constants are SmolLM2-135M's, bfloat16, on one core of an AMX server CPU:
13 ms a step, 0.61 ms a token (so a chunk of 256 is 1,500 prompt tokens a second),
2.9 µs per token of context.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

EXECUTOR = "vllm_tetri.bench.paced.PacedExecutor"
CONFIG_KEY = "pace"  # in vLLM's additional_config
_IDLE_S = 0.02  # more than an engine does between two steps


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations in seconds; see the module.

    Attributes:
        scale: Factor for all of it; below 1 the device is faster, which shortens a run.
        counts: File in which the engine keeps its `Counts`.
    """

    counts: str
    scale: float = 1.0
    base_s: float = 0.013
    token_s: float = 0.00061
    context_s: float = 2.9e-6

    def step_s(self, tokens: int, context_tokens: int) -> float:
        """A step that computes `tokens` behind `context_tokens` of their requests."""
        return self.scale * (self.base_s + tokens * self.token_s + context_tokens * self.context_s)

    def plain(self) -> dict[str, Any]:
        """For `--additional-config`."""
        return {CONFIG_KEY: dataclasses.asdict(self)}

    def text(self) -> str:
        """For captions."""
        return (
            f"{self.base_s * 1e3:g} ms + {self.token_s * 1e3:g} ms a token "
            f"+ {self.context_s * 1e6:g} µs a token of context"
        )


class Timeline:
    """When steps end. Belongs to the engine thread.

    While an engine is busy the next step begins where the last one should have ended,
    so what the host does between two steps, and a late wake-up, are made good for. After
    a longer pause it begins anew: the engine had nothing to do.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._due = self._ended = float("-inf")

    def begin(self, now: float, tokens: int, context_tokens: int) -> float:
        """When a step that begins now should end."""
        was_idle = now - self._ended > _IDLE_S
        self._due = (now if was_idle else self._due) + self._pace.step_s(tokens, context_tokens)
        return self._due

    def end(self, now: float) -> float:
        """The step has ended; returns by how much it is late, in seconds."""
        self._ended = now
        return max(0.0, now - self._due)


@dataclass(frozen=True, slots=True)
class Counts:
    """What an engine did since its start.

    Attributes:
        steps: Steps with tokens.
        requests: Of all steps, the requests they computed tokens of.
        paced_s: What those steps should have taken.
        late_s: The furthest that the end of a step was behind.
    """

    steps: float = 0.0
    requests: float = 0.0
    paced_s: float = 0.0
    late_s: float = 0.0


_LAYOUT = struct.Struct("4d")


class CountsFile:
    """`Counts` in memory that two processes share: the engine writes, the benchmark reads.

    A reader may see a step half counted; it reads when the engine is at rest.
    """

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_LAYOUT.size)
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    def read(self) -> Counts:
        return Counts(*_LAYOUT.unpack_from(self._map))

    def add(self, *, requests: int, paced_s: float, late_s: float) -> None:
        """One more step."""
        old = self.read()
        _LAYOUT.pack_into(
            self._map,
            0,
            old.steps + 1,
            old.requests + requests,
            old.paced_s + paced_s,
            max(old.late_s, late_s),
        )

    def clear(self) -> None:
        """Start anew, while the engine is at rest."""
        _LAYOUT.pack_into(self._map, 0, *dataclasses.astuple(Counts()))

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> CountsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
