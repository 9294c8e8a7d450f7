"""What `bench order` found, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench import picture
from vllm_tetri.bench.stats import Estimate, estimate, quantile

Turns = Mapping[str, Sequence[Mapping[str, Any]]]

_MS = 1e3
_US = 1e6
FCFS = "fcfs"


def over_repeats(turns: Sequence[Mapping[str, Any]], key: str, part: float | None) -> Estimate:
    """Mean (`part` None) or quantile of one figure per prompt, averaged over repeats."""
    return estimate([_figure(turn, key, part) for turn in turns])


def against(
    turns: Sequence[Mapping[str, Any]],
    other: Sequence[Mapping[str, Any]],
    key: str,
    part: float | None,
) -> Estimate:
    """By which part of `other`'s a figure is larger, repeat by repeat: both computed the
    same prompts there."""
    return estimate(
        [
            _figure(turn, key, part) / _figure(base, key, part) - 1
            for turn, base in zip(turns, other, strict=True)
        ]
    )


def show(console: Console, results: Mapping[str, Any]) -> None:
    """Print one table per part."""
    conditions = results["conditions"]
    ours = conditions["engines"]["ours"]
    console.print(
        f"{ours['device']}, {conditions['cores']} core(s), vLLM {ours['vllm']}, "
        f"{conditions['model']}, chunk {ours['budget_tokens']}, {conditions['requests']} prompts "
        f"({conditions['lengths']}, x{conditions['scale']}), {conditions['repeats']} repeats; "
        "means with 95 % intervals"
    )
    if "queue" in results:
        console.print(_latencies("A queue that is full at the start", results["queue"]["systems"]))
    if "arrivals" in results:
        found = results["arrivals"]
        title = f"Prompts that come one by one, {found['rate']:.1f}/s, load {found['load']:.2f}"
        console.print(_latencies(title, found["systems"]))
    if "overhead" in results:
        console.print(_overhead(results["overhead"]))


def _latencies(title: str, systems: Turns) -> Table:
    table = Table(
        "order, sched batch", "waiting (ms)", "to fcfs", "TTFT (ms)", "to fcfs", "TTFT p50",
        "TTFT p99", "p99 to fcfs", "total (s)", "full chunks", title=title,
    )  # fmt: skip
    base = systems[FCFS]
    for name, turns in systems.items():
        table.add_row(
            name,
            over_repeats(turns, "waiting_s", None).text(_MS),
            _percent(against(turns, base, "waiting_s", None)),
            over_repeats(turns, "ttft_s", None).text(_MS),
            _percent(against(turns, base, "ttft_s", None)),
            over_repeats(turns, "ttft_s", 0.5).text(_MS),
            over_repeats(turns, "ttft_s", 0.99).text(_MS),
            _percent(against(turns, base, "ttft_s", 0.99)),
            estimate([turn["total_s"] for turn in turns]).text(1.0, 2),
            _full(turns),
        )
    return table


def _overhead(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    table = Table(
        "order, sched batch", "schedule (us)", "above stock", "p99", "update (us)", "above stock",
        "prompts a step", "steps",
        title="The scheduler's part of a step, with at least 1,000 prompts waiting",
    )  # fmt: skip
    stock = next(iter(found.values()))
    for name, steps in found.items():
        schedule, update = (fmean(steps[key]) * _US for key in ("schedule_s", "update_s"))
        table.add_row(
            name,
            f"{schedule:.0f}",
            f"{schedule - fmean(stock['schedule_s']) * _US:+.0f}",
            f"{quantile(steps['schedule_s'], 0.99) * _US:.0f}",
            f"{update:.0f}",
            f"{update - fmean(stock['update_s']) * _US:+.0f}",
            f"{fmean(steps['requests']):.1f}",
            str(len(steps["schedule_s"])),
        )
    return table


def draw(results: Mapping[str, Any], path: Path) -> None:
    """The paper's Figure 16: latency by sched batch, one line per order."""
    systems: Turns = results["queue"]["systems"]
    panels: list[tuple[str, str, float | None]] = [
        ("mean waiting (ms)", "waiting_s", None),
        ("mean TTFT (ms)", "ttft_s", None),
        ("TTFT p99 (ms)", "ttft_s", 0.99),
    ]
    figure, axes = picture.new("Order of prompts in a full queue", len(panels))
    for axis, (label, key, part) in zip(axes, panels, strict=True):
        _panel(axis, systems, lambda turns, k=key, p=part: over_repeats(turns, k, p))  # type: ignore[misc]
        axis.set_ylabel(label)
        axis.set_xlabel("sched batch (prompts)")
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    picture.save(figure, path)


def _panel(
    axis: Any, systems: Turns, figure_of: Callable[[Sequence[Mapping[str, Any]]], Estimate]
) -> None:
    lines: dict[str, dict[int, Estimate]] = {}
    flat: dict[str, Estimate] = {}
    for name, turns in systems.items():
        policy, _, batch = name.rpartition(" ")
        if batch.isdecimal():
            lines.setdefault(policy, {})[int(batch)] = figure_of(turns)
        else:
            flat[name] = figure_of(turns)
    batches = sorted({batch for line in lines.values() for batch in line})
    places = range(len(batches))
    for policy, line in lines.items():
        points = [line[batch] for batch in batches]
        means = [point.mean * _MS for point in points]
        spread = [0.0 if point.half != point.half else point.half * _MS for point in points]
        axis.errorbar(places, means, spread, marker="o", markersize=3, capsize=2, label=policy)
    for (name, level), style in zip(flat.items(), (":", "--", "-"), strict=False):
        axis.axhline(level.mean * _MS, color="#7a7a7a", linestyle=style, linewidth=1, label=name)
    axis.set_xticks(places, [str(batch) for batch in batches])


def _figure(turn: Mapping[str, Any], key: str, part: float | None) -> float:
    values = turn[key]
    return fmean(values) if part is None else quantile(values, part)


def _full(turns: Sequence[Mapping[str, Any]]) -> str:
    parts = [turn["full_part"] for turn in turns if turn["full_part"] is not None]
    return f"{fmean(parts):.1%}" if parts else "-"


def _percent(change: Estimate) -> str:
    return change.text(100.0) + " %"
