"""What `vllm-tetri bench predictor` found: rows, a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench import picture
from vllm_tetri.bench.stats import Estimate, estimate, quantile

ALONE, AGAIN = "no predictor", "no predictor, again"
PARALLEL, SEQUENTIAL = "parallel", "sequential"
QUEUE, SPREAD = "all at once", "arrivals"
# A prompt is unaffected when its first token comes no later than this after its time
# without a predictor.
UNAFFECTED = 1.05
_MS = 1e3


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run the same prompts, beside running them without a predictor.

    Differences and ratios are of runs of the same prompts; the estimates are over runs.
    """

    place: str
    kind: str
    name: str
    ttft: Estimate
    ttft_p99: Estimate
    more_ttft: Estimate
    more_p99: Estimate
    more_throughput: Estimate
    unaffected: Estimate
    missed: float | None


def rows(results: dict[str, Any]) -> list[Row]:
    """Every row of the table."""
    made = []
    for place, found in results["places"].items():
        for kind, runs in found["runs"].items():
            made += [
                _row(place, kind, name, runs[name], runs[ALONE])
                for name in (ALONE, AGAIN, PARALLEL, SEQUENTIAL)
            ]
    return made


def _row(
    place: str, kind: str, name: str, runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]
) -> Row:
    pairs = list(zip(runs, base, strict=True))
    return Row(
        place=place,
        kind=kind,
        name=name,
        ttft=estimate([_MS * _mean(run) for run in runs]),
        ttft_p99=estimate([_MS * _p99(run) for run in runs]),
        more_ttft=estimate([_more(_mean(run), _mean(one)) for run, one in pairs]),
        more_p99=estimate([_more(_p99(run), _p99(one)) for run, one in pairs]),
        more_throughput=estimate([_more(one["total_s"], run["total_s"]) for run, one in pairs]),
        unaffected=estimate([_unaffected(run["ttft_s"], one["ttft_s"]) for run, one in pairs]),
        missed=_missed(runs) if name in (PARALLEL, SEQUENTIAL) else None,
    )


def _mean(run: dict[str, Any]) -> float:
    return fmean(run["ttft_s"])


def _p99(run: dict[str, Any]) -> float:
    return quantile(run["ttft_s"], 0.99)


def _more(value: float, than: float) -> float:
    """In percent."""
    return 100 * (value / than - 1)


def _unaffected(ttft_s: Sequence[float], alone_s: Sequence[float]) -> float:
    """Share of prompts, in percent."""
    pairs = zip(ttft_s, alone_s, strict=True)
    return 100 * fmean(mine <= UNAFFECTED * theirs for mine, theirs in pairs)


def _missed(runs: Sequence[dict[str, Any]]) -> float:
    """Share of prompts without a prediction when it was due, in percent."""
    return 100 * fmean(run["missed"] / len(run["ttft_s"]) for run in runs)


def show(console: Console, results: dict[str, Any]) -> None:
    """Print it."""
    conditions = results["conditions"]
    engine, predictor = conditions["engine"], conditions["predictor"]
    console.print(
        f"{conditions['device']}, vLLM {engine['vllm']}, {conditions['model']} {engine['dtype']} "
        f"on cores {conditions['engine_cores']}, chunk {conditions['chunk']}; predictor "
        f"{predictor['base']}, window {predictor['window']}; {conditions['requests']} prompts a "
        f"run ({conditions['lengths']}), {conditions['repeats']} runs, means with 95 % intervals; "
        f"arrivals at {conditions['load']:g} of what the engine can do"
    )
    for kind in (QUEUE, SPREAD):
        table = Table(title=f"Prompts: {kind}")
        for title in (
"predictor's core", "mode", "TTFT mean (ms)", "p99 (ms)", "mean: more (%)",
            "p99: more (%)", "throughput: more (%)", "unaffected (%)", "late (%)",
        ):  # fmt: skip
            table.add_column(
                title, justify="left" if title in ("predictor on", "mode") else "right"
            )
        for row in rows(results):
            if row.kind == kind:
                table.add_row(row.place, row.name, *_cells(row))
        console.print(table)
    for place, found in results["places"].items():
        for kind, runs in found["predictor_alone"].items():
            took_s = [each for run in runs for each in run["took_s"]]
            rate = fmean(len(run["took_s"]) / run["total_s"] for run in runs)
            console.print(
                f"predictor alone, {place} core, {kind}: mean {_MS * fmean(took_s):.1f} ms, "
                f"p99 {_MS * quantile(took_s, 0.99):.1f} ms, {rate:.1f} prompts/s"
            )


def _cells(row: Row) -> list[str]:
    is_base = row.name == ALONE
    relative = (row.more_ttft, row.more_p99, row.more_throughput, row.unaffected)
    return [
        row.ttft.text(digits=1),
        row.ttft_p99.text(digits=1),
        *("" if is_base else each.text(digits=1) for each in relative),
        "" if row.missed is None else f"{row.missed:.1f}",
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    """The paper's Figure 17: latencies and throughput, relative to no predictor."""
    made = rows(results)
    figure, axes = picture.new("What a length predictor costs prompts", columns=3)
    panels = (
        ("mean TTFT", "more_ttft"),
        ("p99 TTFT", "more_p99"),
        ("throughput", "more_throughput"),
    )
    labels = [(place, kind) for place in results["places"] for kind in (QUEUE, SPREAD)]
    names = (AGAIN, PARALLEL, SEQUENTIAL)
    for axis, (title, field) in zip(axes, panels, strict=True):
        for shift, name in enumerate(names):
            chosen = [
                next(row for row in made if (row.place, row.kind, row.name) == (*label, name))
                for label in labels
            ]
            estimates: list[Estimate] = [getattr(row, field) for row in chosen]
            axis.errorbar(
                [index + 0.2 * (shift - 1) for index in range(len(labels))],
                [each.mean for each in estimates], yerr=[each.half for each in estimates],
                fmt="o", capsize=3, label=name,
            )  # fmt: skip
        axis.axhline(0, color="#7a7a7a", linewidth=0.8)
        axis.set_xticks(range(len(labels)))
        axis.set_xticklabels([f"{place}\n{kind}" for place, kind in labels], fontsize=6)
        axis.set(title=f"{title}, more than without (%)")
    axes[0].legend()
    picture.save(figure, path)
