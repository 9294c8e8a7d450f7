"""`vllm-tetri sim`: clusters in virtual time, side by side on the same requests."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import Outcome
from vllm_tetri.sim.cluster import run as simulate
from vllm_tetri.sim.cost.profiles import NAMES_OF_ROOFLINES, PROFILES, Profile, profile
from vllm_tetri.sim.engine.kinds import STOCK_BUDGET_TOKENS, Stock
from vllm_tetri.sim.figures import Figures, Slo, figures
from vllm_tetri.sim.links import LINKS, link
from vllm_tetri.sim.mode.modes import MODES
from vllm_tetri.sim.request_options import add_request_options, requests_of
from vllm_tetri.sim.setting import Setting, Shape, of_profile, places
from vllm_tetri.sim.system_options import add_system_options, named_systems

_FILE_COLUMNS = 150
_MS = 1e3
_PROGRESS_STEPS = 1000
_BLOCK_TOKENS, _KV_BLOCKS = 16, 4096


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
        help=f"what steps cost: {names}, {NAMES_OF_ROOFLINES}, or a *.json file (smollm2-1core)",
    )
    add("--chunk", type=int, default=512, metavar="TOKENS", help="prompt tokens a step (512)")
    add("--tbt-slo", type=float, metavar="SECONDS", help="between two tokens of an answer (none)")
    add(
        "--link",
        metavar="NAME|GBIT[:US]",
        help=f"what KV travels over, shared by all that travels at once: {', '.join(LINKS)}, or "
        "Gbit/s and µs of latency of every instance (none: 5 µs a token, never shared)",
    )
    add(
        "--send",
        choices=("chunk", "request"),
        default="chunk",
        help="when KV leaves: with each chunk of a prompt, or behind all of it (chunk)",
    )
    add(
        "--kv-blocks",
        type=int,
        metavar="N",
        help="of 16 tokens, each (those of the profile, else 4096)",
    )
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
    add_system_options(parser)
    add_request_options(parser)
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="of everything random (0)")
    add(
        "--slo",
        type=_pair,
        default=(1.0, 0.1),
        metavar="TTFT,TPOT",
        help="seconds to the first token and per token behind it, for the goodput (1.0,0.1)",
    )


def run(options: argparse.Namespace) -> int:
    """Simulate, and print a table."""
    slo = Slo(*options.slo)
    systems = _systems(options)
    found = Console()
    console = found if found.is_terminal else Console(width=_FILE_COLUMNS)
    asks = requests_of(options)
    table = _table(len(asks), asks[-1].arrival_s, slo, _estimates(options))
    with _progress(len(systems) * len(asks)) as advance:
        for system in systems:
            outcome = simulate(system.setting, asks, on_end=advance)
            sums = figures(outcome.served, slo, outcome.refused)
            table.add_row(system.name, *_cells(sums, outcome))
    console.print(table)
    return 0


def _systems(options: argparse.Namespace) -> list[_System]:
    known = profile(options.profile)
    shape = Shape(
        kv_blocks=_kv_blocks(options, known), chunk_tokens=options.chunk, tbt_slo_s=options.tbt_slo
    )
    shape = of_profile(shape, known)
    counts = {"P": options.prefill, "D": options.decode, "B": options.both}
    label = "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
    ours = places(*counts.values(), shape=shape)
    modes = options.mode or ([] if options.system else ["split"])
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"--mode {mode}: there are {', '.join(MODES)}")
    systems = [_System(name, setting) for name, setting in named_systems(options, shape)]
    for mode in modes:
        objective = Objective(*options.slo)
        setting = Setting(ours, mode, options.seed, objective=objective)
        systems.append(_System(f"{mode} {label}", setting))
    if options.replicas < 1:
        raise ConfigError(f"--replicas {options.replicas}: must be at least 1")
    stock_shape = replace(shape, tbt_slo_s=None)
    if options.stock_profile is not None:
        known = profile(options.stock_profile)
        stock_shape = replace(stock_shape, kv_blocks=_kv_blocks(options, known))
        stock_shape = of_profile(stock_shape, known)
    for budget in options.stock:
        alike = places(both=options.replicas, shape=replace(stock_shape, engine=Stock(budget)))
        name = f"{options.replicas} stock, budget {budget}"
        systems.append(_System(name, Setting(alike, "least-in-flight", options.seed)))
    return [_System(each.name, _connected(options, each.setting)) for each in systems]


def _connected(options: argparse.Namespace, setting: Setting) -> Setting:
    over = None if options.link is None else link(options.link)
    return replace(setting, link=over, sends_chunks=options.send == "chunk")


def _kv_blocks(options: argparse.Namespace, known: Profile) -> int:
    if options.kv_blocks is not None:
        return int(options.kv_blocks)
    return known.kv_blocks(_BLOCK_TOKENS) or _KV_BLOCKS


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
    done, every = 0, max(1, total // _PROGRESS_STEPS)

    def advance() -> None:
        nonlocal done
        done += 1
        if done % every == 0:
            progress.update(task, completed=done)

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        yield advance


def _estimates(options: argparse.Namespace) -> str:
    """What steps take that nobody measured."""
    names = dict.fromkeys((options.profile, options.stock_profile or options.profile))
    known = [profile(name) for name in names]
    return "".join(f"\n{each.name}: {each.source}" for each in known if each.is_estimate)


def _table(count: int, last_s: float, slo: Slo, estimates: str) -> Table:
    title = f"{count} requests over {last_s:.0f} s of virtual time"
    note = f"good: first token within {slo.ttft_s:g} s, then {slo.tpot_s * _MS:g} ms a token"
    table = Table(
        title=title,
        caption=f"times in ms; {note}; busy: parts of the time in steps{estimates}",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("system", min_width=10)
    for name in (
        "TTFT\nmean", "TTFT\np50", "TTFT\np99", "ITL\np99", "JCT\nmean", "JCT\np99",
        "good", "good\n/s", "split", "refused",
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
        str(found.refused),
        shown,
    ]
