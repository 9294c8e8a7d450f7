"""What `vllm-tetri bench router` found: rows, tables and a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench import picture
from vllm_tetri.bench.stats import Estimate, estimate, quantile

WHOLE, SPLIT = "whole", "split"
DIRECT, OURS, RIVAL = "direct", "vllm-tetri", "vllm-router"
TIMED, PACED, FLOOD, LOOPS = "timed", "paced", "flood", "loops"
_MS = 1e3
_GOAL_MS = 1.0

Point = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Added:
    """What a router adds to a token's time, in milliseconds.

    `direct` and `through` are means of the turns' medians, differences are of turns of
    the same repeat.
    """

    shape: str
    system: str
    streams: int
    token: str
    direct: float
    through: float
    p50: Estimate
    p99: Estimate


@dataclass(frozen=True, slots=True)
class Rate:
    """How much a router moves.

    Attributes:
        per_s: Events, or requests in loops, a second.
        per_cpu_s: The same per second that the router computes; None where there is none.
        per_read: Events that came in one read; more than one: they had piled up.
    """

    kind: str
    shape: str
    system: str
    streams: int
    per_s: Estimate
    per_cpu_s: Estimate | None
    per_read: float


def added(content: dict[str, Any]) -> list[Added]:
    """Differences in first and second tokens, by streams, shape and router."""
    timed = _by_turn(content, TIMED)
    rows = []
    for (shape, system, streams), points in timed.items():
        if system == DIRECT:
            continue
        direct = timed[shape, DIRECT, streams]
        for token in ("first", "second")[: 1 + (shape == SPLIT)]:
            times, others = _times_ms(points, token), _times_ms(direct, token)
            rows.append(
                Added(
                    shape, system, streams, token,
                    direct=fmean(map(median, others)),
                    through=fmean(map(median, times)),
                    p50=_difference(times, others, median),
                    p99=_difference(times, others, lambda each: quantile(each, 0.99)),
                )
            )  # fmt: skip
    return sorted(rows, key=lambda row: (row.shape != WHOLE, row.streams, row.system, row.token))


def rates(content: dict[str, Any]) -> list[Rate]:
    """Events and requests a second, by kind of turn, shape and system."""
    rows = []
    for kind in (PACED, FLOOD, LOOPS):
        for (shape, system, streams), points in _by_turn(content, kind).items():
            has_cpu = all(point["cpu_s"] > 0 for point in points)
            rows.append(
                Rate(
                    kind, shape, system, streams,
                    per_s=estimate([each["events"] / each["took_s"] for each in points]),
                    per_cpu_s=estimate([each["events"] / each["cpu_s"] for each in points])
                    if has_cpu
                    else None,
                    per_read=sum(each["events"] for each in points)
                    / max(1, sum(each["reads"] for each in points)),
                )
            )  # fmt: skip
    order = (DIRECT, OURS, RIVAL)
    kinds = (PACED, FLOOD, LOOPS)
    return sorted(
        rows, key=lambda row: (kinds.index(row.kind), row.shape != WHOLE, order.index(row.system))
    )


def show(console: Console, content: dict[str, Any]) -> None:
    """Print it."""
    told = content["conditions"]
    cores = ", ".join(f"{name} {numbers}" for name, numbers in told["cores"].items())
    console.print(
        f"{told['device']}; cores: {cores}; prompts of {told['prompt_tokens']} tokens; "
        f"{told['repeats']} turns of {told['requests']} timed requests; "
        f"other streams get an event every {_MS * told['step_s']:.0f} ms; "
        "differences with 95 % intervals over turns"
    )
    table = Table(title="Time to a token (ms)")
    for title in ("served", "through", "streams", "token", "direct p50", "p50", "+ p50", "+ p99"):
        table.add_column(title, justify="left" if title in ("served", "through") else "right")
    for row in added(content):
        table.add_row(
            row.shape, row.system, str(row.streams), row.token, f"{row.direct:.2f}",
            f"{row.through:.2f}", row.p50.text(digits=2), row.p99.text(digits=2),
        )  # fmt: skip
    console.print(table)
    console.print(_rate_table(content))


def _rate_table(content: dict[str, Any]) -> Table:
    table = Table(title="Events, and requests in loops")
    for title in ("kind", "served", "through", "streams", "a second", "a CPU second", "per read"):
        is_number = title in ("streams", "a second", "a CPU second", "per read")
        table.add_column(title, justify="right" if is_number else "left")
    for row in rates(content):
        table.add_row(
            row.kind, row.shape, row.system, str(row.streams), row.per_s.text(),
            "" if row.per_cpu_s is None else row.per_cpu_s.text(),
            "" if row.kind == LOOPS else f"{row.per_read:.1f}",
        )  # fmt: skip
    return table


def draw(content: dict[str, Any], path: Path) -> None:
    """Left what is added to the first token, right what a core moves."""
    figure, (left, right) = picture.new("The router between client and instances", columns=2)
    rows = [row for row in added(content) if row.token == "first"]
    bars = [row for row in rates(content) if row.kind == PACED and row.per_cpu_s is not None]
    names = sorted({(row.system, row.shape) for row in rows})
    for name, color in zip(names, picture.COLORS, strict=False):
        line = [row for row in rows if (row.system, row.shape) == name]
        left.errorbar(
            [row.streams for row in line], [row.p50.mean for row in line],
            yerr=[row.p50.half for row in line], marker="o", capsize=3, label=", ".join(name),
            color=color,
        )  # fmt: skip
        for row in bars:
            if (row.system, row.shape) == name and row.per_cpu_s is not None:
                per_cpu_s = row.per_cpu_s
                right.bar(",\n".join(name), per_cpu_s.mean, yerr=per_cpu_s.half, color=color)
    left.axhline(_GOAL_MS, color="#7a7a7a", linestyle="--", linewidth=1, label="goal, one stream")
    left.set(title="added to the first token, p50", xlabel="streams", ylabel="ms", ylim=(0, None))
    left.set_xscale("log")
    streams = sorted({row.streams for row in rows})
    left.set_xticks(streams, list(map(str, streams)))
    left.minorticks_off()
    left.legend(fontsize=7)
    right.set(title="events per CPU second of the router", ylim=(0, None))
    picture.save(figure, path)


def _by_turn(content: dict[str, Any], kind: str) -> dict[tuple[str, str, int], list[Point]]:
    """Points of a kind by shape, system and streams, in order of their repeats."""
    found: dict[tuple[str, str, int], list[Point]] = {}
    for point in content["points"]:
        if point["kind"] == kind:
            key = (point["shape"], point["system"], point["streams"])
            found.setdefault(key, []).append(point)
    return found


def _times_ms(points: list[Point], token: str) -> list[list[float]]:
    """Of every turn."""
    return [[_MS * each for each in point[f"{token}_s"]] for point in points]


def _difference(
    times: list[list[float]], others: list[list[float]], of: Callable[[list[float]], float]
) -> Estimate:
    return estimate([of(mine) - of(theirs) for mine, theirs in zip(times, others, strict=True)])
