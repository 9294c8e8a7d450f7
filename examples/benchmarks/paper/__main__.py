"""Run the experiments: `python -m examples.benchmarks.paper --quick` writes paper.json, paper.md
and paper.svg. Nothing is measured: all figures are simulated on estimated devices."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from examples.benchmarks.paper.cases import FULL, PROFILE, QUICK, cases
from examples.benchmarks.report import markdown, number


def main(words: list[str] | None = None) -> int:
    """Simulate, and write the three files."""
    parser = argparse.ArgumentParser("python -m examples.benchmarks.paper", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer requests and seeds: about a minute")
    add("--only", metavar="E1,E5", help="experiments: e1, e2, e5, e6, e11, e12, e13 (default: all)")
    add("--seeds", type=int, metavar="N", help="number of seeds (default: 8, with --quick 2)")
    add("--output", type=Path, default=Path(), metavar="FOLDER", help="default: this folder")
    options = parser.parse_args(words)
    requests, seeds = (QUICK, 2) if options.quick else (FULL, 8)
    chosen = list(cases(requests))
    if options.only is not None:
        wanted, known = set(options.only.split(",")), {case.experiment for case in chosen}
        if wanted - known:
            parser.error(f"--only {options.only}: there are {', '.join(sorted(known))}")
        chosen = [case for case in chosen if case.experiment in wanted]
    seeds = seeds if options.seeds is None else options.seeds
    if seeds < 1:
        parser.error(f"--seeds {seeds}: must be at least 1")
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("simulating", total=len(chosen) * seeds)
        for case in chosen:
            progress.update(task, description=f"{case.experiment}, {case.group}: {case.system}")
            for seed in range(seeds):
                where = {"experiment": case.experiment, "group": case.group, "system": case.system}
                found = case.play(seed)
                rows += [
                    {**where, "metric": metric, "seed": seed, "value": value}
                    for metric, value in found.items()
                ]
                progress.advance(task)
    _write(options.output, pd.DataFrame(rows), {"requests": requests, "seeds": seeds})
    return 0


def _write(folder: Path, rows: pd.DataFrame, conditions: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {"simulated": True, "profile": PROFILE, **conditions, "rows": rows.to_dict("records")}
    (folder / "paper.json").write_text(json.dumps(found) + "\n")
    keys = ["experiment", "group", "system", "metric"]
    means = rows.groupby(keys, sort=False)["value"].agg(["mean", "min", "max"]).reset_index()
    shown = [
        {**{key: row[key] for key in keys}, "mean": number(row["mean"]),
         "least to most": f"{number(row['min'])} to {number(row['max'])}"}
        for row in means.to_dict("records")
    ]  # fmt: skip
    (folder / "paper.md").write_text(f"Simulated on {PROFILE}.\n\n{markdown(shown)}\n")
    if "e1" in set(means["experiment"]):
        _picture(means).savefig(folder / "paper.svg")


def _picture(means: pd.DataFrame) -> Figure:
    """Draw mean JCT by class, as part of that of the paper's vLLM."""
    e1 = means[(means["metric"] == "jct_mean_s") & means["group"].str.endswith(", roce")]
    jct = e1.pivot_table(index="group", columns="system", values="mean", sort=False)
    axes = jct.div(jct["vllm-2023"], axis=0).plot.bar(rot=20, figsize=(9, 4))
    axes.set(ylabel="mean JCT, vLLM 2023 = 1 (simulated)", xlabel="")
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return figure


if __name__ == "__main__":
    sys.exit(main())
