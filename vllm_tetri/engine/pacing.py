"""How long an engine's steps take, and how many tokens the next one may have.

Owner: the engine thread, unless a method says otherwise. `StepClock` times every step and teaches
`policy.step_cost`; `StepBudget` asks `policy.step_tokens` how many tokens the next one has, by that
fit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from vllm_tetri.engine.compat import Request, SchedulerOutput, is_cpu
from vllm_tetri.policy.step_cost import GUESS, StepFit
from vllm_tetri.policy.step_tokens import StepSizes
from vllm_tetri.types import StepCoefficients

logger = logging.getLogger(__name__)

_REFRESH_S = 0.25
# GPU kernels compute tiles of this many rows; AMX and the like on CPUs 16.
TILE_TOKENS, CPU_TILE_TOKENS = 128, 16
# Below this confidence the fit is too young for a warning about the objective.
_WARNING_CONFIDENCE = 0.5
# Of measured / predicted step times: smoothing, and bounds of an outlier. Of a normal
# distribution, 99 % lie within 2.9 mean deviations above the mean.
_GAIN = 1 / 16
_DEVIATIONS = 2.9
_LEAST_RATIO, _MOST_RATIO = 0.25, 4.0
VARIED_EVERY = 8  # one of so many steps without decodes has a chunk of twice the size
_computed_tokens = attrgetter("num_computed_tokens")


class StepWork(NamedTuple):
    """What a step computes, after how much context."""

    begun_s: float
    num_decodes: int
    decode_context: int
    prompt_tokens: int
    prompt_context: float


class StepClock:
    """Times steps and teaches a `StepFit` by them.

    A step begins when it is scheduled. While requests run, it begins when the previous one
    ended: what the engine does between two steps is part of every gap that clients see,
    and with asynchronous scheduling a step is scheduled while the previous one runs.
    `step_s` is the duration of the last step; `budget` learns from every step, too.
    """

    def __init__(self, fit: StepFit, budget: StepBudget | None = None) -> None:
        self.fit = fit
        self.step_s = 0.0
        self.budget = budget
        self._begun: deque[StepWork] = deque()
        self._ended_s = float("-inf")
        self._is_interrupted = False
        self._refreshed_s = float("-inf")

    def begin(self, output: SchedulerOutput, now: float, *, was_running: bool) -> None:
        """Record that a step with at least one token was scheduled; `was_running` tells whether
        requests ran when its scheduling began."""
        is_next = was_running and not self._is_interrupted
        self._is_interrupted = False
        self._begun.append(work_of(output, self._ended_s if is_next else now))

    def interrupt(self) -> None:
        """Record a pause: the next step begins when it is scheduled."""
        self._is_interrupted = True

    def end(self, now: float) -> float:
        """Record the end of the oldest step under way; return its seconds."""
        step = self._begun.popleft()
        seconds = now - max(step.begun_s, self._ended_s)
        self._ended_s, self.step_s = now, seconds
        if self.budget is not None:
            self.budget.learn(step, seconds)
        self.fit.learn(*step[1:], seconds)
        if now - self._refreshed_s >= _REFRESH_S:
            self._refreshed_s = now
            self.fit.refresh()
        return seconds


def work_of(output: SchedulerOutput, now: float) -> StepWork:
    """Read from a scheduled step what it computes and after which context."""
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    if output.total_num_scheduled_tokens == len(scheduled) == len(cached.req_ids):  # decodes only
        return StepWork(now, len(scheduled), sum(cached.num_computed_tokens), 0, 0.0)
    new = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
    drafts, names = output.scheduled_spec_decode_tokens, cached.req_ids
    decode_context = sum(cached.num_computed_tokens) + sum(new.values())
    num_prompts, prompt_tokens, squares = 0, 0, 0.0
    for name in [name for name, tokens in scheduled.items() if tokens > 1]:
        if (tokens := scheduled[name]) > 1 + len(drafts.get(name, ())):
            if (context := new.get(name)) is None:
                context = cached.num_computed_tokens[names.index(name)]
            num_prompts += 1
            prompt_tokens += tokens
            decode_context -= context
            squares += tokens * (context + (tokens - 1) / 2)
    return StepWork(
        now,
        len(scheduled) - num_prompts,
        decode_context,
        prompt_tokens,
        squares / prompt_tokens if prompt_tokens else 0.0,
    )


class StepBudget:
    """The tokens of steps, for one engine. Smoothed mean and mean deviation of measured / predicted
    step times, as in Jacobson's estimate of round-trip times, tell how far predictions may be
    trusted; a single outlier is bounded."""

    def __init__(
        self, fit: StepFit, chunk_tokens: int | None, slo_s: float | None, most_tokens: int
    ) -> None:
        self._fit = fit
        self._sizes = StepSizes(chunk_tokens, slo_s, most_tokens, tile_tokens())
        self._mean, self._deviation = 1.0, 0.0
        self._num_alone, self._has_warned = 0, False

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens of a step without decodes."""
        return self._sizes.alone(self._cost())

    def next_chunk_tokens(self, running: Sequence[Request], num_waiting: int) -> int:
        """Return the prompt tokens of a step after one more prompt has come (any thread). Requests
        whose only token is sampled by the step under way are neither prompts nor decodes."""
        num_prompts = sum(request.is_prefill_chunk for request in running)
        decodes = [
            request
            for request in running
            if not request.is_prefill_chunk and request.num_output_tokens + 1 < request.max_tokens
        ]
        return self._sizes.next_chunk(
            self._cost(),
            num_decodes=len(decodes),
            decode_context=sum(map(_computed_tokens, decodes)),
            num_prompts=num_prompts + num_waiting,
            slower=self._slower,
        )

    def tokens(
        self,
        running: Sequence[Request],
        decode_tokens: int,
        num_waiting: int,
        first_tokens: int = 0,
    ) -> int:
        """Return the most tokens of the next step, with `decode_tokens` for the running decodes,
        `num_waiting` prompts that are not started, and `first_tokens` left of the one that goes
        first."""
        has_prompts = num_waiting or (running and running[-1].is_prefill_chunk)  # decodes first
        if self._sizes.is_fixed or not has_prompts:
            return decode_tokens + self.chunk_tokens
        if not decode_tokens:
            return self._varied()
        prompts = [request for request in running if request.is_prefill_chunk]
        cost = self._cost()
        self._warn_once(cost)
        return self._sizes.beside(
            cost,
            num_decodes=len(running) - len(prompts),
            decode_tokens=decode_tokens,
            decode_context=sum(map(_computed_tokens, running))
            - sum(map(_computed_tokens, prompts)),
            num_prompts=len(prompts) + num_waiting,
            prompt_context=prompts[0].num_computed_tokens if prompts else 0,
            first_tokens=first_tokens,
            slower=self._slower,
        )

    @property
    def _slower(self) -> float:
        """By what factor a step may exceed its cost: 99 of 100 steps stay within the objective."""
        return self._mean + _DEVIATIONS * self._deviation

    def _varied(self) -> int:
        """Return `chunk_tokens`, twice as many now and then if they are sized: from equal steps one
        cannot learn what a token costs. Before the first step, all that vLLM allows."""
        self._num_alone += 1
        chunk_tokens, most_tokens = self.chunk_tokens, self._sizes.most_tokens
        if self._sizes.chunk_tokens is not None:
            return chunk_tokens
        if not self._fit.cost.is_known:
            return most_tokens
        is_varied = self._num_alone % VARIED_EVERY == 0
        return min(2 * chunk_tokens, most_tokens) if is_varied else chunk_tokens

    def learn(self, step: StepWork, seconds: float) -> None:
        """Record how long a step took."""
        if (predicted_s := self._cost().step_s(*step[1:])) > 0:
            ratio = min(max(seconds / predicted_s, _LEAST_RATIO), _MOST_RATIO)
            self._deviation += (abs(ratio - self._mean) - self._deviation) * _GAIN
            self._mean += (ratio - self._mean) * _GAIN

    def _cost(self) -> StepCoefficients:
        return self._fit.cost if self._fit.cost.is_known else GUESS

    def _warn_once(self, cost: StepCoefficients) -> None:
        lone_s, slo_s = cost.step_s(1, 0, 0, 0), self._sizes.slo_s
        if self._has_warned or slo_s is None or lone_s <= slo_s:
            return
        if cost.confidence < _WARNING_CONFIDENCE:
            return
        self._has_warned = True
        logger.warning(
            "--tetri-tbt-slo %g s cannot be met: a step that decodes a single request takes "
            "%.4f s on this device. Prompts now get %d tokens per step. Raise the objective, or "
            "use a faster device.",
            slo_s, lone_s, self._sizes.tile_tokens,
        )  # fmt: skip


