"""What a plan shows: a table, a recommendation with its reasons, or JSON."""

from __future__ import annotations

import math
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from vllm_tetri.sim.plan.values import Found, Plan, System

_COLUMNS = (
    "GPUs\neach", "GPUs", "tokens\na step", "goodput\nrequests/s", "per GPU", "output\ntokens/s",
)  # fmt: skip
_PRICES = ("price\nan hour", "a million\noutput tokens")


def plain(plan: Plan, price: float | None) -> dict[str, Any]:
    """Return the plan for programs; `price` is that of a GPU hour."""
    return {
        "simulated": True,
        "estimate": plan.best.layout.profile.is_estimate,
        "recommended": _row(plan, plan.recommended, price),
        "margin": None if math.isinf(plan.margin) else plan.margin,
        "clear": plan.is_clear,
        "why": recommendation(plan),
        "layouts": [_row(plan, found, price) for found in plan.found],
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


def _row(plan: Plan, found: Found, price: float | None) -> dict[str, Any]:
    layout = found.layout
    cells: dict[str, Any] = {
        "system": layout.system.value,
        "profile": layout.profile.name,
        "devices_per_instance": layout.profile.num_devices,
        "prefill": layout.prefill,
        "decode": layout.decode,
        "both": layout.both,
        "tokens_per_step": layout.tokens,
        "devices": found.devices,
        "goodput": found.rate,
        "goodput_per_device": found.per_device,
        "goodput_of_seeds": list(found.rates),
    }
    if price is not None:
        per_hour = price * found.devices
        per_million = per_hour / (found.rate * plan.question.demand.output_tokens * 3600) * 1e6
        cells |= {"price_per_hour": per_hour, "price_per_million_output_tokens": per_million}
    return cells


def table(plan: Plan, price: float | None) -> Table:
    """Return all layouts, the best one first."""
    made = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("layout", no_wrap=True)
    for name in (*_COLUMNS, *(() if price is None else _PRICES)):
        made.add_column(name, justify="right", no_wrap=True)
    for found in plan.found:
        row, rates = _row(plan, found, price), found.rates
        spread = f" ({min(rates):.3g} to {max(rates):.3g})" if len(rates) > 1 else ""
        prices = (
            []
            if price is None
            else [f"{row['price_per_hour']:.2f}", f"{row['price_per_million_output_tokens']:.3g}"]
        )
        made.add_row(
            found.layout.name,
            f"{row['devices_per_instance']}",
            f"{found.devices}",
            f"{found.layout.tokens}",
            f"{found.rate:.3g}{spread}",
            f"{found.per_device:.3g}",
            f"{found.rate * plan.question.demand.output_tokens:.0f}",
            *prices,
        )
    return made


def recommendation(plan: Plan) -> list[str]:
    """Say what to use, by how much it is better than what, and why."""
    profile = plan.best.layout.profile
    costs = f"the step costs come from: {profile.source}"
    if profile.is_estimate:
        costs = "the step costs are an estimate, measured nowhere: measure before you rely on it"
    return [
        _advice(plan),
        _margin(plan),
        _limit(plan),
        *_ratio(plan),
        *(f"Left out, {each}." for each in plan.skipped),
        f"All of this is simulated; {costs}.",
    ]


def _advice(plan: Plan) -> str:
    layout = plan.recommended.layout
    lead = "Do not separate prefill and decode for this"
    if not layout.both:
        lead = "Take prefill and decode instances"
    elif not layout.is_aggregated:
        lead = "Take instances that do both and hand over where it helps"
    words = "chunks" if layout.system is not System.STOCK else "a budget"
    return (
        f"{lead}: {layout.name}, tensor parallel {layout.profile.num_devices}, {words} of "
        f"{layout.tokens} tokens: {plan.recommended.rate:.3g} requests/s on "
        f"{_gpus(plan.recommended.devices)}, {plan.recommended.per_device:.3g} per GPU."
    )


def _margin(plan: Plan) -> str:
    best, rival = plan.best, plan.rival
    if rival is None:
        kind = "hands over" if best.layout.is_aggregated else "keeps requests on one instance"
        return f"Margin: no layout that {kind} serves this."
    other = f"the best layout that {'does not' if rival.layout.is_aggregated else 'does'} hand over"
    margin = f"{plan.margin:+.0%} per GPU compared with {other}, {rival.layout.name}"
    if plan.saves_devices:
        margin = f"{_gpus(best.devices)}; {other}, {rival.layout.name}, takes {rival.devices}"
    verdict = "with requests of every seed" if plan.is_clear else "not with requests of every seed"
    if plan.recommended is not best:
        verdict += ": too little for the effort of handing over"
    return f"Margin of {best.layout.name}: {margin}; {verdict}."


def _limit(plan: Plan) -> str:
    beyond, slo = plan.best.goodput.beyond, plan.question.goal.slo
    return (
        f"Why not more: beyond its goodput, in {plan.best.layout.name}, {beyond.ttft_missed:.0%} "
        f"wait more than {slo.ttft_s:g} s for a first token, and {beyond.tpot_missed:.0%} get "
        f"tokens slower than {slo.tpot_s * 1e3:g} ms each."
    )


def _ratio(plan: Plan) -> list[str]:
    """Explain the best layout of prefill and decode instances, if there is one."""
    layout = next((each.layout for each in plan.found if not each.layout.both), None)
    if layout is None:
        return []
    single = next(each for each in plan.singles if each.profile == layout.profile)
    why = (
        f"Why that ratio: one instance ({_gpus(layout.profile.num_devices)}) computes "
        f"{single.prefill.rate:.3g} prompts/s or decodes {single.decode.rate:.3g} requests/s in "
        f"time: together {single.split_rate:.3g} requests/s per GPU; one that does both serves "
        f"{single.whole_rate:.3g}."
    )
    return [why]


def _gpus(count: int) -> str:
    return f"{count} GPU" + ("s" if count > 1 else "")
