"""What a plan shows: a table, a recommendation with its reasons, or JSON."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from vllm_tetri.sim.command import empty_table
from vllm_tetri.sim.plan.values import Found, Plan, System

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
