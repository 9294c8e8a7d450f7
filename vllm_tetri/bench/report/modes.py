"""Results of `vllm-tetri bench modes` as values of e1, e11 and e12."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm_tetri.bench.modes.cells import Raw
from vllm_tetri.bench.modes.figures import Results, slos
from vllm_tetri.bench.modes.load import CLASSES, MEASURED, RATES, loads
from vllm_tetri.bench.modes.run import CELLS
from vllm_tetri.bench.report.values import Value, value

# What each experiment is about; e13 looks at all of it.
_METRICS = {
    "e1": ("ttft_mean_s", "ttft_p99_s", "jct_mean_s", "jct_p99_s", "failed"),
    "e11": ("ttft_p50_s", "itl_p99_s"),
    "e12": ("goodput_loose", "goodput_strict", "share_strict"),
}
# Of all requests, whatever became of them. Everything else is of those that were answered, and
# whoever refuses the slow ones would look quick.
_OF_ALL = ("failed", "goodput_loose", "goodput_strict", "share_strict")


def modes(folder: Path, head: Mapping[str, Any]) -> list[Value | None]:
    """Every class and rate that there is.

    Raises:
        ConfigError: A cell cannot be read.
    """
    raw = Raw(dict(head))
    with TemporaryDirectory() as copies:  # reading may mend the end of the file
        copy = Path(copies) / CELLS
        shutil.copyfile(folder / CELLS, copy)
        raw.load(copy)
    cells = list(raw.cells.values())
    results = Results(cells, slos(head["lone"], None, None))
    cores = head["conditions"]["cores"]
    found: list[Value | None] = []
    for load in loads(CLASSES, list(RATES)):
        for system in results.systems():
            repeats = results.repeats(load, system)
            for experiment, metrics in _METRICS.items():
                for metric in metrics:
                    samples = {
                        repeat: each[metric]
                        for repeat, each in repeats.items()
                        if metric in each and (metric in _OF_ALL or not each["failed"])
                    }
                    found.append(value(experiment, " ".join(load), system, metric, samples))
            # Seconds of cores that the system and its client used until the last answer.
            used_s = {
                cell.repeat: cell.busy * cell.took_s * cores
                for cell in cells
                if cell.load == load and cell.system == system
                if not repeats[cell.repeat]["failed"]
            }
            found.append(value("e1", " ".join(load), system, "resource_s", used_s))
    return found + _sustained(results)


def _sustained(results: Results) -> list[Value | None]:
    """Of every class the largest rate at which stalls stay short; 0 where none was. Nothing
    where a rate was left out: it might have been that one."""
    found: list[Value | None] = []
    for name in MEASURED:
        for system in results.systems():
            if not all(results.repeats((name, rate), system) for rate in RATES):
                continue
            rate = results.sustained(name, system)
            per_s = results.rate_per_s((name, rate)) if rate else 0.0
            found.append(value("e11", name, system, "sustained_per_s", [per_s]))
    return found
