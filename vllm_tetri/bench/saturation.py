"""`vllm-tetri bench saturation`: how much work a step needs to saturate this device.

The paper's figure 2 for any model: prefill throughput by tokens per step, with
the chunk that `--tetri-chunk-size auto` takes, and decode throughput by batch
size. One real instance measures itself, exactly as it does at start; the file
in which it remembers that is what is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.status import Status

from vllm_tetri.bench import picture
from vllm_tetri.bench.saturation_report import draw, show
from vllm_tetri.engine.profile import ProfileFile, read_file
from vllm_tetri.errors import INTERRUPTED, ConfigError, TetriError
from vllm_tetri.launch import up
from vllm_tetri.launch.child import Child
from vllm_tetri.launch.display import PHASES
from vllm_tetri.launch.keeper import Spec
from vllm_tetri.launch.machine import free_port, inspect, require_vllm
from vllm_tetri.launch.plan import make_plan
from vllm_tetri.policy.placement import Machine
from vllm_tetri.transport.leftovers import sweep_segments

# Any bound makes an instance measure all kinds of steps.
_MEASURE_ALL = ("--tetri-tbt-slo", "1")
_MEASURING = (re.compile("measuring what steps"), "measuring")
_LOOK_S = 0.2
_TAIL_SHOWN = 15


class BenchError(TetriError):
    """A benchmark could not be carried out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("model", help="model name or folder, as for vllm serve")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("saturation.svg"),
        metavar="FILE",
        help="the picture, .svg or .png; its numbers go beside it as .json; "
        "default: saturation.svg",
    )
    parser.add_argument("--cores", type=int, metavar="N", help="CPU cores to use; default: all")
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="longest time until everything is measured; default: 900",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print and draw; 0 when everything could be done."""
    picture.require_pictures()
    picture.require_writable(options.output)
    require_vllm()
    spec = _spec(options, machine_with(options.cores))
    console = Console()
    try:
        found = asyncio.run(_measure(spec, options.start_timeout, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED
    finally:
        sweep_segments()
    show(found, console)
    draw(found, options.output)
    numbers = options.output.with_suffix(".json")
    numbers.write_bytes(found.encode())
    console.print(f"{options.output} and {numbers} written")
    return 0


def machine_with(cores: int | None) -> Machine:
    """This machine with so many of its cores; None: with all.

    Raises:
        ConfigError: It has fewer.
    """
    machine = inspect()
    if cores is None:
        return machine
    if not 1 <= cores <= len(machine.cores):
        raise ConfigError(f"--cores {cores}: must be between 1 and {len(machine.cores)}")
    return replace(machine, cores=machine.cores[-cores:])


def _spec(options: argparse.Namespace, machine: Machine) -> Spec:
    """One instance of role both, as `up` would start it."""
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    words = ["--mode", "whole", "--both", "1", "--port", "0", "--flip", "off"]
    given = parser.parse_args([options.model, *words])
    given.tail = [*options.tail, *_MEASURE_ALL]
    return make_plan(given, machine).instances[0]


async def _measure(spec: Spec, timeout_s: float, console: Console) -> ProfileFile:
    loop = asyncio.get_running_loop()
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, this.cancel)
    with (
        tempfile.TemporaryDirectory(prefix="tetri-bench-") as cache,
        Status("starting", console=console) as status,
    ):
        progress = _Progress(status)
        # Nothing is remembered in a new folder, so the instance has to measure.
        environment = (*spec.placement.environment, ("TETRI_CACHE", cache))
        child = await Child.start(
            spec.command(free_port()),
            replace(spec.placement, environment=environment),
            progress.read,
        )
        death = asyncio.create_task(child.wait())
        try:
            return await _until_written(Path(cache), child, death, progress, timeout_s)
        finally:
            progress.enter("stopping")
            await asyncio.shield(child.stop())
            await asyncio.gather(death, return_exceptions=True)


async def _until_written(
    cache: Path, child: Child, death: asyncio.Task[int], progress: _Progress, timeout_s: float
) -> ProfileFile:
    deadline = time.monotonic() + timeout_s
    while True:
        is_dead = death.done()
        written = _written(cache)
        if written is not None:
            return written
        if is_dead or time.monotonic() > deadline:
            what = "ended" if is_dead else f"measured nothing for {timeout_s:.0f} s"
            tail = "\n".join(f"  | {line}" for line in list(child.tail)[-_TAIL_SHOWN:])
            raise BenchError(f"the instance {what}; the last it said:\n{tail}")
        progress.tick()
        await asyncio.sleep(_LOOK_S)


def _written(cache: Path) -> ProfileFile | None:
    paths = list(cache.glob("profiles/*.json"))
    return read_file(paths[0]) if paths else None


class _Progress:
    """What the instance does right now, from what it prints."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._started_s = time.monotonic()
        self._phase = ""
        self.enter("starting")

    def read(self, line: str) -> None:
        for pattern, phase in (*PHASES[:-1], _MEASURING):
            if pattern.search(line):
                self.enter(phase)

    def enter(self, phase: str) -> None:
        if phase != self._phase and not self._status.console.is_terminal:
            self._status.console.print(f"{self._elapsed_s:5.1f} s  {phase}")
        self._phase = phase
        self.tick()

    def tick(self) -> None:
        self._status.update(f"{self._phase} ({self._elapsed_s:.0f} s)")

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s