def tile_tokens() -> int:
    """Return of how many tokens kernels here compute whole tiles."""
    return CPU_TILE_TOKENS if is_cpu() else TILE_TOKENS


def decodes_first(running: list[Request]) -> tuple[list[Request], int]:
    """Return decodes before started prompts, and how many these are; new ones follow
    (Sarathi-Serve, algorithm 3)."""
    prompts = [request for request in running if request.is_prefill_chunk]
    if not prompts or running[-len(prompts) :] == prompts:
        return running, len(prompts)
    decodes = [request for request in running if not request.is_prefill_chunk]
    return decodes + prompts, len(prompts)


def due_tokens(decodes: Sequence[Request], most_drafts: int) -> int:
    """Return how many tokens of running decodes the next step computes."""
    if most_drafts:
        return sum([_due_tokens(each, most_drafts) for each in decodes])
    under_way = [each for each in decodes if each.num_output_placeholders]
    return len(decodes) - sum([not _due_tokens(each, 0) for each in under_way])


def _due_tokens(decode: Request, most_drafts: int) -> int:
    """Return those of one: a token and its drafts, none where the outputs under way are sure to be
    its last (`Scheduler.schedule` leaves it out)."""
    under_way, computed = decode.num_output_placeholders, decode.num_computed_tokens
    if under_way and computed + 2 - under_way >= decode.num_prompt_tokens + decode.max_tokens:
        return 0
    if not most_drafts:
        return 1
    return min(max(1, decode.num_tokens_with_spec + under_way - computed), 1 + most_drafts)


def share_in_order(running: Sequence[Request], left_tokens: int) -> dict[str, int]:
    """Return the tokens of a step for each started prompt, by request id."""
    shares = {}
    for request in running:
        if request.is_prefill_chunk:
            missing_tokens = request.num_tokens - request.num_computed_tokens
            shares[request.request_id] = tokens = min(missing_tokens, left_tokens)
            left_tokens -= tokens
    return shares
