"""What `bench flip` found, as tables and as a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench import picture
from vllm_tetri.bench.admission_report import PACED
from vllm_tetri.bench.stats import Estimate, estimate, quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Run = Mapping[str, Any]
Systems = Mapping[str, Sequence[Run]]

SWING = "swing"
_SHOWN_FIRST = ("balance", "threshold", "idle")  # whose swing the picture has
# No policy has the grey of a split.
_PREFILL, _DECODE, *_OTHERS = (color for color in picture.COLORS if color != "#7a7a7a")
_FLIPPING = "#d0d0d0"
_SHADES = {"code": _PREFILL, "conversation": _DECODE}  # what each is mostly
_HEADROOM = 1.3  # for a legend
_TITLE_PAD = 18  # above the names of phases


def jct_s(run: Run) -> float:
    """Mean of all requests of a run."""
    return float(run["overall"]["jct_s"])


def attained(run: Run) -> float:
    """Share of requests in time."""
    return float(run["overall"]["attained"])


def is_fixed(name: str) -> bool:
    """Whether a system is a split that stays, such as 2P1D."""
    return re.fullmatch(r"\d+P\d+D", name) is not None


def best_fixed(systems: Systems) -> str | None:
    """The split with the least mean JCT; None where none was run."""
    fixed = [name for name in systems if is_fixed(name)]
    return min(fixed, key=lambda name: fmean(map(jct_s, systems[name])), default=None)


def in_order(names: Sequence[str]) -> list[str]:
    """Splits by their prefill instances, then policies by name."""
    return sorted(names, key=lambda name: (not is_fixed(name), name))


def paired(
    runs: Sequence[Run], base: Sequence[Run], difference: Callable[[Run, Run], float]
) -> Estimate:
    """Of two systems repeat by repeat, as far as both have gone: the requests are the same."""
    return estimate([difference(run, other) for run, other in zip(runs, base, strict=False)])


# -- tables ------------------------------------------------------------------------


def show(console: Console, results: Mapping[str, Any]) -> None:
    """Print what each load did to each system, each kind of phase, and the flips."""
    found = results["conditions"]
    rates = ", ".join(
        f"{kind} {rate:g}/s ({found[kind]})"
        for kind, rate in zip(_SHADES, found["rates"], strict=True)
    )
    console.print(
        f"{found['phases']} phases of {found['phase_s']:g} s; {rates}; {found['instances']} "
        f"instances with KV of {found['kv_tokens']} tokens, oracle; in time: first token within "
        f"{found['slo_ttft_s']:g} s, further ones {found['slo_tpot_s']:g} s each; {PACED}: "
        f"{found['pace']}, run at {found['scale']:g}; times are the device's; means with 95 % "
        "intervals; policies' own times, such as a horizon of 40 s, are real ones"
    )
    for load, systems in results["loads"].items():
        console.print(_table(load, systems))
    if SWING in results["loads"]:
        console.print(_phase_table(results["loads"][SWING]))
    if any(results["loads"].values()):
        console.print(_flip_table(results["loads"]))
    if results.get("timing"):
        console.print(_timing_table(results["timing"]))


def _timing_table(times: Sequence[Mapping[str, Any]]) -> Table:
    """One flip after the other under load, in real milliseconds."""
    table = Table("timing, real ms", "flips", "commit p50", "p99", "longest", "drain p50", "p99")
    for source in ("prefill", "decode"):
        for is_drained in (True, False):
            own = [
                each
                for each in times
                if each["source"] == source and (each["drain_s"] > 0) is is_drained
            ]
            if not own:
                continue
            commit_s = [each["commit_s"] for each in own]
            drain_s = [each["drain_s"] for each in own]
            table.add_row(
                f"from {source}, {'drained first' if is_drained else 'at once'}",
                str(len(own)),
                *(f"{1e3 * quantile(commit_s, part):.2f}" for part in (0.5, 0.99, 1.0)),
                *(f"{1e3 * quantile(drain_s, part):.0f}" for part in (0.5, 0.99)),
            )
    return table


def _table(load: str, systems: Systems) -> Table:
    best = best_fixed(systems)
    table = Table(
        load, "JCT (s)", f"to {best}", "p99", "TTFT (s)", "p99", "in time (%)", f"to {best}",
        "instance-s", "busy (%)", "flips", "late (ms)",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for name in in_order(list(systems)):
        runs = systems[name]
        base = None if best in (None, name) else systems[best]
        table.add_row(
            name,
            _over(runs, jct_s).text(digits=1),
            _change(runs, base),
            _overall(runs, "jct_p99_s").text(digits=1),
            _overall(runs, "ttft_s").text(digits=1),
            _overall(runs, "ttft_p99_s").text(digits=1),
            _over(runs, attained).text(100),
            _points(runs, base),
            _over(runs, instance_s).text(),
            f"{100 * fmean(run['busy_s'] / instance_s(run) for run in runs):.0f}",
            f"{fmean(run['flips'] for run in runs):.1f}",
            f"{1e3 * max(run['late_s'] for run in runs):.0f}",
        )
    return table


def _phase_table(systems: Systems) -> Table:
    """Of the swing: the phases of each kind, by the requests that came in them."""
    names = [f"{what}, {kind}" for kind in _SHADES for what in ("JCT (s)", "TTFT (s)", "in time")]
    table = Table("phases of the swing", *names)
    for name in in_order(list(systems)):
        cells = []
        for kind in _SHADES:
            for field, factor, digits in (("jct_s", 1, 1), ("ttft_s", 1, 1), ("attained", 100, 0)):
                found = [of_kind(run, kind, field) for run in systems[name]]
                known = [each for each in found if each is not None]
                cells.append(estimate(known).text(factor, digits) if known else "-")
        table.add_row(name, *cells)
    return table


def _flip_table(loads: Mapping[str, Systems]) -> Table:
    table = Table(
        "flips", "seen a run", "rolled back", "drain (s)", "longest", "commit, real (ms)", "longest"
    )
    for load, systems in loads.items():
        for name in in_order([name for name in systems if not is_fixed(name)]):
            every = [flip for run in systems[name] for flip in run["flipped"]]
            done = [flip for flip in every if flip["stage"] == "done"]
            drain_s = [flip["drain_s"] for flip in done]
            commit_s = [flip["commit_s"] for flip in done]
            table.add_row(
                f"{name}, {load}",
                f"{len(every) / len(systems[name]):.1f}",
                str(sum(flip["stage"] == "rolled_back" for flip in every)),
                *((f"{fmean(drain_s):.1f}", f"{max(drain_s):.1f}") if done else ("-", "-")),
                *((f"{1e3 * fmean(commit_s):.0f}", f"{1e3 * max(commit_s):.0f}") if done else "--"),
            )
    return table


def instance_s(run: Run) -> float:
    """Resource time: all instances, until the last token of all."""
    return float(run["instances"] * run["makespan_s"])


def of_kind(run: Run, kind: str, field: str) -> float | None:
    """A mean over the requests that came in phases of one kind; None where none came."""
    pairs = zip(run["kinds"], run["phases"], strict=True)
    found = [phase for own, phase in pairs if own == kind and phase]
    total = sum(phase["requests"] for phase in found)
    return sum(phase["requests"] * phase[field] for phase in found) / total if total else None


def _over(runs: Sequence[Run], figure: Callable[[Run], float]) -> Estimate:
    return estimate([figure(run) for run in runs])


def _overall(runs: Sequence[Run], field: str) -> Estimate:
    return _over(runs, lambda run: float(run["overall"][field]))


def _change(runs: Sequence[Run], base: Sequence[Run] | None) -> str:
    if base is None:
        return "-"
    return paired(runs, base, lambda run, other: jct_s(run) / jct_s(other) - 1).text(100) + " %"


def _points(runs: Sequence[Run], base: Sequence[Run] | None) -> str:
    if base is None:
        return "-"
    return paired(runs, base, lambda run, other: attained(run) - attained(other)).text(100)


# -- picture -----------------------------------------------------------------------


def draw(results: Mapping[str, Any], path: Path) -> None:
    """How long requests took and how many were in time by system and load, and one run in
    which a policy followed the swing."""
    loads = results["loads"]
    shown = _shown(loads)
    figure, axes = picture.new(f"roles that follow the load; {PACED}", 2, rows=2 if shown else 1)
    _bars(axes[0], loads, "mean time of a request (s)", jct_s)
    axes[0].legend(loc="upper left", ncols=2)
    axes[0].set_ylim(0, _HEADROOM * axes[0].get_ylim()[1])
    _bars(axes[1], loads, "requests in time (%)", lambda run: 100 * attained(run))
    axes[1].set_ylim(0, 105)
    if shown:
        name, run = shown
        _roles(axes[2], run, f"{name}: instances by role")
        _queues(axes[3], run, f"{name}: requests in the cluster")
        for axis in axes[2:]:
            _shade(axis, run, results["conditions"]["phase_s"])
    picture.save(figure, path)


def _shown(loads: Mapping[str, Systems]) -> tuple[str, Run] | None:
    systems = loads.get(SWING, {})
    return next(((name, systems[name][0]) for name in _SHOWN_FIRST if systems.get(name)), None)


def _bars(
    axis: Axes, loads: Mapping[str, Systems], label: str, figure: Callable[[Run], float]
) -> None:
    names = in_order(list({name for systems in loads.values() for name in systems}))
    colors = _colors(names)
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        known = [place for place, systems in enumerate(loads.values()) if name in systems]
        found = [_over(systems[name], figure) for systems in loads.values() if name in systems]
        axis.bar(
            [place + (index - (len(names) - 1) / 2) * width for place in known],
            [each.mean for each in found],
            width,
            yerr=[0.0 if each.half != each.half else each.half for each in found],
            capsize=2,
            label=f"{name}, fixed" if is_fixed(name) else f"flipped by {name}",
            color=colors[name],
        )
    axis.set_xticks(range(len(loads)), list(loads))
    axis.set(ylabel=label, ylim=(0, None))
    axis.grid(axis="x", visible=False)


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Greys of splits, and of policies colors that are not those of the two roles."""
    fixed = [name for name in names if is_fixed(name)]
    greys = {name: f"{0.5 + 0.4 * place / len(fixed):.2f}" for place, name in enumerate(fixed)}
    others = [name for name in names if name not in greys]
    return greys | dict(zip(others, _OTHERS, strict=False))


