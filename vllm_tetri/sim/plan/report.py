"""What a plan shows: a table, a recommendation with its reasons, or JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from vllm_tetri.sim.plan.values import Found, Plan, System


class _Column(NamedTuple):
    """A fact of every layout: its key in JSON, and its title in the table if it is there."""

    key: str
    value: Callable[[Plan, Found], Any]
    title: str = ""
    form: str = ""


_COLUMNS = (
    _Column("layout", lambda _, each: each.layout.name, "layout"),
    _Column("system", lambda _, each: each.layout.system.value),
    _Column("profile", lambda _, each: each.layout.profile.name),
    _Column("prefill", lambda _, each: each.layout.prefill),
    _Column("decode", lambda _, each: each.layout.decode),
    _Column("both", lambda _, each: each.layout.both),
    _Column(
        "devices_per_instance", lambda _, each: each.layout.profile.num_devices, "GPUs\neach"
    ),
    _Column("devices", lambda _, each: each.devices, "GPUs"),
    _Column("tokens_per_step", lambda _, each: each.layout.tokens, "tokens\na step"),
    _Column("goodput", lambda _, each: each.rate, "goodput\nrequests/s", ".3g"),
    _Column("goodput_per_device", lambda _, each: each.per_device, "per GPU", ".3g"),
    _Column("output_tokens_per_s", lambda plan, each: _tokens_per_s(plan, each),
            "output\ntokens/s", ".0f"),
)  # fmt: skip
_PRICES = (
    _Column("price_per_hour", lambda plan, each: _per_hour(plan, each), "price\nan hour", ".2f"),
    _Column(
        "price_per_million_output_tokens",
        lambda plan, each: _per_hour(plan, each) / 3600 / _tokens_per_s(plan, each) * 1e6,
        "a million\noutput tokens",
        ".3g",
    ),
)


def _tokens_per_s(plan: Plan, found: Found) -> float:
    return found.rate * plan.question.demand.output_tokens


def _per_hour(plan: Plan, found: Found) -> float:
    return (plan.question.price or 0.0) * found.devices


def _columns(plan: Plan) -> tuple[_Column, ...]:
    return _COLUMNS if plan.question.price is None else (*_COLUMNS, *_PRICES)


def plain(plan: Plan) -> dict[str, Any]:
    """Return the plan for programs."""
    rows = {
        each.layout: {column.key: column.value(plan, each) for column in _columns(plan)}
        for each in plan.found
    }
    return {
        "simulated": True,
        "estimate": plan.best.layout.profile.is_estimate,
        "recommended": rows[plan.recommended.layout],
        "margin": None if math.isinf(plan.margin) else plan.margin,
        "clear": plan.is_clear,
        "why": recommendation(plan),
        "layouts": list(rows.values()),
        "one_instance": [
            {
                "profile": each.profile.name,
                "prefill_rate": each.prefill.rate,
                "decode_rate": each.decode.rate,
                "stock_rate": each.stock.rate,
                "whole_rate": each.whole.rate,
            }
            for each in plan.singles
        ],
    }


def table(plan: Plan) -> Table:
    """Return all layouts, the best one first."""
    made = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    shown = [column for column in _columns(plan) if column.title]
    for column in shown:
        made.add_column(column.title, justify="right" if made.columns else "left", no_wrap=True)
    for each in plan.found:
        made.add_row(*(format(column.value(plan, each), column.form) for column in shown))
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
        *_ratio(plan),
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


def _ratio(plan: Plan) -> list[str]:
    """Explain the best layout of prefill and decode instances, if there is one."""
    layout = next((each.layout for each in plan.found if not each.layout.both), None)
    if layout is None:
        return []
    single = next(each for each in plan.singles if each.profile == layout.profile)
    devices = layout.profile.num_devices
    why = (
        f"Why that ratio: one instance of {devices} GPUs computes {single.prefill.rate:.3g} "
        f"prompts/s or decodes {single.decode.rate:.3g} requests/s in time: together "
        f"{single.split_rate / devices:.3g} requests/s per GPU; one that does both serves "
        f"{single.whole_rate / devices:.3g}."
    )
    return [why]
