"""What one instance can do: prompts alone, answers alone, and both.

DistServe's first step (its algorithm 1): how many instances of which role follows from what
one of each can take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from vllm_tetri.sim.cost.profiles import Profile
from vllm_tetri.sim.figures import Slo
from vllm_tetri.sim.plan.goodput import Demand, Goal, Goodput, highest_rate, prompts_only, score
from vllm_tetri.sim.plan.layout import Layout, Site, System, kv_tokens

_NEVER_S = 1e9
_MOST_DECODES = 256  # vLLM's default of requests in a step
_ANSWER_TIMES = 5  # of a mean answer, that a simulation lasts at least
_TTFT_TIMES = 30  # of the SLO: 3 % too much work lets a queue grow that far in it
_PLENTY = 8  # times as many prompts as one instance can answer
_QUEUE_REQUESTS = 6000  # more are not simulated for that
_MIDDLE_TOKENS = 1024
_LARGER, _SMALLER = (2048, 4096, 8192), (512, 256, 128)
_WORTH = 1.03  # that more tokens in a step must bring


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best goodput, and the chunk or budget that it takes."""

    tokens: int
    goodput: Goodput

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.goodput.rate


@dataclass(frozen=True, slots=True)
class Single:
    """One instance of a profile.

    Attributes:
        prefill: Prompts alone, as TTFT allows.
        decode: Answers alone, as TPOT allows.
        stock, whole: Both.
    """

    profile: Profile
    prefill: Tuned
    decode: Goodput
    stock: Tuned
    whole: Tuned

    @property
    def split_rate(self) -> float:
        """Per GPU of prefill and decode instances in the best ratio."""
        if not self.prefill.rate or not self.decode.rate:
            return 0.0
        return 1 / (1 / self.prefill.rate + 1 / self.decode.rate) / self.profile.num_devices

    @property
    def whole_rate(self) -> float:
        """Per GPU of instances that do both."""
        return max(self.stock.rate, self.whole.rate) / self.profile.num_devices