def _roles(axis: Axes, run: Run, title: str) -> None:
    seen = run["timeline"]
    total = [run["instances"]] * len(seen["at_s"])
    steady = [count - decode for count, decode in zip(total, seen["decode"], strict=True)]
    for low, high, color, label in (
        ([0] * len(total), seen["prefill"], _PREFILL, "prefill"),
        (seen["prefill"], steady, _FLIPPING, "finishing the old role"),
        (steady, total, _DECODE, "decode"),
    ):
        axis.fill_between(
            seen["at_s"], low, high, step="post", color=color, label=label, linewidth=0
        )
    axis.set(xlabel="time (s)", ylabel="instances", ylim=(0, run["instances"]))
    axis.set_title(title, pad=_TITLE_PAD)
    axis.set_yticks(range(run["instances"] + 1))
    axis.legend(loc="lower right", frameon=True)


def _queues(axis: Axes, run: Run, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    seen = run["timeline"]
    axis.plot(seen["at_s"], seen["prompts"], color=_PREFILL, label="before the first token")
    axis.plot(seen["at_s"], seen["answers"], color=_DECODE, label="behind it")
    most = max(seen["prompts"] + seen["answers"], default=0)
    axis.set(xlabel="time (s)", ylabel="requests", ylim=(0, _HEADROOM * max(most, 1)))
    axis.set_title(title, pad=_TITLE_PAD)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(loc="upper left", ncols=2)


def _shade(axis: Axes, run: Run, phase_s: float) -> None:
    """Names above the axis, and lines between the phases."""
    bounds = axis.get_xaxis_transform()
    for index, kind in enumerate(run["kinds"]):
        start = index * phase_s
        axis.axvspan(
            start, start + phase_s, 1.0, 1.06, color=_SHADES[kind], alpha=0.35, clip_on=False
        )
        axis.text(start + phase_s / 2, 1.03, kind, transform=bounds, ha="center", va="center")
        axis.axvline(start + phase_s, color="#404040", linewidth=0.8, linestyle=":")
    axis.set_xlim(0, max(run["makespan_s"], len(run["kinds"]) * phase_s))
