"""What `bench admission` found, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench import picture
from vllm_tetri.bench.stats import Estimate, estimate, quantile

Run = Mapping[str, Any]

GREEDY = "greedy"
PACED = "instances compute a small model and keep the pace of a device of their own"


def mean_jct_s(run: Run) -> float:
    """Of one repeat."""
    return fmean(run["jct_s"])


def preemptions(run: Run) -> float:
    """Of one repeat."""
    return float(run["counters"]["preemptions"])


def against(runs: Sequence[Run], base: Sequence[Run], figure: Callable[[Run], float]) -> Estimate:
    """By which part a figure is larger than greedy's, repeat by repeat: the requests are
    the same there."""
    pairs = zip(runs, base, strict=True)
    return estimate([figure(run) / figure(other) - 1 for run, other in pairs if figure(other)])


def show(console: Console, results: Mapping[str, Any]) -> None:
    """Print it."""
    systems: Mapping[str, Sequence[Run]] = results["systems"]
    found = results["conditions"]
    console.print(
        f"{found['requests']} requests at once ({found['lengths']}), KV of "
        f"{found['kv_tokens']} tokens; {PACED}: {found['pace']}, run at {found['scale']}x; times "
        f"are the device's; {len(systems[GREEDY])} repeats, means with 95 % intervals"
    )
    table = Table(
        "admission, predictions", "preempted", "to greedy", "KV kept", "JCT (s)", "to greedy",
        "p99", "total (s)", "batch", "missed", "late (ms)",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    base = systems[GREEDY]
    for name in _in_order(systems):
        runs = systems[name]
        table.add_row(
            name,
            estimate([preemptions(run) for run in runs]).text(digits=0),
            _percent(runs, base, preemptions),
            estimate([float(run["counters"].get("swapped_out", 0)) for run in runs]).text(),
            estimate([mean_jct_s(run) for run in runs]).text(digits=1),
            _percent(runs, base, mean_jct_s),
            estimate([quantile(run["jct_s"], 0.99) for run in runs]).text(digits=1),
            estimate([run["total_s"] for run in runs]).text(digits=1),
            f"{fmean(run['batch'] for run in runs):.1f}",
            f"{fmean(run['counters'].get('predictions_missed', 0) for run in runs):.0f}",
            f"{1e3 * max(run['late_s'] for run in runs):.0f}",
        )
    console.print(table)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """The paper's Figure 18, and the preemptions behind it."""
    systems: Mapping[str, Sequence[Run]] = results["systems"]
    conditions = results["conditions"]
    load = f"{conditions['requests']} requests at once, KV of {conditions['kv_tokens']} tokens"
    figure, (left, right) = picture.new(f"{load}; {PACED}", columns=2)
    names = _in_order(systems)
    places = range(len(names))[::-1]
    base = systems[GREEDY]
    panels = {
        "preemptions": [estimate([preemptions(run) for run in systems[name]]) for name in names],
        "mean JCT, part of greedy's": [
            estimate(
                [mean_jct_s(a) / mean_jct_s(b) for a, b in zip(systems[name], base, strict=True)]
            )
            for name in names
        ],
    }
    for axis, (label, found) in zip((left, right), panels.items(), strict=True):
        axis.barh(
            places,
            [each.mean for each in found],
            xerr=[0.0 if each.half != each.half else each.half for each in found],
            color=[picture.COLORS[0 if name == GREEDY else 1] for name in names],
            capsize=3,
        )
        axis.set(xlabel=label, xlim=(0, None))
        axis.grid(axis="y", visible=False)
    right.axvline(1.0, color="#7a7a7a", linewidth=1)
    left.set_yticks(places, names)
    right.set_yticks(places, [""] * len(names))
    picture.save(figure, path)


def _in_order(systems: Mapping[str, Sequence[Run]]) -> list[str]:
    """Greedy first, then by policy."""
    return sorted(systems, key=lambda name: (name != GREEDY, name))


def _percent(runs: Sequence[Run], base: Sequence[Run], figure: Callable[[Run], float]) -> str:
    if runs is base or not any(figure(run) for run in base):
        return "-"
    return against(runs, base, figure).text(100.0) + " %"
