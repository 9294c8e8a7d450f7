"""What `vllm-tetri bench handover` found: rows, a table and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench import picture
from vllm_tetri.bench.stats import Estimate, estimate, quantile

OURS, STOCK, CHUNKED = "prefill + decode", "stock", "stock, budget = chunk"
SYSTEMS = (STOCK, CHUNKED, OURS)
_MS = 1e3


@dataclass(frozen=True, slots=True)
class Stream:
    """When the pieces of one streamed answer came, in seconds after it was asked for."""

    pieces_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0]

    @property
    def second_s(self) -> float:
        """From the first piece to the second: where a hand-over shows."""
        return self.pieces_s[1] - self.pieces_s[0]

    @property
    def itl_s(self) -> float:
        """Median distance of later pieces."""
        later = self.pieces_s[1:]
        return median(b - a for a, b in itertools.pairwise(later))


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt length, in milliseconds; differences are of the same prompt."""

    length: int
    ttft: dict[str, float]
    over_stock: Estimate
    over_chunked: Estimate
    handover: Estimate
    stock_second: Estimate
    itl: float


def rows(content: dict[str, Any]) -> list[Row]:
    """What the table and the picture show."""
    made = []
    for length, systems in content["lengths"].items():
        streams = {
            name: [Stream(tuple(pieces)) for pieces in found] for name, found in systems.items()
        }
        ours = streams[OURS]
        made.append(
            Row(
                length=int(length),
                ttft={
                    name: _MS * median(each.ttft_s for each in found)
                    for name, found in streams.items()
                },
                over_stock=_difference(ours, streams[STOCK]),
                over_chunked=_difference(ours, streams[CHUNKED]),
                handover=estimate([_MS * (each.second_s - each.itl_s) for each in ours]),
                stock_second=estimate(
                    [_MS * (each.second_s - each.itl_s) for each in streams[STOCK]]
                ),
                itl=_MS * median(each.itl_s for each in ours),
            )
        )
    return made


def _difference(ours: Sequence[Stream], others: Sequence[Stream]) -> Estimate:
    pairs = zip(ours, others, strict=True)
    return estimate([_MS * (mine.ttft_s - theirs.ttft_s) for mine, theirs in pairs])


def show(console: Console, content: dict[str, Any]) -> None:
    """Print it."""
    console.print(
        f"{content['device']}, cores {content['cores']}, vLLM {content['vllm']}, "
        f"{content['model']}, chunk {content['chunk']}, {content['requests']} requests each, "
        "one at a time; medians, and means of differences with 95 % intervals, in ms"
    )
    table = Table()
    for title in (
        "prompt", "TTFT stock", "TTFT chunked", "TTFT ours", "ours - stock", "ours - chunked",
        "hand-over beyond a step", "the same in stock", "ITL ours",
    ):  # fmt: skip
        table.add_column(title, justify="right")
    for row in rows(content):
        table.add_row(
            str(row.length),
            *(f"{row.ttft[name]:.1f}" for name in SYSTEMS),
            *(
                each.text(digits=1)
                for each in (row.over_stock, row.over_chunked, row.handover, row.stock_second)
            ),
            f"{row.itl:.1f}",
        )
    console.print(table)
    for name, times in content["full"].items():
        console.print(
            f"decode side {name}: TTFT mean {_MS * fmean(times):.1f} ms, "
            f"p50 {_MS * median(times):.1f}, longest {_MS * quantile(times, 1.0):.1f}"
        )


def draw(content: dict[str, Any], path: Path) -> None:
    """First and second tokens by length of the prompt."""
    figure, (left, right) = picture.new("One request at a time", columns=2)
    made = rows(content)
    lengths = [row.length for row in made]
    for name in SYSTEMS:
        left.plot(lengths, [row.ttft[name] for row in made], marker="o", label=name)
    left.set(title="first token", xlabel="prompt (tokens)", ylabel="ms", ylim=(0, None))
    left.legend()
    for label, chosen in (("ours", "handover"), ("stock", "stock_second")):
        found = [getattr(row, chosen) for row in made]
        right.errorbar(
            lengths, [each.mean for each in found], yerr=[each.half for each in found],
            marker="o", capsize=3, label=label,
        )  # fmt: skip
    right.set(title="second token, beyond a usual step", xlabel="prompt (tokens)", ylabel="ms")
    right.legend()
    picture.save(figure, path)
