"""Run the papers' experiments E1 to E13 again: `python -m examples.benchmarks.paper --quick`.

Prints what the paper states, what is simulated now on estimated devices, and what was measured
(results/), beside each other, and says where the simulated device was fitted to the sentence.
Writes paper.json (every seed), paper.md (these tables and all means) and paper.svg. E3, E4 and E7
to E10 are not simulated; their measurements are other scripts here.
"""

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
from examples.benchmarks.paper.claims import TITLES, comparison, kept_rows, means_of
from examples.benchmarks.report import markdown, number

KEYS = ["experiment", "group", "system", "metric"]


def main(words: list[str] | None = None) -> int:
    """Simulate, print the comparison, and write the three files."""
    parser = argparse.ArgumentParser(
        "python -m examples.benchmarks.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer requests and seeds: about a minute")
    add("--only", metavar="E1,E5", default=",".join(TITLES), help="experiments (default: all)")
    add("--seeds", type=int, metavar="N", help="number of seeds (default: 8, with --quick 2)")
    add("--kept", action="store_true", help="print what is kept in results/; simulate nothing")
    add("--output", type=Path, default=Path(), metavar="FOLDER", help="default: this folder")
    options = parser.parse_args(words)
    wanted = set(options.only.lower().split(","))
    if wanted - TITLES.keys():
        parser.error(f"--only {options.only}: there are {', '.join(TITLES)}")
    if options.kept:
        rows = kept_rows()
        print(comparison(means_of(rows[rows["experiment"].isin(wanted)]), wanted))
        return 0
    requests, seeds = (QUICK, 2) if options.quick else (FULL, 8)
    seeds = seeds if options.seeds is None else options.seeds
    if seeds < 1:
        parser.error(f"--seeds {seeds}: must be at least 1")
    rows = _simulate(wanted, requests, seeds)
    table = comparison(means_of(rows), wanted)
    print(table)
    _write(options.output, rows, table, {"requests": requests, "seeds": seeds})
    return 0


def _simulate(wanted: set[str], requests: dict[str, int], seeds: int) -> pd.DataFrame:
    chosen = [case for case in cases(requests) if case.experiment in wanted]
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
    return pd.DataFrame(rows, columns=[*KEYS, "seed", "value"])


def _write(folder: Path, rows: pd.DataFrame, table: str, conditions: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {"simulated": True, "profile": PROFILE, **conditions, "rows": rows.to_dict("records")}
    (folder / "paper.json").write_text(json.dumps(found) + "\n")
    means = rows.groupby(KEYS, sort=False)["value"].agg(["mean", "min", "max"]).reset_index()
    shown = [
        {**{key: row[key] for key in KEYS}, "mean": number(row["mean"]),
         "least to most": f"{number(row['min'])} to {number(row['max'])}"}
        for row in means.to_dict("records")
    ]  # fmt: skip
    all_means = f"Simulated on {PROFILE}.\n\n{markdown(shown)}\n"
    (folder / "paper.md").write_text(f"{table}\n## All means\n\n{all_means}")
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
