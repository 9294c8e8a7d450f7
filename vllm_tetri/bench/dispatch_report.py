"""What `bench dispatch` found, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench import picture
from vllm_tetri.bench.admission_report import PACED, against
from vllm_tetri.bench.stats import Estimate, estimate

Run = Mapping[str, Any]

OURS = "power-of-two"


def decode_s(run: Run) -> float:
    """Total decode time."""
    return float(run["decode_s"])


def slowest(run: Run) -> Mapping[str, Any]:
    """The share of the instance that was done last."""
    found: Mapping[str, Any] = max(run["shares"], key=lambda share: share["done_s"])
    return found


def spread(run: Run, kind: str) -> float:
    """Standard deviation over instances of how many heavy or light decodes they got."""
    return float(pstdev([share[kind] for share in run["shares"]]))


def token_excess(run: Run) -> float:
    """By which part the instance with the most tokens has more than the mean."""
    tokens = [share["tokens"] for share in run["shares"]]
    return float(max(tokens) / fmean(tokens) - 1)


def show(console: Console, results: Mapping[str, Any]) -> None:
    """Print one table per number of instances."""
    found = results["conditions"]
    scales = {run["scale"] for each in results["instances"].values() for run in _runs(each)}
    console.print(
        f"{found['requests']} requests per decode instance at once ({found['lengths']}), KV of "
        f"{found['kv_tokens']} tokens each, {found['prefill']} prefill instances, oracle; {PACED}: "
        f"{found['pace']}, run at {sorted(scales)}; times are the device's; means "
        "with 95 % intervals"
    )
    for count, policies in results["instances"].items():
        console.print(_table(f"{count} decode instances", policies))


def _runs(policies: Mapping[str, Sequence[Run]]) -> Iterator[Run]:
    return (run for runs in policies.values() for run in runs)


def _table(title: str, policies: Mapping[str, Sequence[Run]]) -> Table:
    table = Table(
        "dispatch", "total (s)", f"to {OURS}", "JCT (s)", "slowest heavy", "light", "spread heavy",
        "light", "most tokens", "preempted", "late (ms)", title=title,
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for name in sorted(policies, key=lambda name: (name != OURS, name)):
        runs = policies[name]
        table.add_row(
            name,
            _over(runs, decode_s).text(digits=1),
            "-" if name == OURS or OURS not in policies else _percent(runs, policies[OURS]),
            _over(runs, lambda run: float(run["jct_s"])).text(digits=1),
            _over(runs, lambda run: float(slowest(run)["heavy"])).text(digits=1),
            _over(runs, lambda run: float(slowest(run)["light"])).text(digits=1),
            _over(runs, lambda run: spread(run, "heavy")).text(digits=1),
            _over(runs, lambda run: spread(run, "light")).text(digits=1),
            _over(runs, token_excess).text(100, 0) + " %",
            _over(runs, lambda run: float(run["preemptions"])).text(),
            f"{1e3 * max(run['late_s'] for run in runs):.0f}",
        )
    return table


def draw(results: Mapping[str, Any], path: Path) -> None:
    """The paper's Figure 19: total decode time, and what the slowest instance had."""
    conditions = results["conditions"]
    title = f"{conditions['requests']} requests per decode instance; {PACED}"
    figure, axes = picture.new(title, columns=3)
    counts = list(results["instances"])
    measured = {name for each in results["instances"].values() for name in each}
    policies = sorted(measured, key=lambda name: (name != OURS, name))
    panels: tuple[tuple[str, Callable[[Run], float]], ...] = (
        ("total decode time (s)", decode_s),
        ("heavy decodes of the slowest", lambda run: float(slowest(run)["heavy"])),
        ("spread of heavy decodes", lambda run: spread(run, "heavy")),
    )
    width = 0.8 / len(policies)
    for axis, (label, figure_of) in zip(axes, panels, strict=True):
        for index, name in enumerate(policies):
            known = [
                place for place, count in enumerate(counts) if name in results["instances"][count]
            ]
            found = [_over(results["instances"][counts[place]][name], figure_of) for place in known]
            axis.bar(
                [place + (index - (len(policies) - 1) / 2) * width for place in known],
                [each.mean for each in found],
                width,
                yerr=[0.0 if each.half != each.half else each.half for each in found],
                capsize=2,
                label=name,
                color=picture.COLORS[index],
            )
        axis.set_xticks(range(len(counts)), counts)
        axis.set(xlabel="decode instances", ylabel=label, ylim=(0, None))
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(policies)
    )
    picture.save(figure, path)


def _over(runs: Sequence[Run], figure: Callable[[Run], float]) -> Estimate:
    return estimate([figure(run) for run in runs])


def _percent(runs: Sequence[Run], base: Sequence[Run]) -> str:
    return against(runs, base, decode_s).text(100.0) + " %"
