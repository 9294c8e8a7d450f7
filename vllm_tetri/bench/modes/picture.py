"""Pictures of `vllm-tetri bench modes`: one per metric, a panel per class."""

from __future__ import annotations

from pathlib import Path

from vllm_tetri.bench import picture
from vllm_tetri.bench.modes.figures import COMPARED, Metric, Results
from vllm_tetri.bench.modes.load import CLASSES, RATES, loads
from vllm_tetri.bench.modes.systems import SYSTEMS

_COLUMNS = 3
_NIXL, _MORE = "#c2261f", ("#222222", "#9c6b30")
_COLORS = dict(zip(SYSTEMS, (*picture.COLORS[:4], _NIXL, *picture.COLORS[4:], *_MORE), strict=True))


def draw(results: Results, folder: Path) -> list[str]:
    """Write a picture per metric that is compared; returns their names."""
    names = []
    for metric in COMPARED:
        name = f"modes-{metric.key.removesuffix('_s').replace('_', '-')}.svg"
        _draw(results, metric, folder / name)
        names.append(name)
    return names


def _draw(results: Results, metric: Metric, path: Path) -> None:
    systems = results.systems()
    shown = [
        name
        for name in CLASSES
        if any(results.repeats(load, system) for load in loads([name], list(RATES))
               for system in systems)
    ]  # fmt: skip
    columns = min(_COLUMNS, len(shown))
    figure, axes = picture.new(metric.title, columns, rows=-(-len(shown) // columns))
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    for axis, name in zip(axes, shown, strict=False):
        for system in systems:
            points = [
                (results.rate_per_s(load), found)
                for load in loads([name], list(RATES))
                if (found := results.mean(load, system, metric.key)) is not None
            ]
            axis.errorbar(
                [rate for rate, _ in points], [metric.factor * each.mean for _, each in points],
                yerr=[metric.factor * each.half for _, each in points], label=system, capsize=2,
                marker="D" if SYSTEMS[system].is_ours else "o", markersize=4,
                color=_COLORS[system],
            )  # fmt: skip
        axis.set(title=name, xlabel="requests/s", ylabel=metric.title, ylim=(0, None))
    axes[0].legend(fontsize=7)
    picture.save(figure, path)
