"""`vllm-tetri sim`: clusters in virtual time, side by side on the same requests."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cluster import Outcome
from vllm_tetri.sim.cluster import run as simulate
from vllm_tetri.sim.figures import Figures, Slo, figures
from vllm_tetri.sim.modes import MODES
from vllm_tetri.sim.profiles import PROFILES, profile
from vllm_tetri.sim.setting import STOCK_BUDGET_TOKENS, Setting, Shape, places
from vllm_tetri.sim.workload import KINDS, Ask, Phase, draw, draw_phases, read_lengths

_FILE_COLUMNS = 150
_MS = 1e3
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class _System:
    """A row of the table."""

    name: str
    setting: Setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is simulated, and with which requests."""
    cluster = parser.add_argument_group("cluster")
    add = cluster.add_argument
    add(
        "--mode",
        nargs="+",
        action="extend",
        metavar="MODE",
        help=f"how requests find instances, a row each: {', '.join(MODES)} (split)",
    )
    add("--prefill", type=int, default=1, metavar="N", help="instances of this role (1)")
    add("--decode", type=int, default=1, metavar="N", help="instances of this role (1)")
    add("--both", type=int, default=0, metavar="N", help="instances of this role (0)")
    names = ", ".join(PROFILES)
    add(
        "--profile",
        default="smollm2-1core",
        metavar="NAME",
        help=f"what steps cost: {names}, or a *.json file (smollm2-1core)",
    )
    add("--chunk", type=int, default=512, metavar="TOKENS", help="prompt tokens a step (512)")
    add("--tbt-slo", type=float, metavar="SECONDS", help="between two tokens of an answer (none)")
    add("--kv-blocks", type=int, default=4096, metavar="N", help="of 16 tokens, each (4096)")
    add(
        "--stock",
        type=int,
        nargs="+",
        default=[],
        metavar="BUDGET",
        help=f"also vLLM alone with so many tokens a step, {STOCK_BUDGET_TOKENS} for example",
    )
    add("--replicas", type=int, default=1, metavar="N", help="of that (1)")
    add("--stock-profile", metavar="NAME", help="what its steps cost (as --profile)")
    requests = parser.add_argument_group("requests")
    add = requests.add_argument
    add("--kind", default="mixed", metavar="KIND", help=f"{', '.join(KINDS)} (mixed)")
    add("--rate", type=float, default=1.0, metavar="N", help="arrivals per second (1)")
    add("--requests", type=int, default=500, metavar="N", help="how many (500)")
    add(
        "--phases",
        metavar="KIND:RATE:SECONDS,...",
        help="one after the other, instead of --kind, --rate and --requests",
    )
    add(
        "--lengths",
        type=Path,
        metavar="CSV",
        help="draw lengths from its columns ContextTokens and GeneratedTokens",
    )
    add("--accuracy", type=float, default=1.0, metavar="PART", help="of predictions (1)")
    add("--seed", type=int, default=0, metavar="N", help="of everything random (0)")
    add(
        "--slo",
        type=_pair,
        default=(1.0, 0.1),
        metavar="TTFT,TPOT",
        help="seconds to the first token and per token behind it, for the goodput (1.0,0.1)",
    )


def run(options: argparse.Namespace) -> int:
    """Simulate, and print a table; 130 if that is interrupted."""
    slo = Slo(*options.slo)
    systems = _systems(options)
    found = Console()
    console = found if found.is_terminal else Console(width=_FILE_COLUMNS)
    try:
        asks = _asks(options)
        table = _table(len(asks), asks[-1].arrival_s, slo)
        with _progress(len(systems) * len(asks)) as advance:
            for system in systems:
                outcome = simulate(system.setting, asks, on_end=advance)
                table.add_row(system.name, *_cells(figures(outcome.served, slo), outcome))
    except KeyboardInterrupt:
        return _INTERRUPTED
    console.print(table)
    return 0


def _systems(options: argparse.Namespace) -> list[_System]:
    shape = Shape(
        cost=profile(options.profile),
        kv_blocks=options.kv_blocks,
        chunk_tokens=options.chunk,
        tbt_slo_s=options.tbt_slo,
    )
    counts = {"P": options.prefill, "D": options.decode, "B": options.both}
    label = "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
    ours = places(*counts.values(), shape=shape)
    modes = options.mode or ["split"]
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"--mode {mode}: there are {', '.join(MODES)}")
    systems = [_System(f"{mode} {label}", Setting(ours, mode, options.seed)) for mode in modes]
    if options.replicas < 1:
        raise ConfigError(f"--replicas {options.replicas}: must be at least 1")
    stock_shape = replace(shape, tbt_slo_s=None)
    if options.stock_profile is not None:
        stock_shape = replace(stock_shape, cost=profile(options.stock_profile))
    for budget in options.stock:
        alike = places(both=options.replicas, shape=replace(stock_shape, stock_budget=budget))
        name = f"{options.replicas} stock, budget {budget}"
        systems.append(_System(name, Setting(alike, "least-in-flight", options.seed)))
    return systems


def _asks(options: argparse.Namespace) -> list[Ask]:
    if options.phases is not None:
        if options.lengths is not None:
            raise ConfigError("--phases and --lengths exclude each other")
        phases = [_phase(text) for text in options.phases.split(",")]
        return draw_phases(phases, options.seed, accuracy=options.accuracy)
    return draw(
        options.kind,
        options.requests,
        options.rate,
        options.seed,
        accuracy=options.accuracy,
        known=None if options.lengths is None else read_lengths(options.lengths),
    )


def _phase(text: str) -> Phase:
    try:
        kind, rate, seconds = text.split(":")
        return Phase(kind, float(rate), float(seconds))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--phases {text!r}: write KIND:RATE:SECONDS") from error


def _pair(text: str) -> tuple[float, float]:
    first, second = text.split(",")
    return float(first), float(second)


_pair.__name__ = "TTFT,TPOT"  # what argparse says of a wrong value


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """What is to be called after every request."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        yield lambda: progress.advance(task)


def _table(count: int, last_s: float, slo: Slo) -> Table:
    title = f"{count} requests over {last_s:.0f} s of virtual time"
    note = f"good: first token within {slo.ttft_s:g} s, then {slo.tpot_s * _MS:g} ms a token"
    table = Table(
        title=title,
        caption=f"times in ms; {note}; busy: parts of the time in steps",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("system", min_width=10)
    for name in (
        "TTFT\nmean", "TTFT\np50", "TTFT\np99", "ITL\np99", "JCT\nmean", "JCT\np99",
        "good", "good\n/s", "split",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("busy", justify="right", min_width=4)
    return table


def _cells(found: Figures, outcome: Outcome) -> list[str]:
    seconds = (
        found.ttft_mean_s,
        found.ttft_p50_s,
        found.ttft_p99_s,
        found.itl_p99_s,
        found.jct_mean_s,
        found.jct_p99_s,
    )
    busy = list(outcome.busy.values())
    shown = " ".join(f"{part:.0%}" for part in busy[:4]) + (" ..." if busy[4:] else "")
    return [
        *(f"{each * _MS:.0f}" for each in seconds),
        f"{found.good:.1%}",
        f"{found.goodput:.3g}",
        f"{found.split:.0%}",
        shown,
    ]
