"""`vllm-tetri sim plan`: which layout serves most requests in time, per GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cost.architecture import MODELS
from vllm_tetri.sim.cost.profiles import Profile, profile, roofline_profile
from vllm_tetri.sim.cost.roofline import GPUS
from vllm_tetri.sim.figures import Slo
from vllm_tetri.sim.links import LINKS, link
from vllm_tetri.sim.plan.goodput import Demand, Goal
from vllm_tetri.sim.plan.layout import Site
from vllm_tetri.sim.plan.report import Price, plain, recommendation, table
from vllm_tetri.sim.plan.search import plan
from vllm_tetri.sim.plan.values import Plan, Question
from vllm_tetri.sim.trace import read_lengths, read_trace
from vllm_tetri.sim.workload import KINDS, Lengths

_FILE_COLUMNS = 120
_DEVICES = 8
_PARALLEL = (1, 2, 4, 8)
_MS = 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, GPUs, requests, and what they are promised."""
    what = parser.add_argument_group("model and GPUs")
    add = what.add_argument
    add("--model", metavar="MODEL", help=f"{', '.join(MODELS)}, or a folder with a config.json")
    add("--gpu", metavar="GPU", help=f"{', '.join(GPUS)}")
    add(
        "--parallel",
        type=int,
        nargs="+",
        metavar="N",
        help="GPUs of an instance, tensor parallel (1, 2, 4 and 8, as far as they fit)",
    )
    add(
        "--profile",
        metavar="NAME",
        help="instead of model and GPU: one of `vllm-tetri sim --help`, a measured *.json",
    )
    add("--gpus", type=int, metavar="N", help="that there are (8, unless --rate is given)")
    add("--rate", type=float, metavar="N", help="or: requests per second, to find how many GPUs")
    add("--price", type=float, metavar="N", help="of a GPU per hour, to see what tokens cost")
    add(
        "--link",
        default="roce",
        metavar="LINK",
        help=f"that KV takes between instances: {', '.join(LINKS)}, or Gbit/s (roce)",
    )
    requests = parser.add_argument_group("requests")
    add = requests.add_argument
    add("--kind", default="mixed", metavar="KIND", help=f"{', '.join(KINDS)} (mixed)")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="lengths of a *.csv (ContextTokens, GeneratedTokens) or *.jsonl, instead of --kind",
    )
    add("--accuracy", type=float, default=1.0, metavar="PART", help="of predictions (1)")
    add("--requests", type=int, default=1000, metavar="N", help="at least, per simulation (1000)")
    add("--seed", type=int, default=0, metavar="N", help="of everything random (0)")
    slo = parser.add_argument_group("promise")
    add = slo.add_argument
    add("--ttft", type=float, required=True, metavar="SECONDS", help="to the first token")
    add("--tpot", type=float, required=True, metavar="SECONDS", help="per token behind that")
    add("--attainment", type=float, default=0.9, metavar="PART", help="that keep both (0.9)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Search, and print."""
    question = _question(options)
    if options.price is not None and not options.price > 0:
        raise ConfigError(f"--price {options.price:g}: must be above 0")
    price = Price(options.price)
    with _progress() as tell:
        found = plan(question, tell)
    if options.json:
        print(json.dumps(plain(found, price), indent=2))
        return 0
    _show(options, found, price)
    return 0


def _question(options: argparse.Namespace) -> Question:
    known = None if options.trace is None else tuple(_lengths(options.trace))
    devices = options.gpus
    if devices is None and options.rate is None:
        devices = _DEVICES
    if options.requests < 1:
        raise ConfigError(f"--requests {options.requests}: must be at least 1")
    demand = Demand(options.kind, known, options.accuracy, options.requests, options.seed)
    longest, _ = demand.longest
    return Question(
        profiles=_profiles(options, devices),
        demand=demand,
        goal=Goal(Slo(options.ttft, options.tpot), options.attainment),
        site=Site(link(options.link), longest, options.seed),
        devices=devices,
        rate=options.rate,
    )


def _lengths(path: Path) -> list[Lengths]:
    if path.suffix == ".csv":
        return read_lengths(path)
    return [(each.prompt_tokens, each.output_tokens) for each in read_trace(path)]


def _profiles(options: argparse.Namespace, devices: int | None) -> tuple[Profile, ...]:
    """One per tensor parallel degree; those asked for must fit, others may be left out."""
    if options.profile is not None:
        if options.model or options.gpu or options.parallel:
            raise ConfigError("--profile says model and GPUs already; leave the others out")
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


def _show(options: argparse.Namespace, found: Plan, price: Price) -> None:
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_FILE_COLUMNS)
    what = options.profile or f"{options.model} on {options.gpu}"
    requests = options.kind if options.trace is None else options.trace.name
    goal = found.question.goal
    title = (
        f"{what}, {requests}: {goal.attainment:.0%} get a first token within {goal.slo.ttft_s:g} s "
        f"and then {goal.slo.tpot_s * _MS:g} ms a token"
    )
    console.print(title, highlight=False, markup=False)
    console.print(table(found, price))
    for line in recommendation(found):
        console.print(line, highlight=False, markup=False)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is to be called before every search."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("planning") as status:
        yield status.update
