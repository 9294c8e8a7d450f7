"""`vllm-tetri sim plan`: which layout serves most requests in time, per GPU."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from rich.console import Console

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.command import REQUIRED, add_options, objective_of, show
from vllm_tetri.sim.cost.profiles import Profile, profile, roofline_profile
from vllm_tetri.sim.links import link
from vllm_tetri.sim.plan.goodput import Demand
from vllm_tetri.sim.plan.report import plain, recommendation, table
from vllm_tetri.sim.plan.search import plan
from vllm_tetri.sim.plan.values import Question
from vllm_tetri.sim.trace import read_lengths
from vllm_tetri.sim.workload import above_0

_DEVICES = 8
_PARALLEL = (1, 2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add model, GPUs, requests and SLOs."""
    add_options(
        parser, "model and GPUs",
        model=None, gpu=None, parallel=None, profile=None, gpus=None, rate=None, price=None,
        link="roce",
    )  # fmt: skip
    add_options(parser, "requests", kind="mixed", trace=None, requests=1000, accuracy=1.0, seed=0)
    add_options(
        parser, "SLOs", ttft_slo=REQUIRED, tpot_slo=REQUIRED, attainment=0.9, json=None
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Search, and print a table with a recommendation, or JSON."""
    question = _question(options)
    console = Console(stderr=True)
    with console.status("planning") if console.is_terminal else nullcontext() as status:
        found = plan(question, status.update if status is not None else lambda _: None)
    what = options.profile or f"{options.model} on {options.gpu}"
    requests = options.kind if options.trace is None else options.trace.name
    slo = found.question.slo
    title = (
        f"{what}, {requests}: {found.question.attainment:.0%} get a first token within "
        f"{slo.ttft_s:g} s and then {slo.tpot_s * 1e3:g} ms a token"
    )
    show(options.json, plain(found), title, table(found), *recommendation(found))
    return 0


def _question(options: argparse.Namespace) -> Question:
    known = None if options.trace is None else tuple(read_lengths(options.trace))
    devices = _DEVICES if options.gpus is None and options.rate is None else options.gpus
    if None not in (devices, options.rate):
        raise ConfigError("give either how many GPUs there are, or the rate to serve")
    above_0(GPUs=devices, rate=options.rate, price=options.price, requests=options.requests)
    if not 0 < options.attainment <= 1:
        raise ConfigError(f"an attainment of {options.attainment:g}: must be above 0, at most 1")
    return Question(
        profiles=_profiles(options),
        demand=Demand(options.kind, known, options.accuracy, options.requests, options.seed),
        slo=objective_of(options),
        attainment=options.attainment,
        link=link(options.link),
        devices=devices,
        rate=options.rate,
        price=options.price,
    )


def _profiles(options: argparse.Namespace) -> tuple[Profile, ...]:
    """One per tensor parallel degree; those of --parallel must fit, others may be left out."""
    if options.profile is not None:
        if options.model or options.gpu or options.parallel:
            raise ConfigError("--profile names model and GPUs already; leave the others out")
        return (profile(options.profile),)
    if not (options.model and options.gpu):
        raise ConfigError("give --model and --gpu, or --profile")
    fitting = []
    for each in dict.fromkeys(options.parallel or _PARALLEL):
        try:
            fitting.append(roofline_profile(options.model, options.gpu, each))
        except ConfigError:
            if options.parallel or (each == _PARALLEL[-1] and not fitting):
                raise
    return tuple(fitting)
