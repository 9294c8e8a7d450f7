"""What `vllm-tetri bench saturation` found, in a terminal and as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench import picture
from vllm_tetri.engine.profile import ProfileFile

_BAR_WIDTH = 30


def show(found: ProfileFile, console: Console) -> None:
    """Print both curves as tables with bars."""
    profile = found.profile
    console.print(f"{found.conditions['model']} on {found.conditions['device']}")
    console.print(
        _table(
            "Prefill",
            "tokens per step",
            ((p.tokens, p.seconds, p.tokens_per_s) for p in profile.curve),
        )
    )
    for context, points in found.decodes_by_context().items():
        console.print(
            _table(
                f"Decode, {context} tokens of context each",
                "requests",
                ((p.num_decodes, p.seconds, p.num_decodes / p.seconds) for p in points),
            )
        )
    console.print(f"saturated from chunks of {profile.chunk_tokens} tokens on")


def _table(title: str, head: str, rows: Iterable[tuple[int, float, float]]) -> Table:
    kept = list(rows)
    most = max((rate for _, _, rate in kept), default=1.0)
    table = Table(title=title, title_justify="left")
    for name in (head, "ms per step", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("")
    for size, seconds, rate in kept:
        bar = "█" * max(1, round(_BAR_WIDTH * rate / most))
        table.add_row(str(size), f"{seconds * 1e3:.1f}", f"{rate:.0f}", bar)
    return table


def draw(found: ProfileFile, path: Path) -> None:
    """The paper's figure 2: prefill on the left, decode on the right."""
    profile, conditions = found.profile, found.conditions
    model = Path(conditions["model"]).name
    threads = conditions["threads"]
    where = f"{conditions['device']}, {threads} thread{'s' * (threads != '1')}"
    title = f"{model} ({conditions['dtype']}) on {where}"
    figure, (prefill, decode) = picture.new(title, columns=2)
    sizes = [point.tokens for point in profile.curve]
    prefill.plot(sizes, [point.tokens_per_s for point in profile.curve], marker="o")
    prefill.axvline(profile.chunk_tokens, color=picture.COLORS[1], linestyle="--")
    prefill.annotate(
        f"chunk of {profile.chunk_tokens}",
        (profile.chunk_tokens, 0),
        xytext=(4, 6),
        textcoords="offset points",
        color=picture.COLORS[1],
    )
    prefill.set(title="Prefill", xlabel="tokens per step", ylabel="tokens/s")
    for context, points in found.decodes_by_context().items():
        decode.plot(
            [point.num_decodes for point in points],
            [point.num_decodes / point.seconds for point in points],
            marker="o",
            linestyle="-" if len(points) > 2 else "",  # two points are no curve
            label=f"context of {context} tokens",
        )
    decode.set(title="Decode", xlabel="requests per step", ylabel="tokens/s")
    for axis in (prefill, decode):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_ylim(bottom=0)
    if profile.decodes:
        decode.legend()
    picture.save(figure, path)
