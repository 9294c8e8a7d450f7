"""What `vllm-tetri bench modes` found, as Markdown and on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench.arrivals import Slo
from vllm_tetri.bench.modes import nixl
from vllm_tetri.bench.modes.cells import Raw, Speed
from vllm_tetri.bench.modes.figures import (
    COMPARED,
    METRICS,
    Metric,
    Ratio,
    Results,
    Slos,
    best_other,
    ratio,
)
from vllm_tetri.bench.modes.load import CLASSES, MEASURED, RATES, Load, loads
from vllm_tetri.bench.modes.systems import ADAPTIVE, DEFAULT, NIXL, STOCK, SYSTEMS

_NOTHING = "–"
_DISTURBED = 0.1  # of the cores' time
_MARKS = {True: " ✓", False: " ✗", None: ""}
_READING = (
    "Means over repeats, ± half a 95 % interval (Student). ✓ and ✗: better or worse, and the "
    "interval of the ratio, repeat by repeat, leaves out 1."
)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table, for Markdown or a terminal; the first column is text."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """With its title as a heading."""
        rule = ["---", *["--:"] * (len(self.heads) - 1)]
        lines = ["| " + " | ".join(row) + " |" for row in (self.heads, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines])

    def table(self) -> Table:
        """For rich."""
        table = Table(title=self.title)
        for place, head in enumerate(self.heads):
            table.add_column(head, justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def markdown(raw: Raw, results: Results) -> str:
    """The whole report."""
    ours = [name for name in results.systems() if SYSTEMS[name].is_ours]
    ours.sort(key=lambda name: name != ADAPTIVE)
    parts = ["# Modes side by side", conditions(raw.head, results.slo), missing(raw, results)]
    if NIXL in results.systems():
        parts.append(nixl.CAVEAT)
    for name in ours:
        grid = ratios(results, name)
        parts += ["## " + grid.title, grid.markdown().partition("\n\n")[2], verdicts(results, name)]
    parts += ["## Rates that are sustained", sustained(results).markdown().partition("\n\n")[2]]
    parts += ["## Every cell", *(cell.markdown() for cell in cells(results))]
    parts += ["## The machine", disturbed(raw), drift(raw.speeds)]
    return "\n\n".join(part for part in parts if part) + "\n"


def show(console: Console, raw: Raw, results: Results) -> None:
    """Print the summary."""
    console.print(conditions(raw.head, results.slo))
    ours = [name for name in results.systems() if SYSTEMS[name].is_ours]
    if not ours:
        for grid in cells(results):
            console.print(grid.table())
    for name in [ADAPTIVE] if ADAPTIVE in ours else ours:
        console.print(ratios(results, name).table())
        console.print(verdicts(results, name))
    console.print(missing(raw, results), disturbed(raw))


# -- parts -------------------------------------------------------------------------


def conditions(head: Mapping[str, Any], slo: Slos) -> str:
    """What it was measured under, and what was measured first."""
    told, lone = head["conditions"], head["lone"]
    options = " ".join(told["options"]) or "none"
    capacities = ", ".join(
        f"{name} {head['capacities'][name]:.2f}" for name in MEASURED if name in head["capacities"]
    )
    rates = ", ".join(f"{name} {part:g}" for name, part in RATES.items())
    return (
        f"{told['device']}, {told['cores']} cores for every system and the client; vLLM "
        f"{told['vllm']}, {told['model']}, options of vllm serve: {options}. {told['requests']} "
        f"requests per class, rate and repeat; {told['kv_bytes'] >> 20} MiB of KV and "
        f"{told['max_num_seqs']} requests at a time per system. Capacity of stock, requests/s: "
        f"{capacities}; rates are parts of it: {rates}. One request at a time on stock: TTFT "
        f"{1e3 * lone['ttft_s']:.0f} ms, {1e3 * lone['tpot_s']:.1f} ms per further token. SLOs: "
        f"loose {_slo(slo.loose)}, strict {_slo(slo.strict)}.\n\n{_READING}"
    )


def _slo(slo: Slo) -> str:
    return f"TTFT {1e3 * slo.ttft_s:.0f} ms and {1e3 * slo.tpot_s:.1f} ms per further token"


def missing(raw: Raw, results: Results) -> str:
    """Which systems were left out, and how many repeats there are."""
    counts = {
        len(results.repeats(load, name)) for name in results.systems() for load in _present(results)
    }
    absent = [name for name in DEFAULT if name not in results.systems()]
    lines = []
    if len(counts) == 1:
        (count,) = counts
        lines.append(f"{count} repeat{'s' * (count > 1)} of everything shown.")
    elif counts:
        lines.append(f"Not complete: {min(counts)} to {max(counts)} repeats.")
    if absent:
        lines.append(f"Not measured: {', '.join(absent)}.")
    failed = sum(len(cell.requests) - len(cell.answered) for cell in raw.cells.values())
    total = sum(len(cell.requests) for cell in raw.cells.values())
    lines.append(f"{failed} of {total} requests failed.")
    return " ".join(lines)


def cells(results: Results) -> list[Grid]:
    """One table per class and rate, with one row per system."""
    grids = []
    for load in _present(results):
        rows = []
        for system in results.systems():
            found = [results.mean(load, system, metric.key) for metric in METRICS]
            texts = [
                _NOTHING if each is None else each.text(metric.factor, metric.digits)
                for metric, each in zip(METRICS, found, strict=True)
            ]
            rows.append([system, *texts])
        title = f"{' '.join(load)}, {results.rate_per_s(load):.2f} requests/s"
        grids.append(Grid(title, ["system", *(metric.title for metric in METRICS)], rows))
    return grids


def ratios(results: Results, system: str) -> Grid:
    """A system of ours over stock, and over the best one that is not ours."""
    heads = [f"{system} to"]
    for metric in COMPARED:
        name = metric.title.partition(",")[0]
        heads += [f"{name} / stock", "/ best other"]
    rows = []
    for load in _present(results):
        row = [" ".join(load)]
        for metric in COMPARED:
            stock, best = _ratios(results, load, system, metric)
            row += [_text(stock), _text(best) + (f" ({best.to})" if best else "")]
        rows.append(row)
    return Grid(f"{system} beside the others (ratios)", heads, rows)


def verdicts(results: Results, system: str) -> str:
    """Per metric, how often it is better and worse than the best of the others."""
    lines = []
    for metric in COMPARED:
        found = [_ratios(results, load, system, metric)[1] for load in _present(results)]
        won = [each.won for each in found if each is not None and each.value is not None]
        lines.append(
            f"{metric.title.partition(',')[0]}: {won.count(True)} better, {won.count(False)} "
            f"worse, {won.count(None)} open"
        )
    return f"Against the best of the others in {len(_present(results))} cells: {'; '.join(lines)}."


def sustained(results: Results) -> Grid:
    """The largest rate of every class and system at which stalls stay short."""
    names = [name for name in MEASURED if any(load[0] == name for load in _present(results))]
    rows = []
    for name in names:
        row = [name]
        for system in results.systems():
            rate = results.sustained(name, system)
            shown = rate and f"{rate} ({results.rate_per_s((name, rate)):.2f}/s)"
            row.append(shown or "none")
        rows.append(row)
    return Grid("Rates that are sustained", ["class", *results.systems()], rows)


def disturbed(raw: Raw) -> str:
    """Where others used much of the cores, although it was measured again."""
    found = [cell for cell in raw.cells.values() if cell.foreign > _DISTURBED]
    most = max((cell.foreign for cell in raw.cells.values()), default=0.0)
    told = (
        f"Others (the hypervisor included) used up to {100 * most:.0f} % of the cores' time in a "
        f"cell, and {100 * raw.head['foreign']:.0f} % while stock's capacities were measured."
    )
    names = ", ".join(f"{' '.join(cell.key[:3])} {cell.repeat + 1}" for cell in found)
    return told + (f" More than {100 * _DISTURBED:.0f} % in: {names}." if found else "")


def drift(speeds: Sequence[Speed]) -> str:
    """How fast the cores were before and after each block, to the median."""
    if not speeds:
        return ""
    means = [sum(each.gflops) / len(each.gflops) for each in speeds]
    middle = median(means)
    rows = [
        [
            f"{speed.repeat + 1} {speed.system} {speed.when}",
            f"{100 * mean / middle:.0f}",
            ", ".join(f"{each:.0f}" for each in speed.gflops),
        ]
        for speed, mean in zip(speeds, means, strict=True)
    ]
    grid = Grid("", ["repeat, system", "% of the median", "GFLOP/s by core"], rows)
    span = f"{100 * min(means) / middle:.0f} to {100 * max(means) / middle:.0f} %"
    return (
        f"Speed of the cores beside the blocks: {span} of its median.\n\n"
        + grid.markdown().partition("\n\n")[2]
    )


def _present(results: Results) -> list[Load]:
    return [
        load
        for load in loads(CLASSES, list(RATES))
        if any(results.repeats(load, name) for name in results.systems())
    ]


def _ratios(
    results: Results, load: Load, system: str, metric: Metric
) -> tuple[Ratio | None, Ratio | None]:
    """To stock, and to the best of those that are not ours."""
    best = best_other(results, load, metric)
    return (
        ratio(results, load, system, STOCK, metric),
        ratio(results, load, system, best, metric) if best else None,
    )


def _text(found: Ratio | None) -> str:
    if found is None or found.value is None:
        return _NOTHING
    return found.value.text(digits=2) + _MARKS[found.won]
