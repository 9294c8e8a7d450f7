"""What a plan says: a table, a recommendation with its reasons, or JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from vllm_tetri.sim.plan.layout import System
from vllm_tetri.sim.plan.single import Single
from vllm_tetri.sim.plan.values import Found, Plan

_HOUR_S = 3600
_MILLION = 1e6
_MS = 1e3
_EVEN = 0.02  # between shares that miss either SLO


@dataclass(frozen=True, slots=True)
class Price:
    """Of a GPU.

    Attributes:
        per_hour: Of one, in any currency; None if that is not known.
    """

    per_hour: float | None

    def of_hour(self, found: Found) -> float:
        """Of all GPUs of a layout."""
        assert self.per_hour is not None
        return self.per_hour * found.devices

    def of_million(self, found: Found, answer_tokens: float) -> float:
        """Of a million tokens of answers at its goodput."""
        return self.of_hour(found) / (found.rate * answer_tokens * _HOUR_S) * _MILLION


def table(plan: Plan, price: Price) -> Table:
    """All layouts, the best one first."""
    answer_tokens = mean_answer_tokens(plan)
    made = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("layout", no_wrap=True)
    columns = [
        "GPUs\neach",
        "GPUs",
        "tokens\na step",
        "goodput\nrequests/s",
        "per GPU",
        "answer\ntokens/s",
    ]
    if price.per_hour is not None:
        columns += ["price\nan hour", "a million\nanswer tokens"]
    for name in columns:
        made.add_column(name, justify="right", no_wrap=True)
    for found in plan.found:
        layout = found.layout
        cells = [
            f"{layout.profile.num_devices}",
            f"{found.devices}",
            f"{layout.tokens}",
            f"{found.rate:.3g}{_spread(found)}",
            f"{found.per_device:.3g}",
            f"{found.rate * answer_tokens:.0f}",
        ]
        if price.per_hour is not None:
            cells += [
                f"{price.of_hour(found):.2f}",
                f"{price.of_million(found, answer_tokens):.3g}",
            ]
        made.add_row(name_of(found), *cells)
    return made


def _spread(found: Found) -> str:
    if len(found.rates) == 1:
        return ""
    return f" ({min(found.rates):.3g} to {max(found.rates):.3g})"


def name_of(found: Found) -> str:
    """`split 3P+1D`."""
    return f"{found.layout.system} {found.layout.instances}"


def mean_answer_tokens(plan: Plan) -> float:
    """Of the requests that were asked about."""
    return fmean(ask.output_tokens for ask in plan.question.demand.sample())


def recommendation(plan: Plan) -> list[str]:
    """What to take, by how much it is better than what, and why."""
    lines = [_advice(plan)]
    rival = plan.rival
    if rival is not None:
        lines.append(_margin(plan, rival))
    elif not plan.best.layout.is_coupled:
        lines.append("Margin: no layout that keeps requests on one instance serves this.")
    else:
        lines.append("Margin: no layout that hands over serves this, or there are too few GPUs.")
    lines += _reasons(plan)
    lines += [f"Left out, {each}." for each in plan.skipped]
    lines.append(_caution(plan))
    return lines


def _advice(plan: Plan) -> str:
    taken = plan.recommended
    layout = taken.layout
    words = "chunks" if layout.system is not System.STOCK else "a budget"
    each = layout.profile.num_devices
    what = (
        f"{name_of(taken)}, tensor parallel {each}, {words} of {layout.tokens} tokens: "
        f"{taken.rate:.3g} requests/s on {_gpus(taken.devices)}, {taken.per_device:.3g} per GPU."
    )
    if layout.has_roles:
        return f"Take prefill and decode instances: {what}"
    if not layout.is_coupled:
        return f"Take instances that do both and hand over where it helps: {what}"
    return f"Do not separate prefill and decode for this: {what}"


def _margin(plan: Plan, rival: Found) -> str:
    best = plan.best
    kind = "coupled layout" if rival.layout.is_coupled else "that hands over"
    other = f"the best {kind}, {name_of(rival)}"
    if plan.question.rate is not None and rival.devices != best.devices:
        margin = f"{_gpus(best.devices)} where {other}, takes {rival.devices}"
    else:
        margin = f"{plan.margin:+.0%} per GPU beside {other} ({rival.per_device:.3g})"
    if plan.is_clear:
        return f"Margin: {margin}; clearly so with requests of every seed."
    if plan.recommended is best:
        return f"Margin: {margin}; not clearly so with requests of every seed."
    return (
        f"{name_of(best)} has {margin}, but not clearly so with requests of every seed: "
        "too little for the trouble of handing over."
    )


def _reasons(plan: Plan) -> list[str]:
    lines = []
    goal = plan.question.goal
    shown = [each for each in (plan.best, plan.rival) if each is not None]
    for found in shown:
        beyond = found.goodput.beyond
        if abs(beyond.ttft_missed - beyond.tpot_missed) < _EVEN:
            what = "both SLOs are missed about equally often"
        elif beyond.ttft_missed > beyond.tpot_missed:
            what = (
                f"{beyond.ttft_missed:.0%} wait more than {goal.slo.ttft_s:g} s for a first token"
            )
        else:
            what = (
                f"{beyond.tpot_missed:.0%} get tokens slower than {goal.slo.tpot_s * _MS:g} ms each"
            )
        lines.append(f"Why not more: beyond its goodput, in {name_of(found)}, {what}.")
    single = _single_of(plan)
    if single is not None:
        ratio = single.decode.rate / single.prefill.rate
        lines.append(
            f"Why that ratio: one instance ({_gpus(single.profile.num_devices)}) computes "
            f"{single.prefill.rate:.3g} prompts/s or writes {single.decode.rate:.3g} answers/s in "
            f"time, so {ratio:.2g} prefill instances feed one for decoding. Together these promise "
            f"{single.split_rate:.3g} requests/s per GPU, one that does both serves "
            f"{single.whole_rate:.3g}."
        )
    return lines


def _gpus(count: int) -> str:
    return f"{count} GPU" + ("s" if count > 1 else "")


def _single_of(plan: Plan) -> Single | None:
    """What the numbers of instances of the best layout with roles follow from."""
    found = next((each for each in plan.found if each.layout.has_roles), None)
    if found is None:
        return None
    profile = found.layout.profile
    return next(each for each in plan.singles if each.profile == profile)


def _caution(plan: Plan) -> str:
    profile = plan.best.layout.profile
    if profile.is_estimate:
        return (
            "All of this is simulated, and what steps take is an estimate, measured nowhere "
            "(docs/profiles.md): measure before you rely on it."
        )
    return f"All of this is simulated; what steps take comes from: {profile.source}."


def plain(plan: Plan, price: Price) -> dict[str, Any]:
    """The same for programs."""
    answer_tokens = mean_answer_tokens(plan)

    def row(found: Found) -> dict[str, Any]:
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
        if price.per_hour is not None:
            cells["price_per_hour"] = price.of_hour(found)
            cells["price_per_million_answer_tokens"] = price.of_million(found, answer_tokens)
        return cells

    return {
        "simulated": True,
        "estimate": plan.best.layout.profile.is_estimate,
        "recommended": row(plan.recommended),
        "margin": None if math.isinf(plan.margin) else plan.margin,
        "clear": plan.is_clear,
        "why": recommendation(plan),
        "layouts": [row(found) for found in plan.found],
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
