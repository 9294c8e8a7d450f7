"""Engines on modelled step times: several instances on few cores that do not slow each other down.

The engine computes a small model and then waits until the step has taken as long as on a device of
its own: scale * (base + per token + per token of context). The constants are SmolLM2-135M's,
bfloat16, on one core of an AMX server CPU. KV is real and is handed over; only the time is not the
machine's. The functions below give what `vllm serve` needs for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_tetri.engine import endpoint
from vllm_tetri.engine.compat import SchedulerOutput
from vllm_tetri.engine.executor import CalmExecutor

BLOCK_TOKENS = 32  # the least of vLLM on CPUs, so that a small pool has many blocks
WINDOW_TOKENS = 4096
IDLE_S = 0.02  # more than an engine does between two steps


@dataclass(frozen=True, slots=True)
class Pace:
    """Step times in seconds.

    Attributes:
        folder: Every engine writes there by how much its worst step was late.
        scale: Below 1 the device is faster, which shortens a run.
    """

    folder: str
    scale: float = 1.0
    base_s: float = 0.013
    token_s: float = 0.00061
    context_s: float = 2.9e-6

    def step_s(self, tokens: int, context_tokens: int) -> float:
        """Time of a step that computes `tokens` after `context_tokens` of their requests."""
        return self.scale * (self.base_s + tokens * self.token_s + context_tokens * self.context_s)


class Timeline:
    """When steps end. While an engine is busy, a step begins where the last one should have ended,
    so what the host does between two steps does not count."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._due = self._ended = float("-inf")

    def begin(self, now: float, tokens: int, context_tokens: int) -> float:
        """Return when a step that begins now should end."""
        was_idle = now - self._ended > IDLE_S
        self._due = (now if was_idle else self._due) + self._pace.step_s(tokens, context_tokens)
        return self._due

    def end(self, now: float) -> float:
        """Record the end of the step; return by how much it is late."""
        self._ended = now
        return max(0.0, now - self._due)


class PacedExecutor(CalmExecutor):
    """Computes a step, then sleeps until it has taken as long as its `Pace` says."""

    def _init_executor(self) -> None:
        # What instances of one machine share is its cores, which a modelled device has none of.
        endpoint.device_place = lambda gpu: f"modelled {os.getpid()}"  # type: ignore[attr-defined]
        super()._init_executor()
        pace = Pace(**self.vllm_config.additional_config["pace"])
        self._timeline = Timeline(pace)
        self._report = Path(pace.folder) / f"{os.getpid()}.late"
        self._worst_s = 0.0
        self._due: float | None = None

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self._due = None
        if tokens := scheduler_output.total_num_scheduled_tokens:
            known = scheduler_output.scheduled_cached_reqs.num_computed_tokens
            new = [each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs]
            self._due = self._timeline.begin(time.monotonic(), tokens, sum(known) + sum(new))
        return super().execute_model(scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        output = super().sample_tokens(grammar_output, non_block)
        if self._due is not None:
            time.sleep(max(0.0, self._due - time.monotonic()))
            late_s = self._timeline.end(time.monotonic())
            if late_s > self._worst_s:
                self._worst_s = late_s
                self._report.write_text(f"{late_s}\n")
        return output


def device_options(folder: Path, scale: float, kv_tokens: int) -> tuple[str, ...]:
    """Return options of `vllm serve` for a modelled device with KV memory for `kv_tokens`."""
    pace = {"pace": asdict(Pace(str(folder), scale))}
    return (
        *("--distributed-executor-backend", "examples.benchmarks.pace.PacedExecutor"),
        *("--additional-config", json.dumps(pace), "--dtype", "float32"),
        *("--block-size", str(BLOCK_TOKENS), "--max-model-len", str(WINDOW_TOKENS)),
        *("--num-gpu-blocks-override", str(kv_tokens // BLOCK_TOKENS + 1)),
        *("--kv-cache-memory-bytes", "128M", "--max-num-seqs", "256"),
        *("--max-num-queued-tokens", str(1 << 30)),
    )


def our_options(scale: float) -> tuple[str, ...]:
    """Return the further options of an instance of ours on such a device."""
    return ("--tetri-arena-bytes", "128M", "--tetri-report-period", str(0.1 * scale))


def options(folder: Path, scale: float, kv_tokens: int) -> tuple[str, ...]:
    """Return all options of an instance of ours whose single tokens are not looked at: each would
    cost more than computing it."""
    device = device_options(folder, scale, kv_tokens)
    return (*device, *our_options(scale), "--stream-interval", "1000000")


def worst_s(folder: Path) -> float:
    """Return by how much the worst step of all engines was late, and forget it."""
    found: Iterable[Path] = list(folder.glob("*.late"))
    late = [float(each.read_text() or 0) for each in found]
    for each in found:
        each.unlink()
    return max(late, default=0.0)
