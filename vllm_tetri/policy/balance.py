"""Flips for balance: a forecast of what both roles have to do over the next seconds. Pure.

It counts how many requests will be in the system: as things are, with one more prefill
instance, and with one more decode instance. It goes by what comes, what is left to do and
how fast instances are, and flips when that saves a good part of them, and has for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import exp, inf, sqrt
from operator import attrgetter
from statistics import fmean

from vllm_tetri.policy.scale import ROLES, Bounds, Change, Scale, all_bounds
from vllm_tetri.types import (
    ClusterView,
    FlipStage,
    InstanceId,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
)

ROLLED_BACK_S = 60.0  # for this long an instance whose flip failed is left alone
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class FlipOrder:
    """An instance's next role. With `now` it takes new-role work at once while it finishes
    old-role work; `reason` is short, with the numbers that decided."""

    instance: InstanceId
    role: Role
    now: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Look:
    """Outcome of one look; `explanation` says why there is an order, or none."""

    order: FlipOrder | None
    explanation: str
    changes: tuple[Change, ...] = ()  # of the numbers of instances, one for each model


class Group:
    """The instances of one model in one view, whose numbers may be bounded."""

    def __init__(
        self, view: ClusterView, model: str, bounds: Mapping[Role, Bounds] | None = None
    ) -> None:
        self.model, self.bounds = model, all_bounds(bounds)
        self.all = [each for each in view.instances if each.info.models[0] == model]
        ready = [each for each in self.all if each.state is InstanceState.READY]
        self.ready = {role: [each for each in ready if each.info.role is role] for role in ROLES}
        self.counts = {role: len(self.ready[role]) for role in ROLES}
        under_way = [each for each in ready if each.flip is not None and each.flip.is_under_way]
        under_way += [each for each in self.all if each.state is InstanceState.FLIPPING]
        self.flipping = [each.info.id for each in under_way]

    def able(self, role: Role) -> list[InstanceView]:
        """List the instances that may give a role up."""
        other = OTHER[role]
        if self.counts[role] <= self.bounds[role].least:
            return []
        if self.counts[other] >= self.bounds[other].most:
            return []
        return [
            each
            for each in self.ready[role]
            if each.flip is None
            or each.flip.stage is not FlipStage.ROLLED_BACK
            or each.flip.age_s + each.age_s >= ROLLED_BACK_S
        ]

    def is_at_rest(self) -> bool:
        """Return whether all are ready, without work, and as they will stay."""
        return self.is_still() and not any(
            each.load.running or each.load.waiting or each.load.held for each in self.all
        )

    def is_still(self) -> bool:
        """Return whether all are ready, and none is about to change its role."""
        return not self.flipping and all(each.state is InstanceState.READY for each in self.all)

    def last_flip_s(self) -> float:
        """Return the seconds since any of them got anywhere with a flip."""
        ages = (each.flip.age_s + each.age_s for each in self.all if each.flip is not None)
        return min(ages, default=inf)

    def __str__(self) -> str:
        return f"{self.counts[Role.PREFILL]} prefill, {self.counts[Role.DECODE]} decode"


# Found by simulating swings between Azure's code and conversation traces.
HORIZON_S = 40.0  # about as long as a phase lasts; 10 s undervalues what a flip pays later
RATE_S = 6.0  # memory of what comes: a shorter one follows chance, a longer one is late
LEAST_KNOWN = 0.5  # part of that memory to be filled, and prompts in it
GAIN = 0.2  # part of the requests to be saved: less is within the error of the forecast
LEAST_GAIN = 0.5  # requests to be saved: what goes on below is not worth a flip
LASTING_S = 1.0  # the time of a long prompt: what is over by then needs no flip
COOL_DOWN_S = 5.0  # until the loads show what the last flip did
_STEPS = 10  # of a forecast; twice as many give the same


class Balance:
    """Flips whatever makes for the fewest requests in the system. Mean completion time
    goes with their number (Little's law). With `bounds` it asks for instances, too."""

    def __init__(self, bounds: Mapping[Role, Bounds] | None = None) -> None:
        self._flow = _Flow()
        self._scale = Scale(bounds) if bounds else None
        self._wanted: Role | None = None
        self._wanted_since_s = 0.0

    def look(self, group: Group, now: float) -> Look:
        self._flow.add(group.all, now)
        forecast = _forecast(group, self._flow)
        look = self._flip(group, forecast, now)
        change = self._change(group, forecast, now)
        return replace(look, changes=(change,) if change is not None else ())

    def _change(self, group: Group, forecast: _Forecast | None, now: float) -> Change | None:
        if self._scale is None:
            return None
        demand = None
        if group.is_still():
            demand = forecast.demand() if forecast is not None else None
            if demand is None and group.is_at_rest():
                demand = dict.fromkeys(ROLES, 0.0)
        wanted = self._scale.look(demand, group.counts, now)
        if wanted is None or demand is None:
            return None
        role, number = wanted
        busy = ", ".join(f"{demand[each]:.1f} {each}" for each in ROLES)
        one = None
        if number < 0:
            one = min(group.ready[role], key=attrgetter("load.running", "info.id")).info.id
        return Change(group.model, role, f"{group}, of which the load keeps {busy} at work", one)

    def _flip(self, group: Group, forecast: _Forecast | None, now: float) -> Look:
        wanted, self._wanted = self._wanted, None
        if forecast is None:
            return Look(None, f"{group}; too little is known yet")
        seen = (
            f"{group}, {forecast.per_s:.1f} requests/s, {forecast.queued:.1f} queued, "
            f"{forecast.decoding:.1f} decoding"
        )
        counts = group.counts
        stay = forecast.requests(counts)
        saved = {
            role: stay - forecast.requests({role: counts[role] + 1, other: counts[other] - 1})
            for role, other in OTHER.items()
            if group.able(other)
        }
        if not saved:
            return Look(None, f"{seen}; no instance may flip")
        role = max(saved, key=saved.__getitem__)
        needed = max(LEAST_GAIN, GAIN * min(stay, forecast.most_saved(role)))
        says = f"{seen}; one more for {role} leaves {stay - saved[role]:.1f} of {stay:.1f} requests"
        if saved[role] < needed:
            return Look(None, f"{says}, which must be {needed:.1f} less")
        if role is not wanted:
            self._wanted_since_s = now
        self._wanted = role
        if now - self._wanted_since_s < LASTING_S:
            return Look(None, f"{says}, but only since {now - self._wanted_since_s:.1f} s")
        if group.last_flip_s() < COOL_DOWN_S:
            return Look(None, f"{says}, but the last flip was {group.last_flip_s():.1f} s ago")
        # At once: waiting for the last decode keeps an instance from both roles for as
        # long as the longest output takes, which in simulation costs more than it saves.
        left = "remaining_tokens" if role is Role.PREFILL else "queued_prefill_tokens"
        one = min(group.able(OTHER[role]), key=attrgetter(f"load.{left}", "info.id"))
        return Look(FlipOrder(one.info.id, role, now=True, reason=says), says)


# Prompts and tokens that were computed, and tokens that are to be.
_work = attrgetter(
    "prefills_done", "prompt_tokens_done", "output_tokens_done",
    "queued_prefill_tokens", "remaining_tokens",
)  # fmt: skip


class _Flow:
    """What comes for the instances of one model, with a memory of `RATE_S`: what each of them did
    and what its backlog grew by."""

    def __init__(self) -> None:
        self._seen: dict[InstanceId, tuple[int, ...]] = {}
        self._at_s = -inf
        self._seen_s = 0.0
        self._sums = [0.0] * 5  # of changes, as `_work`

    def add(self, instances: Iterable[InstanceView], now: float) -> None:
        """Add what a view shows to the sums."""
        passed_s = now - self._at_s
        if passed_s > RATE_S:  # without a look: in another mode, or at another router
            self._seen, self._seen_s, self._sums = {}, 0.0, [0.0] * 5
        kept = exp(-passed_s / RATE_S)
        self._seen_s = kept * self._seen_s + (passed_s if self._seen else 0.0)
        sums = [kept * each for each in self._sums]
        # One that has not reported yet has counters of 0, which do not grow to what they are.
        seen = {
            each.info.id: _work(each.load)
            for each in instances
            if each.info.role in OTHER and each.seq
        }
        for id_, work in seen.items():
            changes = [new - old for new, old in zip(work, self._seen.get(id_, work), strict=True)]
            if min(changes[1:3]) >= 0:  # else it was started again
                sums = [old + change for old, change in zip(sums, changes, strict=True)]
        self._seen, self._at_s, self._sums = seen, now, sums

    def means(self) -> tuple[float, float, float] | None:
        """Return the mean length of a prompt, that of an output, and the prompt tokens that come
        per second; None while too little is known."""
        if self._seen_s < LEAST_KNOWN * RATE_S or self._sums[0] < LEAST_KNOWN:
            return None
        done, done_tokens, output_tokens, queued_tokens, remaining_tokens = self._sums
        prompt = max(1.0, done_tokens / done)
        output = max(1.0, (output_tokens + remaining_tokens) / done)
        return prompt, output, max(0.0, done_tokens + queued_tokens) / self._seen_s


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What comes and what there is to do for one model, counted in average requests."""

    per_s: float  # requests that come
    queued: float  # prompts to be computed
    decoding: float  # outputs to be written
    prefills_per_s: float  # prompts that one busy instance computes
    decodes_per_s: float  # outputs that one instance writes with endlessly many at a time
    half: float  # with how many at a time it writes half as many
    full_per_s: float  # that it writes with its KV blocks full

    def requests(self, counts: Mapping[Role, int]) -> float:
        """Return how many there are in the system until the horizon, on average.

        Both roles are fluid queues, one after the other. A prefill instance is busy for
        x/(1+x) of the time with x requests on average (M/M/1), and a decode instance
        writes in proportion to n/(half+n), as a step takes base + n · each.
        """
        step_s = HORIZON_S / _STEPS
        prefills, decodes = counts[Role.PREFILL], counts[Role.DECODE]
        queued, decoding, total = self.queued, self.decoding, 0.0
        for _ in range(_STEPS):
            prompts = queued + self.per_s * step_s
            queued = _left(prompts, prefills * self.prefills_per_s * step_s, prefills)
            outputs = decoding + prompts - queued
            decoding = max(
                _left(outputs, decodes * self.decodes_per_s * step_s, decodes * self.half),
                outputs - decodes * self.full_per_s * step_s,
            )
            total += queued + decoding
        return total / _STEPS

    def demand(self) -> dict[Role, float]:
        """Return how many instances of each role what comes keeps at work all the time, and what
        is queued until the horizon."""
        prompts_per_s = self.per_s + self.queued / HORIZON_S
        return {
            Role.PREFILL: prompts_per_s / self.prefills_per_s,
            Role.DECODE: prompts_per_s / self.full_per_s,
        }

    def most_saved(self, role: Role) -> float:
        """Return how many fewer there are on average if one more with a role is never without
        work."""
        per_s = self.prefills_per_s if role is Role.PREFILL else self.full_per_s
        return per_s * HORIZON_S / 2


def _left(there: float, most: float, half: float) -> float:
    """Return what is left of some requests after a step that ends most · x / (half + x) of them
    if x are left."""
    excess = there - most - half
    return (excess + sqrt(excess * excess + 4 * there * half)) / 2


def _forecast(group: Group, flow: _Flow) -> _Forecast | None:
    """Forecast one model; None while too little is known of what comes, or how fast its
    instances are."""
    ready = [*group.ready[Role.PREFILL], *group.ready[Role.DECODE]]
    loads = [each.load for each in ready]
    costs = [load.cost for load in loads if load.cost.is_known and load.output_tokens_done > 0]
    if not (costs and (means := flow.means())):
        return None
    prompt, output, coming_per_s = means
    # Decode instances compute the ends of prompts at most, which says little about prefill.
    own = [each.load for each in group.ready[Role.PREFILL]]
    tokens_per_s = _prefill_tokens_per_s(own, prompt) or _prefill_tokens_per_s(loads, prompt)
    if tokens_per_s <= 0:
        return None
    context = prompt + output / 2
    request_s = max(1e-6, fmean(cost.request_s + context * cost.token_s for cost in costs))
    pools = [each.load.blocks_total * each.info.block_size for each in ready]
    kv_tokens = fmean([tokens for tokens in pools if tokens] or [0])  # 0: no report yet
    decodes_per_s, half = 1 / (request_s * output), fmean(cost.base_s for cost in costs) / request_s
    most = max(1.0, kv_tokens / (prompt + output))
    return _Forecast(
        per_s=coming_per_s / prompt,
        # No more than there are: averages are off while the mix changes.
        queued=min(
            sum(load.queued_prefill_tokens for load in loads) / prompt,
            sum(load.running + load.waiting for load in loads),
        ),
        decoding=min(
            sum(load.remaining_tokens for load in loads) / output,
            sum(load.heavy + load.light for load in loads),
        ),
        prefills_per_s=tokens_per_s / prompt,
        decodes_per_s=decodes_per_s,
        half=half,
        full_per_s=decodes_per_s * most / (half + most),
    )


def _prefill_tokens_per_s(loads: Iterable[InstanceLoad], prompt_tokens: float) -> float:
    """Return how many prompt tokens full steps compute in a second; 0 before the first one."""
    known = []
    for load in loads:
        chunk_tokens = load.chunk_tokens or prompt_tokens
        seconds = load.cost.step_s(0, 0, chunk_tokens, prompt_tokens / 2)
        if load.prompt_tokens_done and seconds > 0:
            known.append(chunk_tokens / seconds)
    return fmean(known) if known else 0.0
