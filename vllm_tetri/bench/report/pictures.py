"""Pictures that a report draws itself: numbers of papers with ours beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tetri.bench import picture
from vllm_tetri.bench.report.claims import Claim, Ours
from vllm_tetri.bench.report.paper_numbers import Form
from vllm_tetri.bench.report.values import Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _ROW, _MARGIN = 9.0, 0.32, 1.1  # inches
_MARKS = {
    Source.SIMULATED: "o", Source.MEASURED: "D", Source.PACED: "^", Source.ESTIMATE: "s"
}  # fmt: skip
_SPREAD = 0.5  # of the series of a row
_SERIES_A_ROW = 3  # so many find room in it; with more it is higher
_MOST_LINEAR = 15.0  # factors above that are drawn on a logarithmic axis
_LABELS = {Form.CHANGE: "change, %", Form.TIMES: "times as much"}


def draw(title: str, claims: Sequence[Claim], path: Path) -> bool:
    """Changes and factors, a panel each; returns whether there was anything to draw."""
    panels = {
        form: [each for each in claims if each.number.form is form and each.ours]
        for form in _LABELS
    }
    panels = {form: found for form, found in panels.items() if found}
    if not panels:
        return False
    figure, axes = picture.new(title, rows=len(panels))
    heights = [_MARGIN + _row(found) * max(2, len(found)) for found in panels.values()]
    figure.set_size_inches(_WIDTH, sum(heights))
    if grid := axes[0].get_gridspec():
        grid.set_height_ratios(heights)
    for axis, (form, found) in zip(axes, panels.items(), strict=True):
        _panel(axis, form, found)
    picture.save(figure, path)
    return True


def _panel(axis: Axes, form: Form, claims: Sequence[Claim]) -> None:
    factor, rest = (100.0, 0.0) if form is Form.CHANGE else (1.0, 1.0)
    rows = list(zip(claims, range(len(claims))[::-1], strict=True))
    stated = [
        (factor * each.number.value, place) for each, place in rows if each.number.value is not None
    ]
    axis.scatter(
        [value for value, _ in stated], [place for _, place in stated],
        marker="x", color="#222222", label="paper", zorder=3,
    )  # fmt: skip
    series = _series(claims)
    for index, name in enumerate(series):
        found = [(one, place) for each, place in rows for one in each.ours if _name(one) == name]
        shift = _SPREAD * (index / max(1, len(series) - 1) - 0.5) if len(series) > 1 else 0.0
        axis.errorbar(
            [factor * one.found.mean for one, _ in found], [place - shift for _, place in found],
            xerr=[factor * _half(one) for one, _ in found],
            fmt=_MARKS[found[0][0].ask.source], markersize=4, capsize=2,
            color=picture.COLORS[index % len(picture.COLORS)], label=name,
        )  # fmt: skip
    axis.axvline(rest, color="#7a7a7a", linewidth=0.8)
    axis.set_yticks([place for _, place in rows], [each.number.what for each, _ in rows])
    axis.set(xlabel=_LABELS[form], ylim=(-0.7, len(claims) - 0.3))
    most = max(one.found.mean for each in claims for one in each.ours)
    if form is Form.TIMES and most > _MOST_LINEAR:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _row(claims: Sequence[Claim]) -> float:
    """Its height."""
    return _ROW * max(1.0, len(_series(claims)) / _SERIES_A_ROW)


def _series(claims: Sequence[Claim]) -> list[str]:
    """Names, in the order of their coming."""
    return list(dict.fromkeys(_name(one) for each in claims for one in each.ours))


def _name(one: Ours) -> str:
    """Of the series that a point belongs to."""
    source, label = one.ask.source.value, one.ask.label
    return f"{source}, {label}" if label else source


def _half(one: Ours) -> float:
    return 0.0 if math.isnan(one.found.half) else one.found.half
