"""Which instance flips its role, and when: the transition watcher (paper section 3.5).

It looks at views and orders at most one flip at a look. Every policy keeps to the same
rules: instances of one model flip among each other, only ready ones do, one at a time,
and a role never loses its last ready one. Instances that do both never flip and stand in
for nobody. When the last flips were is read from the view: other routers may have
ordered them, or this one before it was started anew.

- `balance` foretells how many requests will be in the system over the next seconds: as
  things are, with one more prefill instance, and with one more decode instance. It goes by
  what comes, what is left to do and how fast instances are. It flips when that saves a
  good part of them, and has for a while.
- `idle` and `threshold` are the paper's: they flip what had nothing, or little, to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, inf, sqrt
from typing import Protocol

from vllm_tetri.types import (
    ClusterView,
    FlipStage,
    InstanceId,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
)

ORDER_SEEN_S = 2.0  # by then a report shows an order, or it was lost
ROLLED_BACK_S = 60.0  # an instance whose flip failed is not asked again for so long
LOW_LOAD = 0.1  # of `threshold`: the paper's example
_PARTS = 20  # of the time over which `threshold` averages

# Of `balance`, found by simulating swings between Azure's code and conversation traces.
HORIZON_S = 40.0  # about as long as a phase lasts; 10 s undervalues what a flip pays later
RATE_S = 6.0  # memory of what comes: a shorter one follows chance, a longer one is late
LEAST_KNOWN = 0.5  # part of that memory to be filled, and prompts in it
GAIN = 0.2  # part of the requests to be saved: less is within the error of the forecast
LEAST_GAIN = 0.5  # requests to be saved: what goes on below is not worth a flip
LASTING_S = 1.0  # the time of a long prompt: what is over by then needs no flip
COOL_DOWN_S = 5.0  # until the loads show what the last flip did
_STEPS = 10  # of a forecast; twice as many foretell the same

_ROLES = (Role.PREFILL, Role.DECODE)
_ENDS = (FlipStage.DONE, FlipStage.ROLLED_BACK)
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class WatchPolicy(StrEnum):
    """What makes an instance flip."""

    BALANCE = "balance"  # what is foretold for both roles
    THRESHOLD = "threshold"  # little to do for a while
    IDLE = "idle"  # nothing to do for a while
    OFF = "off"  # nobody watches


@dataclass(frozen=True, slots=True)
class FlipOrder:
    """What to do.

    Attributes:
        role: What the instance is to become.
        now: It takes new-role work at once while it finishes old-role work.
        reason: Short, with the numbers that decided.
    """

    instance: InstanceId
    role: Role
    now: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Look:
    """Outcome of one look; `explanation` says why there is an order, or none."""

    order: FlipOrder | None
    explanation: str


class Watcher(Protocol):
    """Decides on flips."""

    def look(self, view: ClusterView, now: float) -> Look:
        """What to do about the newest view. To be asked several times a second, with
        times that only grow; it remembers what it saw."""


def make_watcher(policy: WatchPolicy, *, after_s: float = 60.0) -> Watcher:
    """A watcher that has seen nothing yet.

    Args:
        policy: What makes an instance flip.
        after_s: How long `idle` and `threshold` watch before they say so.

    Raises:
        ValueError: With `off` nobody watches.
    """
    if policy is WatchPolicy.OFF:
        raise ValueError("nobody watches with off")
    return _Watcher(policy, after_s)


class _ModelWatch(Protocol):
    """A policy that watches the instances of one model."""

    def look(self, group: _Group, now: float) -> Look: ...


class _Watcher:
    """One watch per model, and what they have in common."""

    def __init__(self, policy: WatchPolicy, after_s: float) -> None:
        self._policy = policy
        self._after_s = after_s
        self._watches: dict[str, _ModelWatch] = {}
        self._ordered_s: dict[str, float] = {}

    def look(self, view: ClusterView, now: float) -> Look:
        groups = {model: _Group(view, model) for model in sorted(_models(view))}
        self._watches = {model: self._watches.get(model) or self._new() for model in groups}
        order, explanations = None, []
        for model, group in groups.items():
            look = self._held_back(model, group, self._watches[model].look(group, now), now)
            explanations.append(f"{model}: {look.explanation}")
            if order is None and look.order is not None:
                order = look.order
                self._ordered_s[model] = now
        return Look(order, "; ".join(explanations) or "no instance is there")

    def _new(self) -> _ModelWatch:
        if self._policy is WatchPolicy.BALANCE:
            return _Balance()
        return _Rest(self._after_s, LOW_LOAD if self._policy is WatchPolicy.THRESHOLD else 0.0)

    def _held_back(self, model: str, group: _Group, look: Look, now: float) -> Look:
        """The same, without the order while another flip is under way."""
        if look.order is None:
            return look
        if group.flipping:
            return Look(None, f"{look.explanation}, but {group.flipping[0]} is flipping")
        if now - self._ordered_s.get(model, -inf) < ORDER_SEEN_S:
            return Look(None, f"{look.explanation}, but an order is on its way")
        return look


class _Group:
    """The instances of one model in one view."""

    def __init__(self, view: ClusterView, model: str) -> None:
        self.all = [each for each in view.instances if each.info.models[0] == model]
        ready = [each for each in self.all if each.state is InstanceState.READY]
        self.ready = {role: [each for each in ready if each.info.role is role] for role in _ROLES}
        self.flipping = [each.info.id for each in self.all if _is_flipping(each)]

    @property
    def counts(self) -> dict[Role, int]:
        return {role: len(self.ready[role]) for role in _ROLES}

    def able(self, role: Role) -> list[InstanceView]:
        """Those with a role who may give it up."""
        if len(self.ready[role]) < 2:
            return []
        return [each for each in self.ready[role] if not _has_just_failed(each)]

    def last_flip_s(self) -> float:
        """How long ago any of them got anywhere with a flip."""
        ages = (each.flip.age_s + each.age_s for each in self.all if each.flip is not None)
        return min(ages, default=inf)

    def __str__(self) -> str:
        return f"{self.counts[Role.PREFILL]} prefill, {self.counts[Role.DECODE]} decode"


class _Balance:
    """Flips whatever makes for the fewest requests in the system. Mean completion time
    goes with their number (Little's law)."""

    def __init__(self) -> None:
        self._flow = _Flow()
        self._wanted: Role | None = None
        self._wanted_since_s = 0.0

    def look(self, group: _Group, now: float) -> Look:
        self._flow.saw(group.all, now)
        forecast = _forecast(group, self._flow)
        if forecast is None:
            return self._no(f"{group}; too little is known yet")
        seen = f"{group}, {forecast}"
        stay = forecast.requests(group.counts)
        saved = {
            role: stay - forecast.requests(_one_more(group.counts, role))
            for role in _ROLES
            if group.able(_OTHER[role])
        }
        if not saved:
            return self._no(f"{seen}; nobody may flip")
        role = max(saved, key=lambda each: saved[each])
        needed = max(LEAST_GAIN, GAIN * min(stay, forecast.most_saved(role)))
        says = f"{seen}; one more for {role} leaves {stay - saved[role]:.1f} of {stay:.1f} requests"
        if saved[role] < needed:
            return self._no(f"{says}, which must be {needed:.1f} less")
        if role is not self._wanted:
            self._wanted, self._wanted_since_s = role, now
        if now - self._wanted_since_s < LASTING_S:
            return Look(None, f"{says}, but only since {now - self._wanted_since_s:.1f} s")
        if group.last_flip_s() < COOL_DOWN_S:
            return Look(None, f"{says}, but the last flip was {group.last_flip_s():.1f} s ago")
        # At once: waiting for the last decode keeps an instance from both roles for as
        # long as the longest answer takes, which in simulation costs more than it saves.
        one = min(group.able(_OTHER[role]), key=_work_left)
        return Look(FlipOrder(one.info.id, role, now=True, reason=says), says)

    def _no(self, explanation: str) -> Look:
        self._wanted = None
        return Look(None, explanation)


class _Flow:
    """What comes for the instances of one model, the newest counting most.

    What came for one of them is what it did and what its backlog grew by.
    """

    def __init__(self) -> None:
        self._loads: dict[InstanceId, InstanceLoad] = {}
        self._at_s = -inf
        self._seen_s = 0.0
        self._tokens = 0.0  # prompt tokens that came
        self._answer_tokens = 0.0  # tokens of answers that came
        self._done_tokens = 0.0  # prompt tokens that were computed
        self._done = 0.0  # prompts that were

    def saw(self, instances: Iterable[InstanceView], now: float) -> None:
        passed_s = now - self._at_s
        kept = exp(-passed_s / RATE_S)
        self._seen_s = kept * self._seen_s + (passed_s if self._loads else 0.0)
        self._tokens *= kept
        self._answer_tokens *= kept
        self._done_tokens *= kept
        self._done *= kept
        loads = {each.info.id: each.load for each in instances if each.info.role in _OTHER}
        for id_, load in loads.items():
            before = self._loads.get(id_)
            if before is not None and not _has_restarted(before, load):
                self._add(before, load)
        self._loads, self._at_s = loads, now

    def _add(self, before: InstanceLoad, load: InstanceLoad) -> None:
        tokens = load.prompt_tokens_done - before.prompt_tokens_done
        answer_tokens = load.answer_tokens_done - before.answer_tokens_done
        self._done += load.prefills_done - before.prefills_done
        self._done_tokens += tokens
        self._tokens += tokens + load.queued_prefill_tokens - before.queued_prefill_tokens
        self._answer_tokens += answer_tokens + load.remaining_tokens - before.remaining_tokens

    @property
    def is_known(self) -> bool:
        return self._seen_s >= LEAST_KNOWN * RATE_S and self._done >= LEAST_KNOWN

    @property
    def prompt_tokens(self) -> float:
        """Of a prompt."""
        return max(1.0, self._done_tokens / self._done)

    @property
    def answer_tokens(self) -> float:
        """Of an answer."""
        return max(1.0, self._answer_tokens / self._done)

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that come."""
        return max(0.0, self._tokens) / self._seen_s


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What comes and what there is to do for one model, counted in average requests.

    Attributes:
        per_s: Requests that come.
        queued: Prompts to be computed.
        decoding: Answers to be written.
        prefills_per_s: Prompts that one busy instance computes.
        decodes_per_s: Answers that one instance writes with endlessly many at a time.
        half: With how many at a time it writes half as many.
        most: For how many it has KV blocks.
    """

    per_s: float
    queued: float
    decoding: float
    prefills_per_s: float
    decodes_per_s: float
    half: float
    most: float

    def requests(self, counts: Mapping[Role, int]) -> float:
        """How many there are in the system until the horizon, on average.

        Both roles are fluid queues, one behind the other. A prefill instance is busy for
        x/(1+x) of the time with x requests on average (M/M/1), and a decode instance
        writes in proportion to n/(half+n), as a step takes base + n · each.
        """
        step_s = HORIZON_S / _STEPS
        prefills, decodes = counts[Role.PREFILL], counts[Role.DECODE]
        queued, decoding, total = self.queued, self.decoding, 0.0
        for _ in range(_STEPS):
            prompts = queued + self.per_s * step_s
            queued = _left(prompts, prefills * self.prefills_per_s * step_s, prefills)
            answers = decoding + prompts - queued
            decoding = max(
                _left(answers, decodes * self.decodes_per_s * step_s, decodes * self.half),
                answers - decodes * self._full_per_s * step_s,
            )
            total += queued + decoding
        return total / _STEPS

    def most_saved(self, role: Role) -> float:
        """How many fewer there are on average if one more with a role is never without
        work."""
        per_s = self.prefills_per_s if role is Role.PREFILL else self._full_per_s
        return per_s * HORIZON_S / 2

    @property
    def _full_per_s(self) -> float:
        """Answers that a decode instance writes with its KV blocks full."""
        return self.decodes_per_s * self.most / (self.half + self.most)

    def __str__(self) -> str:
        return (
            f"{self.per_s:.1f} requests/s, {self.queued:.1f} queued, {self.decoding:.1f} decoding"
        )


def _left(there: float, most: float, half: float) -> float:
    """What is left of some requests after a step that ends most · x / (half + x) of them
    if x are left."""
    excess = there - most - half
    return (excess + sqrt(excess * excess + 4 * there * half)) / 2


def _forecast(group: _Group, flow: _Flow) -> _Forecast | None:
    """None while too little is known of what comes, or nobody knows how fast it is."""
    ready = [*group.ready[Role.PREFILL], *group.ready[Role.DECODE]]
    loads = [each.load for each in ready]
    tokens_per_s = _mean([load.prefill_tokens_per_s for load in loads])
    known = [load for load in loads if load.decode_base_s > 0 or load.decode_request_s > 0]
    if not (flow.is_known and tokens_per_s > 0 and known):
        return None
    prompt, answer = flow.prompt_tokens, flow.answer_tokens
    base_s = sum(load.decode_base_s for load in known) / len(known)
    request_s = max(1e-6, sum(load.decode_request_s for load in known) / len(known))
    kv_tokens = _mean([each.load.blocks_total * each.info.block_size for each in ready])
    return _Forecast(
        per_s=flow.tokens_per_s / prompt,
        queued=sum(load.queued_prefill_tokens for load in loads) / prompt,
        decoding=sum(load.remaining_tokens for load in loads) / answer,
        prefills_per_s=tokens_per_s / prompt,
        decodes_per_s=1 / (request_s * answer),
        half=base_s / request_s,
        most=max(1.0, kv_tokens / (prompt + answer)),
    )


class _Rest:
    """Flips what had work for less than `limit` of the last `after_s` seconds, or none at
    all, if nobody of the other role had as little.

    The paper leaves open what a load of 10 % is. Here it is the part of its time that an
    instance had any work, queued or running, since that means the same for both roles.
    Time between two looks counts if there was work at its end or was done in it.
    """

    def __init__(self, after_s: float, limit: float) -> None:
        self._after_s = after_s
        self._limit = limit
        self._times: dict[tuple[InstanceId, Role], _BusyTime] = {}

    def look(self, group: _Group, now: float) -> Look:
        self._saw(group, now)
        rested = [
            (self._part(each), each.info.id, role)
            for role in _ROLES
            for each in group.able(role)
            if self._is_low(each) and self._times[each.info.id, role].is_full
        ]
        least = ", ".join(self._least(group, role) for role in _ROLES if group.ready[role])
        seen = f"{group}; least busy in the last {self._after_s:g} s: {least or 'nobody'}"
        if not rested:
            return Look(None, f"{seen}; nobody may flip who had little to do for so long")
        part, id_, role = min(rested)
        other = _OTHER[role]
        if not self._is_short(group, other):
            return Look(None, f"{seen}; {other} has little to do too")
        reason = f"{id_} was busy {part:.0%} of the last {self._after_s:g} s"
        return Look(FlipOrder(id_, other, now=False, reason=reason), f"{seen}; {id_} flips")

    def _saw(self, group: _Group, now: float) -> None:
        times = self._times
        self._times = {}
        for role in _ROLES:
            for each in group.ready[role]:
                key = each.info.id, role
                self._times[key] = times.get(key) or _BusyTime(self._after_s)
                self._times[key].saw(each.load, now)

    def _least(self, group: _Group, role: Role) -> str:
        part, id_ = min((self._part(each), each.info.id) for each in group.ready[role])
        return f"{id_} {part:.0%}"

    def _is_short(self, group: _Group, role: Role) -> bool:
        """Whether all with a role have had work, and some have it right now. Otherwise two
        roles with one at rest each would swap them for ever."""
        others = group.ready[role]
        has_work = any(_has_work(each.load) for each in others)
        return has_work and not any(self._is_low(each) for each in others)

    def _part(self, one: InstanceView) -> float:
        return self._times[one.info.id, one.info.role].part

    def _is_low(self, one: InstanceView) -> bool:
        part = self._part(one)
        return part < self._limit or part == 0


class _BusyTime:
    """Which part of the last `window_s` an instance had work."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._parts: deque[tuple[float, float]] = deque()  # seconds, and busy ones of them
        self._newest_s = self._newest_busy_s = 0.0
        self._load: InstanceLoad | None = None
        self._at_s = 0.0
        self.part = 0.0
        self.is_full = False  # whether it was watched for so long

    def saw(self, load: InstanceLoad, now: float) -> None:
        if self._load is not None:
            is_busy = _has_work(load) or _tokens_done(load) != _tokens_done(self._load)
            self._newest_s += now - self._at_s
            self._newest_busy_s += (now - self._at_s) * is_busy
            self._sum_up()
        self._load, self._at_s = load, now

    def _sum_up(self) -> None:
        passed_s = self._newest_s + sum(each_s for each_s, _ in self._parts)
        while self._parts and passed_s - self._parts[0][0] >= self._window_s:
            passed_s -= self._parts.popleft()[0]
        busy_s = self._newest_busy_s + sum(each_s for _, each_s in self._parts)
        self.part = busy_s / passed_s if passed_s > 0 else 0.0
        self.is_full = passed_s >= self._window_s
        if self._newest_s >= self._window_s / _PARTS:
            self._parts.append((self._newest_s, self._newest_busy_s))
            self._newest_s = self._newest_busy_s = 0.0


def _models(view: ClusterView) -> set[str]:
    return {each.info.models[0] for each in view.instances}


def _one_more(counts: Mapping[Role, int], role: Role) -> dict[Role, int]:
    return {role: counts[role] + 1, _OTHER[role]: counts[_OTHER[role]] - 1}


def _is_flipping(one: InstanceView) -> bool:
    """With `now` it is ready all the while."""
    if one.state is InstanceState.READY:
        return one.flip is not None and one.flip.stage not in _ENDS
    return one.state is InstanceState.FLIPPING


def _has_just_failed(one: InstanceView) -> bool:
    flip = one.flip
    if flip is None or flip.stage is not FlipStage.ROLLED_BACK:
        return False
    return flip.age_s + one.age_s < ROLLED_BACK_S


def _has_work(load: InstanceLoad) -> bool:
    return any((load.running, load.waiting, load.held, load.queued_prefill_tokens))


def _has_restarted(before: InstanceLoad, after: InstanceLoad) -> bool:
    return (
        after.prompt_tokens_done < before.prompt_tokens_done
        or after.answer_tokens_done < before.answer_tokens_done
    )


def _tokens_done(load: InstanceLoad) -> tuple[int, int]:
    return load.prompt_tokens_done, load.answer_tokens_done


def _work_left(one: InstanceView) -> tuple[int, InstanceId]:
    is_prefill = one.info.role is Role.PREFILL
    load = one.load
    return (load.queued_prefill_tokens if is_prefill else load.remaining_tokens), one.info.id


def _mean(values: Sequence[float]) -> float:
    """Of those that are known, which is more than 0."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0
