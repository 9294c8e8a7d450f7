"""`vllm-tetri bench paper`: the papers' experiments again, in the simulator.

TetriInfer's Figures 11 to 16, 18 and 19 on the device it was measured on (docs/profiles.md says
how far that is known), DistServe's and Sarathi-Serve's questions on A100 cards by data sheet.
Nothing here is measured; the same policies run on real engines in other benchmarks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import Progress
from rich.table import Table

from vllm_tetri.bench import setting
from vllm_tetri.bench.paper import answers as paper_answers
from vllm_tetri.bench.paper import classes as paper_classes
from vllm_tetri.bench.paper import prompts as paper_prompts
from vllm_tetri.bench.paper import rates as paper_rates
from vllm_tetri.bench.paper.case import FULL, PROFILE, QUICK, Case, Size
from vllm_tetri.bench.report.values import METRICS
from vllm_tetri.bench.stats import estimate
from vllm_tetri.errors import ConfigError

_PARTS = (paper_classes, paper_prompts, paper_answers, paper_rates)


@dataclass(frozen=True, slots=True)
class Row:
    """A metric of a system, by seed."""

    experiment: str
    group: str
    system: str
    metric: str
    values: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much, and where it goes."""
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer requests and seeds: a minute")
    add("--only", metavar="E1,E5", help="experiments (e1,e2,e5,e6,e11,e12,e13)")
    add("--seeds", type=int, metavar="N", help=f"of everything random ({FULL.seeds})")
    add(
        "--output",
        type=Path,
        default=Path("bench-paper"),
        metavar="FOLDER",
        help="where paper.json goes (bench-paper)",
    )


def run(options: argparse.Namespace) -> int:
    """Simulate, print, and write paper.json."""
    size = QUICK if options.quick else FULL
    if options.seeds is not None:
        setting.at_least(options, {"seeds": 1})
        size = Size(size.requests, options.seeds)
    chosen = _chosen(list(cases(size)), options.only)
    setting.make_output(options)
    console = setting.console()
    with Progress(console=console, refresh_per_second=1) as progress:
        rows = _measure(chosen, size.seeds, progress)
    conditions = {"profile": PROFILE, "simulated": True, **asdict(size)}
    found = {"conditions": conditions, "rows": [asdict(row) for row in rows]}
    setting.write_json(options.output / "paper.json", found)
    for table in _tables(rows):
        console.print(table)
    console.print(f"written: {options.output}/paper.json (simulated: {PROFILE}, an estimate)")
    return 0


def cases(size: Size) -> Iterator[Case]:
    """Everything."""
    for part in _PARTS:
        yield from part.cases(size)


def _chosen(all_cases: list[Case], only: str | None) -> list[Case]:
    if only is None:
        return all_cases
    wanted, known = only.split(","), sorted({case.experiment for case in all_cases})
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--only {name}: there are {', '.join(known)}")
    return [case for case in all_cases if case.experiment in wanted]


def _measure(chosen: list[Case], seeds: int, progress: Progress) -> list[Row]:
    task = progress.add_task("simulating", total=len(chosen) * seeds)
    rows = []
    for case in chosen:
        progress.update(task, description=f"{case.experiment}, {case.group}: {case.system}")
        figures: dict[str, list[float]] = {}
        for seed in range(seeds):
            for metric, value in case.play(seed).items():
                figures.setdefault(metric, []).append(value)
            progress.advance(task)
        rows += [
            Row(case.experiment, case.group, case.system, metric, values)
            for metric, values in figures.items()
        ]
    return rows


def _tables(rows: list[Row]) -> Iterator[Table]:
    """One per experiment and group."""
    groups = dict.fromkeys((row.experiment, row.group) for row in rows)
    for experiment, group in groups:
        own = [row for row in rows if (row.experiment, row.group) == (experiment, group)]
        metrics = list(dict.fromkeys(row.metric for row in own))
        heads = [METRICS[metric].title for metric in metrics]
        table = Table("system", *heads, title=f"{experiment}: {group} (simulated)")
        for system in dict.fromkeys(row.system for row in own):
            values = {row.metric: row.values for row in own if row.system == system}
            table.add_row(system, *(_cell(metric, values[metric]) for metric in metrics))
        yield table


def _cell(name: str, values: list[float]) -> str:
    metric = METRICS[name]
    return estimate(values).text(metric.factor, metric.digits)
