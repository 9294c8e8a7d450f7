"""`vllm-tetri bench report`: one page of what a suite has found, beside the papers' numbers."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_tetri.bench.picture import require_pictures
from vllm_tetri.bench.report import pictures as report_pictures
from vllm_tetri.bench.report.claims import claims
from vllm_tetri.bench.report.html import html
from vllm_tetri.bench.report.load import Loaded, load
from vllm_tetri.bench.report.losses import losses
from vllm_tetri.bench.report.markdown import markdown
from vllm_tetri.bench.report.page import document
from vllm_tetri.bench.setting import console
from vllm_tetri.bench.suite.experiments import EXPERIMENTS
from vllm_tetri.bench.suite.jobs import MODEL
from vllm_tetri.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which folder, and where the report goes."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of vllm-tetri bench suite")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="NAME",
        help="NAME.html, NAME.md and pictures NAME-*.svg are written (FOLDER/report)",
    )


def run(options: argparse.Namespace) -> int:
    """Read, and write the page twice."""
    require_pictures()
    loaded = load(options.folder)
    output: Path = options.output or options.folder / "report"
    output = output.with_suffix("") if output.suffix in (".html", ".md") else output
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _write(loaded, output)
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from error
    shown = console()
    for job, problem in loaded.problems.items():
        shown.print(f"{job} is left out: {problem}", markup=False, highlight=False)
    num_lost = len(losses(loaded.values.all))
    shown.print(f"{len(loaded.conditions)} results, {num_lost} comparisons lost")
    shown.print(f"written: {output}.html, {output}.md", soft_wrap=True)
    return 0


def _write(loaded: Loaded, output: Path) -> None:
    stated = {name: claims(name, loaded.values) for name in EXPERIMENTS}
    drawn = {}
    for name, found in stated.items():
        path = output.parent / f"{output.name}-{name}.svg"
        path.unlink(missing_ok=True)
        if report_pictures.draw(f"{EXPERIMENTS[name].title}, beside the paper", found, path):
            drawn[name] = path
    page = document(loaded, stated, drawn, _suite(loaded))
    Path(f"{output}.html").write_text(html(page))
    Path(f"{output}.md").write_text(markdown(page, output.parent))


def _suite(loaded: Loaded) -> str:
    """The command that goes on with the folder."""
    conditions = loaded.record.conditions if loaded.record else {}
    quick = " --quick" if conditions.get("variant") == "quick" else ""
    model = conditions.get("model") or MODEL.strip("{}").upper()
    return f"vllm-tetri bench suite {model}{quick} --output {loaded.folder}"
