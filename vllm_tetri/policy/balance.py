"""Flips for balance: what both roles have to do over the next seconds, foretold.

It counts how many requests will be in the system: as things are, with one more prefill
instance, and with one more decode instance. It goes by what comes, what is left to do and
how fast instances are, and flips when that saves a good part of them, and has for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt

from vllm_tetri.policy.watch_group import OTHER, ROLES, FlipOrder, Group, Look
from vllm_tetri.types import InstanceId, InstanceLoad, InstanceView, Role

# Found by simulating swings between Azure's code and conversation traces.
HORIZON_S = 40.0  # about as long as a phase lasts; 10 s undervalues what a flip pays later
RATE_S = 6.0  # memory of what comes: a shorter one follows chance, a longer one is late
LEAST_KNOWN = 0.5  # part of that memory to be filled, and prompts in it
GAIN = 0.2  # part of the requests to be saved: less is within the error of the forecast
LEAST_GAIN = 0.5  # requests to be saved: what goes on below is not worth a flip
LASTING_S = 1.0  # the time of a long prompt: what is over by then needs no flip
COOL_DOWN_S = 5.0  # until the loads show what the last flip did
_STEPS = 10  # of a forecast; twice as many foretell the same


class Balance:
    """Flips whatever makes for the fewest requests in the system. Mean completion time
    goes with their number (Little's law)."""

    def __init__(self) -> None:
        self._flow = _Flow()
        self._wanted: Role | None = None
        self._wanted_since_s = 0.0

    def look(self, group: Group, now: float) -> Look:
        self._flow.saw(group.all, now)
        forecast = _forecast(group, self._flow)
        if forecast is None:
            return self._no(f"{group}; too little is known yet")
        seen = f"{group}, {forecast}"
        stay = forecast.requests(group.counts)
        saved = {
            role: stay - forecast.requests(_one_more(group.counts, role))
            for role in ROLES
            if group.able(OTHER[role])
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
        one = min(group.able(OTHER[role]), key=_work_left)
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
        # One that has not reported yet has counters of 0, which do not grow to what they are.
        loads = {
            each.info.id: each.load for each in instances if each.info.role in OTHER and each.seq
        }
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


def _forecast(group: Group, flow: _Flow) -> _Forecast | None:
    """None while too little is known of what comes, or nobody knows how fast it is."""
    ready = [*group.ready[Role.PREFILL], *group.ready[Role.DECODE]]
    loads = [each.load for each in ready]
    # Who decodes computes ends of prompts at most, which says little of prefill.
    own = [each.load for each in group.ready[Role.PREFILL]]
    tokens_per_s = _mean([load.prefill_tokens_per_s for load in own]) or _mean(
        [load.prefill_tokens_per_s for load in loads]
    )
    known = [load for load in loads if load.decode_base_s > 0 or load.decode_request_s > 0]
    if not (flow.is_known and tokens_per_s > 0 and known):
        return None
    prompt, answer = flow.prompt_tokens, flow.answer_tokens
    base_s = sum(load.decode_base_s for load in known) / len(known)
    request_s = max(1e-6, sum(load.decode_request_s for load in known) / len(known))
    kv_tokens = _mean([each.load.blocks_total * each.info.block_size for each in ready])
    return _Forecast(
        per_s=flow.tokens_per_s / prompt,
        # No more than there are: averages are off while the mix changes.
        queued=min(
            sum(load.queued_prefill_tokens for load in loads) / prompt,
            sum(load.running + load.waiting for load in loads),
        ),
        decoding=min(
            sum(load.remaining_tokens for load in loads) / answer,
            sum(load.heavy + load.light for load in loads),
        ),
        prefills_per_s=tokens_per_s / prompt,
        decodes_per_s=1 / (request_s * answer),
        half=base_s / request_s,
        most=max(1.0, kv_tokens / (prompt + answer)),
    )


def _one_more(counts: Mapping[Role, int], role: Role) -> dict[Role, int]:
    return {role: counts[role] + 1, OTHER[role]: counts[OTHER[role]] - 1}


def _has_restarted(before: InstanceLoad, after: InstanceLoad) -> bool:
    return (
        after.prompt_tokens_done < before.prompt_tokens_done
        or after.answer_tokens_done < before.answer_tokens_done
    )


def _work_left(one: InstanceView) -> tuple[int, InstanceId]:
    is_prefill = one.info.role is Role.PREFILL
    load = one.load
    return (load.queued_prefill_tokens if is_prefill else load.remaining_tokens), one.info.id


def _mean(values: Sequence[float]) -> float:
    """Of those that are known, which is more than 0."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0
