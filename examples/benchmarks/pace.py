"""Engines on modelled step times: several instances on few cores that do not slow each other down.

The engine computes a small model and then waits until the step has taken as long as on a device of
its own, by a profile of the simulator (`vllm_tetri.sim.cost.profiles`) and a scale. KV is real and
is handed over; only the time is not the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from examples.benchmarks.client import Reply, Request
from examples.benchmarks.cluster import Site, System
from vllm_tetri.engine import endpoint
from vllm_tetri.engine.compat import SchedulerOutput
from vllm_tetri.engine.executor import CalmExecutor
from vllm_tetri.engine.pacing import StepWork, work_of
from vllm_tetri.sim.cost.hardware import model
from vllm_tetri.sim.cost.profiles import Profile, profile
from vllm_tetri.sim.links import link

BLOCK_TOKENS = 32  # the least of vLLM on CPUs, so that a small pool has many blocks
WINDOW_TOKENS = 4096
ROOT = Path(__file__).parents[2]
# Of instances whose single tokens are not looked at: each would cost more than computing it.
NO_STREAM = ("--stream-interval", "1000000")
_MOST_KV_TOKENS = 65_536  # in the memory of this machine
IDLE_S = 0.02  # more than an engine does between two steps


@dataclass(frozen=True, slots=True)
class Pace:
    """Step times in seconds.

    Attributes:
        folder: Every engine writes there by how much its worst step was late.
        scale: Below 1 the device is faster, which shortens a run; above, slower, which the cores
            of this machine keep up with.
        profile: The device; SmolLM2-135M on one core of an AMX server CPU unless given.
    """

    folder: str
    scale: float = 1.0
    profile: str = "smollm2-1core"


class Timeline:
    """When steps end. While an engine is busy, a step begins where the last one should have ended,
    so what the host does between two steps does not count."""

    def __init__(self, pace: Pace) -> None:
        self._cost, self._scale = profile(pace.profile).cost, pace.scale
        self._due = self._ended = float("-inf")

    def begin(self, work: StepWork) -> float:
        """Return when a step should end."""
        was_idle = work.begun_s - self._ended > IDLE_S
        step_s = self._scale * self._cost.step_s(*work[1:])
        self._due = (work.begun_s if was_idle else self._due) + step_s
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
        if scheduler_output.total_num_scheduled_tokens:
            self._due = self._timeline.begin(work_of(scheduler_output, time.monotonic()))
        return super().execute_model(scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        output = super().sample_tokens(grammar_output, non_block)
        if self._due is not None:
            time.sleep(max(0.0, self._due - time.monotonic()))
            late_s = self._timeline.end(time.monotonic())
            if late_s > self._worst_s or not self._report.exists():
                self._worst_s = late_s
                self._report.write_text(f"{late_s}\n")
        return output


def on_device(
    site: Site, pace: Pace, kv_tokens: int, *, is_ours: bool, serve: Sequence[str] = ()
) -> Site:
    """Give every engine of a site a device of its own with KV memory for `kv_tokens`."""
    Path(pace.folder).mkdir(exist_ok=True)
    words = [
        *("--distributed-executor-backend", "examples.benchmarks.pace.PacedExecutor"),
        *("--additional-config", json.dumps({"pace": asdict(pace)}), "--dtype", "float32"),
        *("--block-size", str(BLOCK_TOKENS), "--max-model-len", str(WINDOW_TOKENS)),
        *("--num-gpu-blocks-override", str(kv_tokens // BLOCK_TOKENS + 1)),
        *("--kv-cache-memory-bytes", "128M", "--max-num-seqs", "256"),
        *("--max-num-queued-tokens", str(1 << 30)),
    ]
    if is_ours:
        words += ["--tetri-arena-bytes", "128M", "--tetri-report-period", str(0.1 * pace.scale)]
    environment = {**site.environment, "PYTHONPATH": str(ROOT)}
    return replace(site, serve=(*words, *serve, *site.serve), environment=environment)


def worst_s(folder: Path) -> float:
    """Return by how much the worst step of all engines was late, and forget it."""
    found: Iterable[Path] = list(folder.glob("*.late"))
    late = [float(each.read_text() or 0) for each in found]
    for each in found:
        each.unlink()
    return max(late, default=0.0)


Play = Callable[[Sequence[Request]], list[Reply]]
"""Plays a schedule."""


@dataclass(frozen=True, slots=True)
class Device:
    """What every engine of a benchmark runs on: this machine, or a modelled device each."""

    profile: Profile | None = None
    scale: float = 1.0
    kv_tokens: int = 0
    link: float = 0.0  # bytes per second between two devices

    def on(self, site: Site, system: System) -> Site:
        """Return a site whose engines are such devices."""
        if self.profile is None:
            return site
        usual, own = self.profile.kv_token_bytes, 2 * model(site.model).kv_token_bytes  # float32
        serve = list[str]()
        if system.up and usual:
            # A token's KV takes as long as on the device.
            megabytes = self.link * own / usual / self.scale / 1e6
            serve = ["--tetri-link", f"emulate:{megabytes:.3f}MB/s,5us"]
        paced = Pace(str(site.folder / "late"), self.scale, self.profile.name)
        return on_device(site, paced, self.kv_tokens, is_ours=bool(system.up), serve=serve)

    def in_its_time(self, play: Play) -> Play:
        """Return what plays schedules whose times are the device's, as are those of replies."""
        if self.profile is None:
            return play

        def scaled(requests: Sequence[Request]) -> list[Reply]:
            due = [replace(each, at_s=each.at_s * self.scale) for each in requests]
            return in_device_time(play(due), self.scale)

        return scaled

    def lateness(self, site: Site) -> dict[str, float]:
        """Return by how many ms the worst step since the last call was late, and forget it."""
        return {} if self.profile is None else {"late_ms": 1e3 * worst_s(site.folder / "late")}

    @property
    def facts(self) -> dict[str, Any]:
        """What a result file says of it."""
        if self.profile is None:
            return {}
        return {**asdict(replace(self, profile=None)), "profile": self.profile.name}


def in_device_time(replies: Iterable[Reply], scale: float) -> list[Reply]:
    """Return replies with times as if the device was as fast as its profile says."""
    return [
        replace(
            each,
            ttft_s=each.ttft_s / scale,
            jct_s=each.jct_s / scale,
            gaps_us=[round(gap / scale) for gap in each.gaps_us],
        )
        for each in replies
    ]


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `device_of` reads."""
    add = parser.add_argument
    add("--profile", help="every engine keeps the pace of this device (vllm-tetri sim)")
    add("--scale", type=float, default=1.0, help="of its step times; 1")
    add("--kv-tokens", type=int, help="its memory for KV; as in the profile, at most 65,536")
    add("--kv-link", default="roce", help="between devices: roce, nvlink or Gbit/s; roce")
    add("--devices", type=int, default=1, help="of a system; rates are so many times stock's; 1")


def device_of(options: argparse.Namespace) -> Device:
    """Return what `--profile` names, this machine without it."""
    if options.profile is None:
        return Device()
    known = profile(options.profile)
    kv_tokens = options.kv_tokens or min(known.kv_tokens or _MOST_KV_TOKENS, _MOST_KV_TOKENS)
    return Device(known, options.scale, kv_tokens, link(options.kv_link))
