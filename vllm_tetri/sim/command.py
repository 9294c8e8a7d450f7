"""`vllm-tetri sim`: clusters in virtual time, compared on the same requests."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import run as simulate
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, Stock, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.figures import Slo, figures
from vllm_tetri.sim.links import link
from vllm_tetri.sim.options import (
    add_engine_options,
    add_options,
    add_request_options,
    requests_of,
    write_json,
)
from vllm_tetri.sim.workload import RequestSpec

_FILE_COLUMNS = 150
_USUAL = EngineConfig()
_MOST_BUSY = 4  # instances that the table shows
# Titles of the table, the figures, and how they are written.
_COLUMNS = (
    ("TTFT\nmean", "ttft_mean_s", "ms"),
    ("TTFT\np50", "ttft_p50_s", "ms"),
    ("TTFT\np99", "ttft_p99_s", "ms"),
    ("ITL\np99", "itl_p99_s", "ms"),
    ("JCT\nmean", "jct_mean_s", "ms"),
    ("JCT\np99", "jct_p99_s", "ms"),
    ("good", "good", ".1%"),
    ("good\n/s", "goodput", ".3g"),
    ("split", "split", ".0%"),
    ("refused", "refused", "d"),
)

System = tuple[str, ClusterConfig]
"""A row of the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is simulated, and with which requests."""
    add_options(parser, "cluster", mode=None, prefill=1, decode=1, both=0)
    add_engine_options(parser)
    add_options(
        parser,
        "policies",
        dispatch_policy="power-of-two",
        prefill_policy=_USUAL.order,
        decode_policy=_USUAL.admission,
    )
    add_options(parser, "compared with stock vLLM", stock=[], replicas=1, stock_profile=None)
    add_request_options(parser)


def run(options: argparse.Namespace) -> int:
    """Simulate, and print a table or JSON."""
    return compare(options, _systems(options))


def compare(options: argparse.Namespace, systems: Sequence[System]) -> int:
    """Simulate every system on the requests of the options, and print a table or JSON."""
    slo = Slo(options.ttft_slo, options.tpot_slo)
    specs = requests_of(options)
    over = None if options.link is None else link(options.link)
    table = _table(options, specs, slo)
    rows = []
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        for name, config in systems:
            task = progress.add_task(f"simulating {name}", total=len(specs))
            linked = replace(config, link=over, sends_chunks=options.send == "chunk")
            outcome = simulate(linked, specs, on_end=partial(progress.advance, task))
            found = figures(outcome.served, slo, outcome.refused)
            cells = [
                f"{found[key] * 1e3:.0f}" if form == "ms" else format(found[key], form)
                for _, key, form in _COLUMNS
            ]
            busy = [f"{part:.0%}" for part in outcome.busy.values()]
            more = ["..."] if len(busy) > _MOST_BUSY else []
            table.add_row(name, *cells, " ".join([*busy[:_MOST_BUSY], *more]))
            rows.append(
                {"system": name, **found, "busy": outcome.busy,
                 "preemptions": outcome.preemptions, "end_s": outcome.end_s}
            )  # fmt: skip
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


def _table(options: argparse.Namespace, specs: Sequence[RequestSpec], slo: Slo) -> Table:
    names = [options.profile, getattr(options, "stock_profile", None) or options.profile]
    used = [profile(name) for name in dict.fromkeys(names)]
    estimates = "".join(f"\n{each.name}: {each.source}" for each in used if each.is_estimate)
    note = f"good: first token within {slo.ttft_s:g} s, then {slo.tpot_s * 1e3:g} ms a token"
    table = Table(
        title=f"{len(specs)} requests over {specs[-1].arrival_s:.0f} s of virtual time",
        caption=f"times in ms; {note}; busy: parts of the time in steps{estimates}",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("system", min_width=10)
    for title, *_ in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("busy", justify="right", min_width=4)
    return table
