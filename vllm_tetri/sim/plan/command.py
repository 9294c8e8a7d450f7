"""`vllm-tetri sim plan`: which layout serves most requests in time, per GPU."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cost.hardware import GPUS, MODELS
from vllm_tetri.sim.cost.profiles import Profile, profile, roofline_profile
from vllm_tetri.sim.figures import Slo
from vllm_tetri.sim.links import LINKS, link
from vllm_tetri.sim.options import (
    add_accuracy_and_seed,
    add_json_option,
    add_slo_options,
    write_json,
)
from vllm_tetri.sim.plan.goodput import Demand, Goal
from vllm_tetri.sim.plan.report import plain, recommendation, table
from vllm_tetri.sim.plan.search import plan
from vllm_tetri.sim.plan.values import Plan, Question
from vllm_tetri.sim.trace import read_lengths, read_trace
from vllm_tetri.sim.workload import KINDS, Lengths

_FILE_COLUMNS = 120
_DEVICES = 8
_PARALLEL = (1, 2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add model, GPUs, requests and SLOs."""
    # fmt: off
    add = parser.add_argument_group("model and GPUs").add_argument
    add("--model", help=f"one of {', '.join(MODELS)}, or a folder with a config.json")
    add("--gpu", help=f"kind of GPU: {', '.join(GPUS)}")
    add("--parallel", type=int, nargs="+", metavar="N",
        help="GPUs of an instance, tensor parallel (default: 1, 2, 4 and 8 where the model fits)")
    add("--profile", metavar="NAME",
        help="profile of `vllm-tetri sim --help` or a measured *.json, instead of model and GPU")
    add("--gpus", type=int, metavar="N",
        help=f"number of GPUs (default: {_DEVICES}, unless --rate is given)")
    add("--rate", type=float, metavar="N",
        help="requests per second to serve; finds how many GPUs are needed")
    add("--price", type=float, metavar="N", help="price of a GPU hour; adds the price of tokens")
    add("--link", default="roce",
        help=f"what KV is sent over: {', '.join(LINKS)}, or Gbit/s (default: %(default)s)")
    add = parser.add_argument_group("requests").add_argument
    add("--kind", choices=KINDS, default="mixed",
        help="light or heavy prompts (l, h) with light or heavy outputs (default: %(default)s)")
    add("--trace", type=Path, metavar="FILE",
        help="*.csv (ContextTokens, GeneratedTokens) or *.jsonl to draw lengths from")
    add("--requests", type=int, default=1000, metavar="N",
        help="least number of requests of a simulation (default: %(default)s)")
    add_accuracy_and_seed(add)
    add = parser.add_argument_group("SLOs").add_argument
    add_slo_options(add)
    add("--attainment", type=float, default=0.9, metavar="SHARE",
        help="share of requests that must keep both SLOs (default: %(default)s)")
    add_json_option(parser)
    # fmt: on


def run(options: argparse.Namespace) -> int:
    """Search, and print a table with a recommendation, or JSON."""
    question = _question(options)
    if options.price is not None and not options.price > 0:
        raise ConfigError(f"--price {options.price:g}: must be above 0")
    console = Console(stderr=True)
    with console.status("planning") if console.is_terminal else nullcontext() as status:
        found = plan(question, status.update if status is not None else lambda _: None)
    if options.json is not None:
        write_json(options.json, plain(found, options.price))
    if options.json != "-":
        _show(options, found)
    return 0


def _question(options: argparse.Namespace) -> Question:
    known = None if options.trace is None else tuple(_lengths(options.trace))
    devices = options.gpus
    if devices is None and options.rate is None:
        devices = _DEVICES
    if options.requests < 1:
        raise ConfigError(f"--requests {options.requests}: must be at least 1")
    demand = Demand(options.kind, known, options.accuracy, options.requests, options.seed)
    return Question(
        profiles=_profiles(options, devices),
        demand=demand,
        goal=Goal(Slo(options.ttft_slo, options.tpot_slo), options.attainment),
        link=link(options.link),
        devices=devices,
        rate=options.rate,
    )


def _lengths(path: Path) -> list[Lengths]:
    if path.suffix == ".csv":
        return read_lengths(path)
    return [(each.prompt_tokens, each.output_tokens) for each in read_trace(path)]


def _profiles(options: argparse.Namespace, devices: int | None) -> tuple[Profile, ...]:
    """One per tensor parallel degree; those of --parallel must fit, others may be left out."""
    if options.profile is not None:
        if options.model or options.gpu or options.parallel:
            raise ConfigError("--profile names model and GPUs already; leave the others out")
        return (profile(options.profile),)
    if not (options.model and options.gpu):
        raise ConfigError("give --model and --gpu, or --profile")
    if options.parallel:
        degrees = dict.fromkeys(options.parallel)
        return tuple(roofline_profile(options.model, options.gpu, each) for each in degrees)
    most = max(_PARALLEL) if devices is None else devices
    fitting, error = [], ConfigError(f"no instance fits on {most} GPUs")
    for each in (each for each in _PARALLEL if each <= most):
        try:
            fitting.append(roofline_profile(options.model, options.gpu, each))
        except ConfigError as reason:
            error = reason
    if not fitting:
        raise error
    return tuple(fitting)


def _show(options: argparse.Namespace, found: Plan) -> None:
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_FILE_COLUMNS)
    what = options.profile or f"{options.model} on {options.gpu}"
    requests = options.kind if options.trace is None else options.trace.name
    goal = found.question.goal
    title = (
        f"{what}, {requests}: {goal.attainment:.0%} get a first token within {goal.slo.ttft_s:g} s "
        f"and then {goal.slo.tpot_s * 1e3:g} ms a token"
    )
    console.print(title, highlight=False, markup=False)
    console.print(table(found, options.price))
    for line in recommendation(found):
        console.print(line, highlight=False, markup=False)
