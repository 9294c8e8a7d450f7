"""`vllm-tetri sim`: clusters in virtual time, compared on the same requests."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_tetri.errors import ConfigError
from vllm_tetri.plugins import Kind, policy_names
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import Outcome
from vllm_tetri.sim.cluster import run as simulate
from vllm_tetri.sim.config import STOCK_BUDGET_TOKENS as _BUDGET
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, Stock, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import NAMES_OF_ROOFLINES, PROFILES, Profile, profile
from vllm_tetri.sim.figures import Figures, Slo, figures
from vllm_tetri.sim.links import LINKS, link
from vllm_tetri.sim.modes import MODES
from vllm_tetri.sim.options import (
    add_json_option,
    add_request_options,
    add_slo_options,
    requests_of,
    write_json,
)
from vllm_tetri.sim.workload import RequestSpec

_FILE_COLUMNS = 150
_PROGRESS_STEPS = 1000
_USUAL = EngineConfig()
# Option, kind, default, and what the policy decides.
_POLICIES: tuple[tuple[str, Kind, str, str], ...] = (
    ("dispatch", "dispatch", "power-of-two", "which decode instance takes over a request"),
    ("prefill", "order", _USUAL.order, "which waiting prompt is computed next"),
    ("decode", "admission", _USUAL.admission, "when a request enters a decode batch"),
)

System = tuple[str, ClusterConfig]
"""A row of the table."""


# fmt: off
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is simulated, and with which requests."""
    add = parser.add_argument_group("cluster").add_argument
    add("--mode", nargs="+", action="extend", choices=MODES, metavar="MODE",
        help=f"how requests find instances, a row each: {', '.join(MODES)} (default: split)")
    for role, count in (("prefill", 1), ("decode", 1), ("both", 0)):
        add(f"--{role}", type=int, default=count, metavar="N",
            help=f"number of instances with the role {role} (default: %(default)s)")
    add_engine_options(parser)
    add = parser.add_argument_group("policies").add_argument
    for name, kind, default, what in _POLICIES:
        add(f"--{name}-policy", default=default, metavar="NAME",
            help=f"{what}: {', '.join(policy_names(kind))}, an entry point or "
                 "package.module:attribute (default: %(default)s)")
    add = parser.add_argument_group("compared with stock vLLM").add_argument
    add("--stock", type=int, nargs="+", default=[], metavar="TOKENS",
        help="also simulate vLLM without this package, a row per token budget of a step, "
             f"{_BUDGET} for example")
    add("--replicas", type=int, default=1, metavar="N",
        help="number of stock instances (default: %(default)s)")
    add("--stock-profile", metavar="NAME", help="their step costs (default: as --profile)")
    add_request_options(parser)
    add_slo_options(parser.add_argument_group("SLOs").add_argument, ttft_s=1.0, tpot_s=0.1)
    add_json_option(parser)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add what all instances have in common."""
    add = parser.add_argument_group("instances").add_argument
    add("--profile", default="smollm2-1core", metavar="NAME",
        help=f"step costs: {', '.join(PROFILES)}, {NAMES_OF_ROOFLINES}, or a *.json file "
             "(default: %(default)s)")
    add("--chunk-size", type=int, default=512, metavar="TOKENS",
        help="most prompt tokens of a step (default: %(default)s)")
    add("--tbt-slo", type=float, metavar="SECONDS",
        help="longest step with decodes; prompts get what is left of it (default: none)")
    add("--kv-blocks", type=int, metavar="N",
        help="KV blocks of 16 tokens of each instance (default: those of the profile, else 4096)")
    add("--link", metavar="NAME|GBIT[:US]",
        help=f"what KV is sent over: {', '.join(LINKS)}, or Gbit/s and µs of latency; transfers "
             "share it (default: 5 µs a token, not shared)")
    add("--send", choices=("chunk", "request"), default="chunk",
        help="when KV is sent: with each chunk of a prompt, or after all of it "
             "(default: %(default)s)")
# fmt: on


def run(options: argparse.Namespace) -> int:
    """Simulate, and print a table or JSON."""
    return compare(options, _systems(options))


def compare(options: argparse.Namespace, systems: Sequence[System]) -> int:
    """Simulate every system on the requests of the options, and print a table or JSON."""
    slo = Slo(options.ttft_slo, options.tpot_slo)
    specs = requests_of(options)
    over = None if options.link is None else link(options.link)
    table = _table(specs, slo, _estimates(options))
    rows = []
    with _progress(len(systems) * len(specs)) as advance:
        for name, config in systems:
            linked = replace(config, link=over, sends_chunks=options.send == "chunk")
            outcome = simulate(linked, specs, on_end=advance)
            sums = figures(outcome.served, slo, outcome.refused)
            table.add_row(name, *_cells(sums, outcome))
            more = {"busy": outcome.busy, "preemptions": outcome.preemptions}
            rows.append({"system": name, **asdict(sums), **more, "end_s": outcome.end_s})
    if options.json is not None:
        given = {key: str(each) for key, each in vars(options).items() if each is not None}
        write_json(options.json, {"simulated": True, "options": given, "systems": rows})
    if options.json != "-":
        console = Console()
        console = console if console.is_terminal else Console(width=_FILE_COLUMNS)
        console.print(table)
    return 0


def engine_of(options: argparse.Namespace, profile_name: str) -> EngineConfig:
    """Return the engine that the options describe, on a profile's device.

    Raises:
        ConfigError: A number is out of range, or there is no such profile.
    """
    usual = EngineConfig(chunk_tokens=options.chunk_size, tbt_slo_s=options.tbt_slo)
    engine = of_profile(usual, profile(profile_name))
    return engine if options.kv_blocks is None else replace(engine, kv_blocks=options.kv_blocks)


def _systems(options: argparse.Namespace) -> list[System]:
    engine = replace(
        engine_of(options, options.profile),
        order=options.prefill_policy,
        admission=options.decode_policy,
    )
    counts = {"P": options.prefill, "D": options.decode, "B": options.both}
    label = "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
    ours = make_instances(*counts.values(), engine=engine)
    objective = Objective(options.ttft_slo, options.tpot_slo)
    systems: list[System] = []
    for mode in options.mode or ["split"]:
        config = ClusterConfig(
            ours, mode, options.seed, dispatch=options.dispatch_policy, objective=objective
        )
        systems.append((f"{mode} {label}", config))
    if options.replicas < 1:
        raise ConfigError(f"--replicas {options.replicas}: must be at least 1")
    engine = engine_of(options, options.stock_profile or options.profile)
    for budget in options.stock:
        stock = replace(engine, kind=Stock(budget), tbt_slo_s=None)
        alike = make_instances(both=options.replicas, engine=stock)
        config = ClusterConfig(alike, "least-in-flight", options.seed)
        systems.append((f"{options.replicas} stock, budget {budget}", config))
    return systems


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show progress on a terminal. Yields what is called after every request."""
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
    """Name the profiles that were not measured."""
    names = [options.profile, getattr(options, "stock_profile", None) or options.profile]
    known: list[Profile] = [profile(name) for name in dict.fromkeys(names)]
    return "".join(f"\n{each.name}: {each.source}" for each in known if each.is_estimate)


def _table(specs: Sequence[RequestSpec], slo: Slo, estimates: str) -> Table:
    note = f"good: first token within {slo.ttft_s:g} s, then {slo.tpot_s * 1e3:g} ms a token"
    table = Table(
        title=f"{len(specs)} requests over {specs[-1].arrival_s:.0f} s of virtual time",
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
        found.ttft_mean_s, found.ttft_p50_s, found.ttft_p99_s,
        found.itl_p99_s, found.jct_mean_s, found.jct_p99_s,
    )  # fmt: skip
    busy = list(outcome.busy.values())
    shown = " ".join(f"{part:.0%}" for part in busy[:4]) + (" ..." if busy[4:] else "")
    return [
        *(f"{each * 1e3:.0f}" for each in seconds),
        f"{found.good:.1%}",
        f"{found.goodput:.3g}",
        f"{found.split:.0%}",
        str(found.refused),
        shown,
    ]
