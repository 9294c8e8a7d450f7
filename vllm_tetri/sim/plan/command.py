"""`vllm-tetri sim plan`: which layout serves most requests in time, per GPU."""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.command import REQUIRED, add_options, empty_table, objective_of, show
from vllm_tetri.sim.cost.profiles import Profile, profile, roofline_profile
from vllm_tetri.sim.links import link
from vllm_tetri.sim.plan.goodput import Demand
from vllm_tetri.sim.plan.search import plan
from vllm_tetri.sim.plan.values import Found, Plan, Question, System
from vllm_tetri.sim.workload import above_0, read_lengths

_DEVICES = 8
_PARALLEL = (1, 2, 4, 8)
# Facts in the table: key in JSON, title, and how it is written.
_SHOWN = {
    "layout": ("layout", ""),
    "devices_per_instance": ("GPUs\neach", ""),
    "devices": ("GPUs", ""),
    "tokens_per_step": ("tokens\na step", ""),
    "goodput": ("goodput\nrequests/s", ".3g"),
    "goodput_per_device": ("per GPU", ".3g"),
    "output_tokens_per_s": ("output\ntokens/s", ".0f"),
    "price_per_hour": ("price\nan hour", ".2f"),
    "price_per_million_output_tokens": ("a million\noutput tokens", ".3g"),
}


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


# -- what a plan shows ---------------------------------------------------------------------


def _facts(plan: Plan, found: Found) -> dict[str, Any]:
    layout, tokens_per_s = found.layout, found.rate * plan.question.demand.output_tokens
    facts = {
        "layout": layout.name,
        "system": layout.system.value,
        "profile": layout.profile.name,
        "prefill": layout.prefill,
        "decode": layout.decode,
        "both": layout.both,
        "devices_per_instance": layout.profile.num_devices,
        "devices": found.devices,
        "tokens_per_step": layout.tokens,
        "goodput": found.rate,
        "goodput_per_device": found.per_device,
        "output_tokens_per_s": tokens_per_s,
    }
    if plan.question.price is not None:
        facts["price_per_hour"] = per_hour = plan.question.price * found.devices
        facts["price_per_million_output_tokens"] = per_hour / 3600 / tokens_per_s * 1e6
    return facts


def plain(plan: Plan) -> dict[str, Any]:
    """Return the plan for programs."""
    return {
        "simulated": True,
        "estimate": plan.best.layout.profile.is_estimate,
        "recommended": _facts(plan, plan.recommended),
        "margin": None if math.isinf(plan.margin) else plan.margin,
        "clear": plan.is_clear,
        "why": recommendation(plan),
        "layouts": [_facts(plan, each) for each in plan.found],
        "one_instance": [
            {"profile": each.profile.name, "prefill_rate": each.prefill.rate,
             "decode_rate": each.decode.rate, "stock_rate": each.stock.rate,
             "whole_rate": each.whole.rate}
            for each in plan.singles
        ],
    }  # fmt: skip


def table(plan: Plan) -> Table:
    """Return all layouts, the best one first."""
    rows = [_facts(plan, each) for each in plan.found]
    shown = {key: each for key, each in _SHOWN.items() if key in rows[0]}
    made = empty_table(title for title, _ in shown.values())
    for facts in rows:
        made.add_row(*(format(facts[key], form) for key, (_, form) in shown.items()))
    return made


def recommendation(plan: Plan) -> list[str]:
    """Say what to use, by how much it is better than what, and why."""
    profile, beyond, slo = plan.best.layout.profile, plan.best.beyond, plan.question.slo
    costs = f"the step costs come from: {profile.source}"
    if profile.is_estimate:
        costs = "the step costs are an estimate, measured nowhere: measure before you rely on it"
    limit = (
        f"Why not more: beyond its goodput, in {plan.best.layout.name}, {beyond.ttft_missed:.0%} "
        f"wait more than {slo.ttft_s:g} s for a first token, and {beyond.tpot_missed:.0%} get "
        f"tokens slower than {slo.tpot_s * 1e3:g} ms each."
    )
    return [
        _advice(plan),
        _margin(plan),
        limit,
        *(f"Left out, {each}." for each in plan.skipped),
        f"All of this is simulated; {costs}.",
    ]


def _advice(plan: Plan) -> str:
    found, layout = plan.recommended, plan.recommended.layout
    lead = "Do not separate prefill and decode for this"
    if not layout.both:
        lead = "Take prefill and decode instances"
    elif not layout.is_aggregated:
        lead = "Take instances that do both and hand over where it helps"
    words = "a budget" if layout.system is System.STOCK else "chunks"
    return (
        f"{lead}: {layout.name}, tensor parallel {layout.profile.num_devices}, {words} of "
        f"{layout.tokens} tokens: {found.rate:.3g} requests/s on {found.devices} GPUs, "
        f"{found.per_device:.3g} per GPU."
    )


def _margin(plan: Plan) -> str:
    best, rival = plan.best, plan.rival
    if rival is None:
        kind = "hands over" if best.layout.is_aggregated else "keeps requests on one instance"
        return f"Margin: no layout that {kind} serves this."
    other = "does not" if rival.layout.is_aggregated else "does"
    verdict = "" if plan.recommended is best else ": too little for the effort of handing over"
    return (
        f"Margin of {best.layout.name} on {best.devices} GPUs: {plan.margin:+.0%} per GPU compared "
        f"with the best layout that {other} hand over, {rival.layout.name} on {rival.devices}"
        f"{verdict}."
    )
