"""`vllm-tetri sim plan`: which layout serves most requests in time, per GPU."""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.command import REQUIRED, add_options, empty_table, objective_of, show
from vllm_tetri.sim.cost.profiles import Least, Profile, profile, roofline_profile
from vllm_tetri.sim.links import link
from vllm_tetri.sim.plan.goodput import Demand
from vllm_tetri.sim.plan.search import plan
from vllm_tetri.sim.plan.values import Found, Layout, Plan, Question, System
from vllm_tetri.sim.workload import above_0, read_lengths

_DEVICES = 8
_PARALLEL = (1, 2, 4, 8)
# Facts in the table: key in JSON, title, and how it is written.
_SHOWN = {
    "layout": ("layout", ""),
    "gpus_each": ("GPUs\neach", ""),
    "devices": ("GPUs", ""),
    "tokens_per_step": ("tokens\na step", ""),
    "goodput": ("goodput\nrequests/s", ".3g"),
    "goodput_per_device": ("per GPU", ".3g"),
    "output_tokens_per_s": ("output\ntokens/s", ".0f"),
    "price_per_hour": ("price\nan hour", ".2f"),
    "price_per_million_output_tokens": ("a million\noutput tokens", ".3g"),
    "watts": ("watts\n(TDP)", ".0f"),
    "rack_units": ("rack\nunits", ".3g"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add model, GPUs, requests and SLOs."""
    add_options(
        parser, "model and GPUs",
        model=None, gpu=None, parallel=None, profile=None, gpus=None, rate=None, price=None,
        least=Least.GPUS, node=None, link="roce",
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
    what = options.profile or f"{options.model} on {' and '.join(options.gpu)}"
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
    above_0(GPUs=devices, rate=options.rate, requests=options.requests, node=options.node)
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
        least=Least(options.least),
        node=options.node,
    )


def _profiles(options: argparse.Namespace) -> tuple[Profile, ...]:
    """One per kind of GPU and tensor parallel degree; those of --parallel must fit, others may be
    left out."""
    prices = options.price or [None]
    for price in prices:
        above_0(price=price)
    if options.profile is not None:
        if options.model or options.gpu or options.parallel:
            raise ConfigError("--profile names model and GPUs already; leave the others out")
        return (replace(profile(options.profile), price=prices[0]),)
    if not (options.model and options.gpu):
        raise ConfigError("give --model and --gpu, or --profile")
    kinds = list(dict.fromkeys(options.gpu))
    if len(prices) not in (1, len(kinds)):
        raise ConfigError(f"{len(prices)} prices of {len(kinds)} kinds of GPUs")
    fitting = []
    for kind, price in zip(kinds, prices * (len(kinds) // len(prices)), strict=True):
        for each in dict.fromkeys(options.parallel or _PARALLEL):
            try:
                known = roofline_profile(options.model, kind, each)
                fitting.append(replace(known, price=price))
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
        "decode_profile": (layout.decode_profile or layout.profile).name,
        "prefill": layout.prefill,
        "decode": layout.decode,
        "both": layout.both,
        "nodes": layout.nodes,
        "gpus_each": _gpus_each(plan, layout),
        "devices": found.devices,
        "tokens_per_step": layout.tokens,
        "goodput": found.rate,
        "goodput_per_device": found.per_device,
        "output_tokens_per_s": tokens_per_s,
    }
    totals = {each: found.total(each) for each in Least}
    if per_hour := totals[Least.PRICE]:
        facts["price_per_hour"] = per_hour
        facts["price_per_million_output_tokens"] = per_hour / 3600 / tokens_per_s * 1e6
    if totals[Least.POWER]:
        facts |= {"watts": totals[Least.POWER], "rack_units": totals[Least.SPACE]}
    return facts


def _gpus_each(plan: Plan, layout: Layout) -> str:
    """Name the GPUs of an instance, by role where they differ."""
    kinds = {each.gpu for each in plan.question.profiles}
    return "+".join(
        f"{each.num_devices} {each.gpu.name}" if each.gpu and len(kinds) > 1
        else str(each.num_devices)
        for each in layout.profiles
    )  # fmt: skip


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
    # TDPs are shown to those who ask for them.
    hidden = {"watts", "rack_units"} if plan.question.least is Least.GPUS else set()
    shown = {key: each for key, each in _SHOWN.items() if key in rows[0].keys() - hidden}
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
    if plan.question.least is Least.POWER:
        costs += "; watts are the vendor's TDP, not what serving was seen to draw"
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
        f"{lead}: {layout.name}, tensor parallel {_gpus_each(plan, layout)}, {words} of "
        f"{layout.tokens} tokens: {found.rate:.3g} requests/s on {found.devices} GPUs, "
        f"{plan.per_unit(found):.3g} per {plan.question.least.unit}."
    )


def _margin(plan: Plan) -> str:
    best, rival = plan.best, plan.rival
    if rival is None:
        kind = "hands over" if best.layout.is_aggregated else "keeps requests on one instance"
        return f"Margin: no layout that {kind} serves this."
    other = "does not" if rival.layout.is_aggregated else "does"
    verdict = "" if plan.recommended is best else ": too little for the effort of handing over"
    unit = plan.question.least.unit
    kind = f"the best layout that {other} hand over, {rival.layout.name} on {rival.devices}"
    if plan.is_cheaper:  # of whole instances, so per unit it may serve nearly as much
        words = f"{kind}, takes {plan.margin:.0%} more {unit} in all"
    else:
        words = f"{plan.margin:+.0%} per {unit} compared with {kind}"
    return f"Margin of {best.layout.name} on {best.devices} GPUs: {words}{verdict}."
