"""`vllm-tetri sim`: clusters in virtual time, compared on the same requests."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_tetri.errors import ConfigError
from vllm_tetri.plugins import load_policy, policy_names
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.policy.admission import ENTRY_ORDERS
from vllm_tetri.sim.cluster import run as simulate
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, Stock, make_instances, of_profile
from vllm_tetri.sim.cost.hardware import GPUS, MODELS
from vllm_tetri.sim.cost.profiles import NAMES_OF_ROOFLINES, PROFILES, Least, profile
from vllm_tetri.sim.figures import figures
from vllm_tetri.sim.links import LINKS, link
from vllm_tetri.sim.modes import MODES
from vllm_tetri.sim.workload import (
    KINDS,
    RequestSpec,
    above_0,
    draw,
    predicted,
    read_lengths,
    read_trace,
    variation_of,
    with_names,
)

REQUIRED = object()
_REQUESTS = 500
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
    ("good\n/s", "good_per_s", ".3g"),
    ("split", "split", ".0%"),
    ("refused", "refused", "d"),
    ("cached", "cached", ".0%"),
)
_TYPES = {"N": int, "TOKENS": int, "X": float, "SHARE": float, "SECONDS": float}

System = tuple[str, ClusterConfig]
"""A row of the table."""


def _option(metavar: str, what: str, **more: Any) -> dict[str, Any]:
    return {"help": what, "metavar": metavar, "type": _TYPES.get(metavar, str), **more}


def _policy(kind: Any, what: str) -> dict[str, Any]:
    names = ", ".join(policy_names(kind))
    return _option("NAME", f"{what}: {names}, an entry point or package.module:attribute")


# fmt: off
_OPTIONS = {
    "mode": _option("MODE", f"how requests find instances, a row each: {', '.join(MODES)} "
                    "(default: split)", nargs="+", action="extend", choices=MODES),
    "prefill": _option("N", "number of instances with the role prefill"),
    "decode": _option("N", "number of instances with the role decode"),
    "both": _option("N", "number of instances with the role both"),
    "dispatch_policy": _policy("dispatch", "which decode instance takes over a request"),
    "prefill_policy": _policy("order", "which waiting prompt is computed next"),
    "decode_policy": _policy("admission", "when a request enters a decode batch"),
    "decode_order": _option("NAME", "which request is next to enter it: the first, or the one with "
                            "the shortest expected output", choices=ENTRY_ORDERS),
    "stock": _option("TOKENS", "also simulate vLLM without this package, a row per token budget of "
                     "a step, 2048 for example", nargs="+"),
    "replicas": _option("N", "number of stock instances"),
    "profile": _option("NAME", f"step costs: {', '.join(PROFILES)}, {NAMES_OF_ROOFLINES}, or a "
                       "*.json file"),
    "chunk_size": _option("TOKENS|auto", "most prompt tokens of a step; auto: by what steps cost"),
    "tbt_slo": _option("SECONDS", "longest step with decodes; prompts get what is left of it"),
    "kv_blocks": _option("N", "KV blocks of 16 tokens of each instance (default: those of the "
                         "profile, else 4096)"),
    "link": _option("NAME|GBIT", f"what KV is sent over: {', '.join(LINKS)}, or Gbit/s; transfers "
                    "share it; without one a token takes 5 µs"),
    "send": _option("WHEN", "when KV is sent: with each chunk of a prompt, or after all of it",
                    choices=("chunk", "request")),
    "model": _option("NAME", f"one of {', '.join(MODELS)}, or a folder with a config.json"),
    "gpu": _option("NAME", f"kinds of GPUs that an instance may be of: {', '.join(GPUS)}",
                   nargs="+"),
    "parallel": _option("N", "GPUs of an instance, tensor parallel (default: 1, 2, 4 and 8 where "
                        "the model fits)", nargs="+"),
    "gpus": _option("N", "number of GPUs (default: 8, unless --rate is given)"),
    "price": _option("X", "price of a GPU hour, or one for each --gpu; adds the price of tokens",
                     nargs="+"),
    "least": _option("WHAT", "what to take as little of as possible", choices=[*Least]),
    "node": _option("N", "GPUs of a node, which KV does not leave; say by --link how fast it is "
                    "there (default: KV goes between any instances)"),
    "attainment": _option("SHARE", "share of requests that must keep both SLOs"),
    "kind": _option("KIND", "light or heavy prompts (l, h) with light or heavy outputs",
                    choices=KINDS),
    "rate": _option("X", "requests per second"),
    "arrivals": _option("HOW", "poisson, gamma:CV for bursts (the burstier the further CV is above "
                        "1), or at-once (default: poisson)"),
    "requests": _option("N", f"number of requests (default: {_REQUESTS}, or all of a trace), for a "
                        "plan the least number of a simulation"),
    "lengths": _option("CSV", "file with the columns ContextTokens and GeneratedTokens to draw "
                       "lengths from", type=Path),
    "trace": _option("FILE", "recorded requests to replay, for a plan to draw lengths from: a "
                     "*.csv file of Azure's or a *.jsonl file of Mooncake's (docs/simulator.md)",
                     type=Path),
    "trace_speed": _option("X", "times faster than recorded to replay a trace (default: 1)"),
    "accuracy": _option("SHARE", "share of output lengths that are predicted right, 0 to 1"),
    "seed": _option("N", "seed of requests, predictions and probes"),
    "ttft_slo": _option("SECONDS", "SLO of the time to the first token"),
    "tpot_slo": _option("SECONDS", "SLO of the mean time per token after the first one"),
    "json": _option("FILE", "write results as JSON to a file; - prints them instead of the table"),
}
# fmt: on


def add_options(parser: argparse.ArgumentParser, title: str, **defaults: Any) -> None:
    """Add a group of options by name, each with its default, or `REQUIRED`."""
    add = parser.add_argument_group(title).add_argument
    for name, default in defaults.items():
        is_required, more = default is REQUIRED, dict(_OPTIONS[name])
        if is_required:
            default = None
        elif default not in (None, []):
            more["help"] += " (default: %(default)s)"
        add(f"--{name.replace('_', '-')}", default=default, required=is_required, **more)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add what all instances have in common."""
    add_options(
        parser, "instances",
        profile="smollm2-1core", chunk_size=512, tbt_slo=None, kv_blocks=None,
        link=None, send="chunk",
    )  # fmt: skip


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """Add requests, their SLOs, and where results go."""
    add_options(
        parser, "requests",
        kind="mixed", rate=1.0, arrivals=None, requests=None, lengths=None, trace=None,
        trace_speed=None, accuracy=1.0, seed=0,
    )  # fmt: skip
    add_options(parser, "results", ttft_slo=1.0, tpot_slo=0.1, json=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is simulated, and with which requests."""
    add_options(parser, "cluster", mode=None, prefill=1, decode=1, both=0)
    add_engine_options(parser)
    add_options(
        parser, "policies",
        dispatch_policy="power-of-two", prefill_policy=_USUAL.order, decode_policy=_USUAL.admission,
        decode_order=_USUAL.decode_order,
    )  # fmt: skip
    add_options(parser, "compared with stock vLLM", stock=[], replicas=1)
    add_request_options(parser)


# -- what options ask for ------------------------------------------------------------------


def objective_of(options: argparse.Namespace) -> Objective:
    """Return both SLOs; raises ConfigError if they are not above 0 s."""
    found = Objective(options.ttft_slo, options.tpot_slo)
    if not (found.ttft_s > 0 and found.tpot_s > 0):
        raise ConfigError(f"SLOs of {found.ttft_s:g} and {found.tpot_s:g} s: must be above 0 s")
    return found


def engine_of(options: argparse.Namespace) -> EngineConfig:
    """Return the engine that the options describe; raises ConfigError if a number is out of range,
    or there is no such profile."""
    above_0(tbt_slo=options.tbt_slo, kv_blocks=options.kv_blocks)
    usual = EngineConfig(tbt_slo_s=options.tbt_slo, **_chunk_of(str(options.chunk_size)))
    engine = of_profile(usual, profile(options.profile))
    return engine if options.kv_blocks is None else replace(engine, kv_blocks=options.kv_blocks)


def _chunk_of(size: str) -> dict[str, Any]:
    if size == "auto":
        return {"has_sized_chunks": True}
    if not size.isdecimal() or not int(size):
        raise ConfigError(f"--chunk-size {size}: write a number of tokens above 0, or auto")
    return {"chunk_tokens": int(size)}


def _systems(options: argparse.Namespace) -> list[System]:
    engine = engine_of(options)
    policies = {"order": options.prefill_policy, "admission": options.decode_policy,
                "decode_order": options.decode_order}  # fmt: skip
    counts = {"P": options.prefill, "D": options.decode, "B": options.both}
    label = "+".join(f"{count}{letter}" for letter, count in counts.items() if count)
    usual = ClusterConfig(
        make_instances(*counts.values(), engine=replace(engine, **policies)),
        seed=options.seed,
        dispatch=options.dispatch_policy,
    )
    systems = [(f"{mode} {label}", replace(usual, mode=mode)) for mode in options.mode or ["split"]]
    load_policy("dispatch", options.dispatch_policy)  # not all modes do
    above_0(replicas=options.replicas)
    for budget in options.stock:
        above_0(stock=budget)
        stock = replace(engine, kind=Stock(budget), tbt_slo_s=None)
        alike = make_instances(both=options.replicas, engine=stock)
        config = ClusterConfig(alike, "least-in-flight", options.seed)
        systems.append((f"{options.replicas} stock, budget {budget}", config))
    return systems


def _requests_of(options: argparse.Namespace) -> list[RequestSpec]:
    for name in ("lengths", "arrivals"):
        if None not in (options.trace, getattr(options, name)):
            raise ConfigError(f"--trace and --{name} exclude each other")
    if options.trace is None and options.trace_speed is not None:
        raise ConfigError("--trace-speed is for --trace")
    above_0(rate=options.rate, requests=options.requests, trace_speed=options.trace_speed)
    accuracy, seed = options.accuracy, options.seed
    if options.trace is not None:
        speed, trace = options.trace_speed or 1.0, read_trace(options.trace)[: options.requests]
        sooner = [(at_s / speed, prompt, output) for at_s, prompt, output in trace]
        return with_names(predicted(sooner, accuracy, seed), options.trace)
    return draw(
        options.kind,
        options.requests or _REQUESTS,
        options.rate,
        seed,
        accuracy=accuracy,
        known=None if options.lengths is None else read_lengths(options.lengths),
        variation=variation_of(options.arrivals or "poisson"),
    )


# -- results -------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Simulate, and print a table or JSON."""
    return compare(options, _systems(options))


def compare(options: argparse.Namespace, systems: Sequence[System]) -> int:
    """Simulate every system on the requests of the options, and print a table or JSON."""
    slo, specs = objective_of(options), _requests_of(options)
    over = None if options.link is None else link(options.link)
    table = _table(options, specs, slo)
    rows = []
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        for name, config in systems:
            task = progress.add_task(f"simulating {name}", total=len(specs))
            in_chunks = config.sends_chunks and options.send == "chunk"
            linked = replace(config, link=over, sends_chunks=in_chunks)
            outcome = simulate(linked, specs, on_end=partial(progress.advance, task))
            found = figures(outcome.served, slo, outcome.refused)
            cells = [
                f"{found[key] * 1e3:.0f}" if form == "ms" else format(found[key], form)
                for _, key, form in _COLUMNS
            ]
            busy = [f"{part:.0%}" for part in outcome.busy.values()]
            busy[_MOST_BUSY:] = ["..."] if len(busy) > _MOST_BUSY else []
            table.add_row(name, *cells, " ".join(busy))
            finite = {key: each if math.isfinite(each) else None for key, each in found.items()}
            rows.append(
                {"system": name, **finite, "busy": outcome.busy,
                 "preemptions": outcome.preemptions, "end_s": outcome.end_s}
            )  # fmt: skip
    given = {key: str(each) for key, each in vars(options).items() if each is not None}
    show(options.json, {"simulated": True, "options": given, "systems": rows}, table)
    return 0


def show(json_target: str | None, found: dict[str, Any], *shown: Table | str) -> None:
    """Print results, or write them to the standard output as `--json -` wants them; then write them
    to the file of `--json`. Raises ConfigError if that cannot be written."""
    text = json.dumps(found, indent=2, allow_nan=False) + "\n"
    if json_target == "-":
        print(text, end="", flush=True)
        return
    console = Console()
    console = console if console.is_terminal else Console(width=_FILE_COLUMNS)
    for each in shown:
        console.print(each, highlight=False, markup=False)
    try:
        if json_target is not None:
            Path(json_target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {json_target}: {error.strerror}") from error


def empty_table(titles: Iterable[str], **more: Any) -> Table:
    """Return a table with these columns, the first one on the left."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, **more)
    for title in titles:
        is_first = not table.columns
        table.add_column(title, justify="left" if is_first else "right", no_wrap=not is_first)
    return table


def _table(options: argparse.Namespace, specs: Sequence[RequestSpec], slo: Objective) -> Table:
    used = profile(options.profile)
    estimate = f"\n{used.name}: {used.source}" if used.is_estimate else ""
    note = f"good: first token within {slo.ttft_s:g} s, then {slo.tpot_s * 1e3:g} ms a token"
    return empty_table(
        ("system", *(title for title, *_ in _COLUMNS), "busy"),
        title=f"{len(specs)} requests over {specs[-1].arrival_s:.0f} s of virtual time",
        caption=f"times in ms; {note}; busy: parts of the time in steps{estimate}",
    )
