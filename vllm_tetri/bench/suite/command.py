"""`vllm-tetri bench suite`: all experiments, one command after the other.

What was done before under the same conditions is not done again, so an interrupted suite
goes on where it stopped. One that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from vllm_tetri import __version__
from vllm_tetri.bench import setting
from vllm_tetri.bench.suite import experiments
from vllm_tetri.bench.suite.jobs import ANSWERS, MODEL, PREDICTOR, RIVAL
from vllm_tetri.bench.suite.process import carry_out, last_line
from vllm_tetri.bench.suite.record import Done, Record, Status, continued
from vllm_tetri.bench.suite.steps import Step, about_rival, missing
from vllm_tetri.errors import INTERRUPTED, ConfigError
from vllm_tetri.launch.machine import inspect, vllm_version

PROGRAM = (sys.executable, "-m", "vllm_tetri.cli")
LOG = "output.log"
_PLACEHOLDERS = {"model": MODEL, "predictor": PREDICTOR, "answers": ANSWERS, "rival": RIVAL}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="folder or name of a model with a tokenizer")
    add("--quick", action="store_true", help="small sizes: a quarter of an hour on two cores")
    add("--only", metavar="E2,E5", help="experiments to run (all); --list names them")
    add("--list", action="store_true", help="show the experiments and what they take")
    add("--rival", metavar="PROGRAM", help="path of a vllm-router, for the full bench modes")
    add("--predictor", metavar="FOLDER", help="a trained predictor, for e3 and e4")
    add("--answers", metavar="FILE", help="answers of predictor collect, for e4")
    add(
        "--output",
        type=Path,
        default=Path("bench-suite"),
        metavar="FOLDER",
        help="a folder per command, and suite.json (bench-suite)",
    )


def run(options: argparse.Namespace) -> int:
    """Run what is missing: 0, or 1 when something failed."""
    if options.only is not None:
        options.only = options.only.lower()
    wanted = experiments.chosen(options.only)
    console = setting.console()
    if options.list:
        console.print(overview(wanted))
        return 0
    known = _known(options)
    folder: Path = options.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}") from error
    record = continued(folder, conditions(options, known))
    jobs = experiments.jobs_of(wanted)
    if line := about_rival(options.quick, known, jobs):
        console.print(line)
    steps = missing(options, known, record, jobs, console)
    try:
        _run_all(steps, record, folder, console)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on with what is missing")
        raise
    return _summary(steps, record, folder, console)


def overview(wanted: Sequence[experiments.Experiment]) -> Table:
    """The experiments, for `--list`."""
    table = Table("experiment", "question", "paper", "runs on", "commands", "quick", "full")
    table.columns[0].no_wrap = True
    for each in wanted:
        jobs = experiments.jobs_of([each])
        times = [
            f"{sum(job.variant(is_quick).minutes for job in jobs):g} min"
            for is_quick in (True, False)
        ]
        names = ", ".join(job.command for job in jobs)
        table.add_row(each.title, each.question, each.figures, each.runs_on, names, *times)
    every = experiments.jobs_of(wanted)
    quick, full = (
        sum(job.variant(is_quick).minutes for job in every) for is_quick in (True, False)
    )
    table.caption = (
        f"a command that several share runs once: together {quick:.0f} min quick, "
        f"{full / 60:.0f} h full, on two CPU cores with a model of 135M parameters"
    )
    return table


def conditions(options: argparse.Namespace, known: Mapping[str, str]) -> dict[str, Any]:
    """What every result of a suite depends on."""
    machine = inspect()
    gpus = f", {len(machine.gpus)} GPU" if machine.gpus else ""
    return {
        "variant": "quick" if options.quick else "full",
        "model": known.get(MODEL, ""),
        "device": setting.device() + gpus,
        "cores": len(machine.cores),
        "vllm": vllm_version() or "not installed",
        "vllm_tetri": __version__,
        "python": sys.version.split()[0],
        "options": list(options.tail),
    }


def _known(options: argparse.Namespace) -> dict[str, str]:
    """Values of placeholders. What exists as a file is named from the root on."""
    if options.model is None:
        raise ConfigError("give MODEL, or --list to see the experiments")
    known = {}
    for name, placeholder in _PLACEHOLDERS.items():
        value = getattr(options, name)
        if value is None:
            continue
        if Path(value).exists():
            value = str(Path(value).resolve())
        elif name != "model":
            raise ConfigError(f"--{name} {value}: there is nothing of that name")
        known[placeholder] = value
    return known


# -- running -----------------------------------------------------------------------


def _run_all(steps: Sequence[Step], record: Record, folder: Path, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    is_shown = console.is_terminal  # else there are lines alone
    with Progress(*columns, console=console, disable=not is_shown) as progress:
        bar = _Bar(progress, steps)
        for step in steps:
            bar.begin(step)
            _run_one(step, record, folder, bar.look, console)


class _Bar:
    """How far the suite is, and how long it should still take."""

    def __init__(self, progress: Progress, steps: Sequence[Step]) -> None:
        self._progress = progress
        self._steps = steps
        self._total_s = sum(step.seconds for step in steps)
        self._task = progress.add_task("", total=self._total_s, left="")
        self._begun = 0
        self._now_s = 0.0  # that the step should take
        self._before_s = 0.0  # that those before it should have taken

    def begin(self, step: Step) -> None:
        """The next one."""
        self._before_s += self._now_s
        self._now_s = step.seconds
        self._begun += 1
        title = f"{step.job.name} ({self._begun} of {len(self._steps)})"
        self._progress.update(self._task, description=title)
        self.look(0.0)

    def look(self, took_s: float) -> None:
        """It has taken so long."""
        done_s = self._before_s + min(took_s, self._now_s)
        minutes = math.ceil((self._total_s - done_s) / 60)
        self._progress.update(self._task, completed=done_s, left=f"about {minutes} min left")


def _run_one(
    step: Step,
    record: Record,
    folder: Path,
    look: Callable[[float], None],
    console: Console,
) -> None:
    """Run it, and enter what became of it. It is entered as interrupted before it begins: so
    it stays when this process is killed."""
    own = folder / step.job.name
    own.mkdir(exist_ok=True)
    if step.is_anew:
        (own / step.job.result).unlink(missing_ok=True)
    started = monotonic()
    status, exit_status = Status.INTERRUPTED, INTERRUPTED
    _enter(step, status, exit_status, 0.0, record, folder)
    try:
        exit_status = carry_out([*PROGRAM, *step.command], own / LOG, look)
        is_good = exit_status == 0 and (own / step.job.result).exists()
        status = Status.DONE if is_good else Status.FAILED
    finally:
        took_s = round(monotonic() - started, 1)
        _enter(step, status, exit_status, took_s, record, folder)
        console.print(f"{step.job.name}: {status} after {took_s:.0f} s")
    if status is Status.FAILED:
        console.print(f"  {last_line(own / LOG)}", markup=False, highlight=False)


def _enter(
    step: Step, status: Status, exit_status: int, took_s: float, record: Record, folder: Path
) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    done = Done(step.shown, status, exit_status, took_s, now, step.files)
    record.jobs[step.job.name] = done
    record.write(folder)


def _summary(steps: Sequence[Step], record: Record, folder: Path, console: Console) -> int:
    failed = [step.job.name for step in steps if record.jobs[step.job.name].status is Status.FAILED]
    for name in failed:
        console.print(f"{name} failed; all that it said: {folder / name / LOG}")
    console.print(f"{len(steps) - len(failed)} of {len(steps)} commands done now")
    console.print(f"the report: vllm-tetri bench report {folder}", soft_wrap=True)
    return 1 if failed else 0