class Trials:
    """Simulations of one profile.

    Args:
        tell: Called before every search, with what it is about.
    """

    def __init__(
        self, profile: Profile, demand: Demand, goal: Goal, site: Site, tell: Callable[[str], None]
    ) -> None:
        self.profile = profile
        self._demand = demand
        self._goal = goal
        self._site = site
        self._tell = tell
        self._asks = asks = demand.sample()
        self._prompt_tokens = fmean(ask.prompt_tokens for ask in asks)
        self._answer_tokens = fmean(ask.output_tokens for ask in asks)

    @cached_property
    def hopeless(self) -> str:
        """Why no load is small enough; nothing if one may be."""
        cost, goal = self.profile.cost, self._goal
        step_s = cost.step_s(1, self._prompt_tokens, 0, 0)
        if step_s > goal.slo.tpot_s:
            return f"a request alone takes {step_s * 1e3:.3g} ms per token"
        prompts = [ask.prompt_tokens for ask in self._asks]
        in_time = fmean(cost.step_s(0, 0, each, each / 2) <= goal.slo.ttft_s for each in prompts)
        if in_time < goal.attainment:
            return f"alone, {in_time:.0%} of the prompts are computed within {goal.slo.ttft_s:g} s"
        return ""

    # -- one instance ----------------------------------------------------------------

    def single(self) -> Single:
        """All that one instance can do."""
        decode = self._decode()
        return Single(
            self.profile,
            self._tuned(System.SPLIT, self._prefill, _PLENTY * decode.rate),
            decode,
            self._tuned(System.STOCK, self._both),
            self._tuned(System.WHOLE, self._both),
        )

    def _tuned(
        self, system: System, search: Callable[[Layout], Goodput], plenty: float = math.inf
    ) -> Tuned:
        """With more tokens in a step as long as that is worth it, or with fewer.

        Args:
            plenty: A rate that is more than enough.
        """
        best = self._with(system, _MIDDLE_TOKENS, search)
        if best.rate >= plenty:
            return best
        larger = self._climb(system, best, _LARGER, search, _WORTH)
        if larger is not best:
            return larger
        return self._climb(system, best, _SMALLER, search, 1 / _WORTH)

    def _climb(
        self,
        system: System,
        best: Tuned,
        sizes: Iterable[int],
        search: Callable[[Layout], Goodput],
        worth: float,
    ) -> Tuned:
        for tokens in sizes:
            found = self._with(system, tokens, search)
            if found.rate <= best.rate * worth or not found.rate:
                return best
            best = found
        return best

    def _with(self, system: System, tokens: int, search: Callable[[Layout], Goodput]) -> Tuned:
        layout = Layout(system, self.profile, 0, 0, 1, tokens)
        self._tell(f"{self.profile.name}: one instance, {system}, {tokens} tokens a step")
        return Tuned(tokens, search(layout))

    def _prefill(self, layout: Layout) -> Goodput:
        setting = self._site.setting(layout)
        slo = Slo(self._goal.slo.ttft_s, _NEVER_S)
        return highest_rate(
            lambda rate: score(
                setting, prompts_only(self._demand.asks(rate, self._queue_span_s(rate))), slo
            ),
            self._prefill_guess(layout.tokens),
            self._goal.attainment,
        )

    def _decode(self) -> Goodput:
        self._tell(f"{self.profile.name}: one instance, answers only")
        setting = self._site.decode_only(self.profile, _MIDDLE_TOKENS)
        slo = Slo(_NEVER_S, self._goal.slo.tpot_s)
        return highest_rate(
            lambda rate: score(setting, self._demand.asks(rate, self._answers_span_s), slo),
            self._decode_guess,
            self._goal.attainment,
        )

    def _both(self, layout: Layout) -> Goodput:
        guess = 1 / (1 / self._prefill_guess(layout.tokens) + 1 / self._decode_guess)
        return self.search(layout, guess)

    # -- any layout --------------------------------------------------------------------

    def search(
        self, layout: Layout, guess: float, *, seed: int = 0, stride: float = 1.3
    ) -> Goodput:
        """Its goodput; another seed for other requests."""
        demand, setting = self._demand.other(seed), self._site.setting(layout)
        return highest_rate(
            lambda rate: score(setting, demand.asks(rate, self._span_s(rate)), self._goal.slo),
            guess,
            self._goal.attainment,
            stride,
        )

    def keeps(self, layout: Layout, rate: float) -> bool:
        """Whether it serves so many requests."""
        asks = self._demand.asks(rate, self._span_s(rate))
        found = score(self._site.setting(layout), asks, self._goal.slo)
        return found.kept >= self._goal.attainment

    def _span_s(self, rate: float) -> float:
        """Virtual time of a simulation: some generations of requests, and long enough for a
        queue to become too long."""
        return max(self._answers_span_s, self._queue_span_s(rate))

    @cached_property
    def _answers_span_s(self) -> float:
        return _ANSWER_TIMES * self._answer_tokens * self._step_s(self._batch)

    def _queue_span_s(self, rate: float) -> float:
        return min(_TTFT_TIMES * self._goal.slo.ttft_s, _QUEUE_REQUESTS / rate)

    # -- guesses -----------------------------------------------------------------------

    def _prefill_guess(self, tokens: int) -> float:
        """Full chunks one after the other."""
        step_s = self.profile.cost.step_s(0, 0, tokens, self._prompt_tokens / 2)
        return tokens / self._prompt_tokens / step_s

    @cached_property
    def _decode_guess(self) -> float:
        return self._batch / (self._answer_tokens * self._step_s(self._batch))

    @cached_property
    def _batch(self) -> int:
        """The largest that keeps the pace and fits."""
        fits = int(kv_tokens(self.profile) / (self._prompt_tokens + self._answer_tokens))
        low, high = 1, max(1, min(_MOST_DECODES, fits))
        while low < high:
            middle = (low + high + 1) // 2
            if self._step_s(middle) <= self._goal.slo.tpot_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _step_s(self, num_decodes: int) -> float:
        context = num_decodes * (self._prompt_tokens + self._answer_tokens / 2)
        return self.profile.cost.step_s(num_decodes, context, 0, 0)
