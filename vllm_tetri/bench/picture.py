"""Pictures of benchmarks: one look, and files that change only when the numbers do.

matplotlib is an extra (`pip install 'vllm-tetri[bench]'`) and imported on use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_tetri.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0b6e99", "#d9730d", "#4d8a4d", "#9b3d6e", "#7a7a7a", "#b59b00")
_COLUMN_INCHES = (4.6, 3.2)
_LOOK: dict[Any, Any] = {
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small, and readable in a diff
    "svg.hashsalt": "vllm-tetri",  # equal numbers make equal ids, so equal files
}
_NO_DATE = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}


def require_pictures() -> None:
    """Make sure that pictures can be drawn, before anything slow is started.

    Raises:
        UnsupportedError: matplotlib is not installed; says how to get it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "pictures need matplotlib; install it with pip install 'vllm-tetri[bench]'"
        ) from error


def require_writable(path: Path) -> None:
    """Make sure that a picture can be saved there.

    Raises:
        UnsupportedError: The name does not end in .svg or .png, or its folder is missing.
    """
    if path.suffix not in _NO_DATE:
        raise UnsupportedError(f"{path}: a picture's name ends in .svg or .png")
    if not path.parent.is_dir():
        raise UnsupportedError(f"{path}: there is no folder {path.parent}")


def new(title: str, columns: int = 1, *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row, in the common look.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    require_pictures()
    import matplotlib
    from matplotlib.figure import Figure

    width, height = _COLUMN_INCHES
    # For good, since what is drawn later looks it up as well. Not pyplot: it keeps
    # figures in a global list and may open a window.
    matplotlib.rcParams.update(_LOOK)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    figure.suptitle(title, fontsize=10)
    for axis in axes:
        axis.set_prop_cycle(color=COLORS)
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write the figure as SVG or PNG, by the name's ending."""
    require_writable(path)
    figure.savefig(path, dpi=150, metadata=_NO_DATE[path.suffix])
