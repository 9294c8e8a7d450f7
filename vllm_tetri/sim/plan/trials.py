"""Simulations of one profile: one instance with prompts alone, decodes alone or both (DistServe's
algorithm 1), and any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean

from vllm_tetri.sim.config import ClusterConfig, EngineConfig, of_profile
from vllm_tetri.sim.cost.profiles import Profile
from vllm_tetri.sim.figures import Slo
from vllm_tetri.sim.plan.goodput import Goodput, highest_rate, score
from vllm_tetri.sim.plan.values import Found, Layout, Question, Single, System
from vllm_tetri.sim.workload import RequestSpec

_NEVER_S = 1e9
_MOST_DECODES = 256  # vLLM's default of requests in a step
_OUTPUT_TIMES = 5  # of a mean output, that a simulation lasts at least
_TTFT_TIMES = 30  # of the SLO: 3 % too much work lets a queue grow that far in it
_PLENTY = 8  # times as many prompts as one instance can decode
_QUEUE_REQUESTS = 6000  # the most that are simulated to let a queue grow
_MIDDLE_TOKENS = 1024
_LARGER, _SMALLER = (2048, 4096, 8192), (512, 256, 128)
_WORTH = 1.03  # what more tokens in a step must bring
_STRIDE = 1.3  # first factor between rates

Tell = Callable[[str], None]


class Trials:
    """Simulations of one profile; `tell` is called before every search with its subject."""

    def __init__(self, profile: Profile, question: Question, tell: Tell) -> None:
        self.profile = profile
        self._question, self._demand, self._tell = question, question.demand, tell
        self._slo, self._attainment = question.goal.slo, question.goal.attainment
        self._pool_tokens = of_profile(EngineConfig(), profile).pool_tokens

    @cached_property
    def misfit(self) -> str:
        """Why no instance of this profile serves, at whatever load; empty if one may."""
        cost, slo, devices = self.profile.cost, self._slo, self._question.devices
        need = sum(self._demand.longest)
        if need > self._pool_tokens:
            return f"its KV pool holds {self._pool_tokens} tokens, a request may have {need}"
        if devices is not None and self.profile.num_devices > devices:
            return f"an instance takes {self.profile.num_devices} GPUs"
        step_s = cost.step_s(1, self._demand.prompt_tokens, 0, 0)
        if step_s > slo.tpot_s:
            return f"a request alone takes {step_s * 1e3:.3g} ms per token"
        prompts = [spec.prompt_tokens for spec in self._demand.sample]
        in_time = fmean(cost.step_s(0, 0, each, each / 2) <= slo.ttft_s for each in prompts)
        if in_time < self._attainment:
            return f"alone, {in_time:.0%} of the prompts are computed within {slo.ttft_s:g} s"
        return ""

    def single(self) -> Single:
        """Search all that one instance can serve."""
        decode = self._decode()
        return Single(
            self.profile,
            self._tuned(System.SPLIT, self._prefill, _PLENTY * decode.rate),
            decode,
            self._tuned(System.STOCK, self._both),
            self._tuned(System.WHOLE, self._both),
        )

    def search(
        self, layout: Layout, guess: float, *, seed: int = 0, stride: float = _STRIDE
    ) -> Found:
        """Search the goodput of a layout; another seed draws other requests."""
        demand = self._demand.other(seed)
        found = self._highest(
            self._question.config(layout),
            lambda rate: demand.specs(rate, self._span_s(rate)),
            self._slo,
            guess,
            stride,
        )
        return self._found(layout, found)

    def keeps(self, layout: Layout, rate: float) -> bool:
        """Whether a layout serves this rate."""
        specs = self._demand.specs(rate, self._span_s(rate))
        return score(self._question.config(layout), specs, self._slo).kept >= self._attainment

    def _tuned(
        self, system: System, search: Callable[[Layout], Found], plenty: float = math.inf
    ) -> Found:
        """Take more tokens in a step as long as that is worth it, or fewer. A rate of `plenty`
        needs no tuning."""

        def tried(tokens: int) -> Found:
            self._tell(f"{self.profile.name}: one instance, {system}, {tokens} tokens a step")
            return search(Layout(system, self.profile, 0, 0, 1, tokens))

        middle = best = tried(_MIDDLE_TOKENS)
        if best.rate >= plenty:
            return best
        for sizes, worth in ((_LARGER, _WORTH), (_SMALLER, 1 / _WORTH)):
            for tokens in sizes:
                found = tried(tokens)
                if found.rate <= best.rate * worth or not found.rate:
                    break
                best = found
            if best is not middle:
                break
        return best

    def _prefill(self, layout: Layout) -> Found:
        def specs(rate: float) -> list[RequestSpec]:
            drawn = self._demand.specs(rate, self._queue_span_s(rate))
            return [replace(spec, output_tokens=1) for spec in drawn]

        slo, guess = Slo(self._slo.ttft_s, _NEVER_S), self._prefill_guess(layout.tokens)
        return self._found(layout, self._highest(self._question.config(layout), specs, slo, guess))

    def _decode(self) -> Goodput:
        self._tell(f"{self.profile.name}: one instance, decodes only")
        return self._highest(
            self._question.decode_only(self.profile, _MIDDLE_TOKENS),
            lambda rate: self._demand.specs(rate, self._outputs_span_s),
            Slo(_NEVER_S, self._slo.tpot_s),
            self._decode_guess,
        )

    def _both(self, layout: Layout) -> Found:
        guess = 1 / (1 / self._prefill_guess(layout.tokens) + 1 / self._decode_guess)
        return self.search(layout, guess)

    def _highest(
        self,
        config: ClusterConfig,
        specs: Callable[[float], Sequence[RequestSpec]],
        slo: Slo,
        guess: float,
        stride: float = _STRIDE,
    ) -> Goodput:
        return highest_rate(
            lambda rate: score(config, specs(rate), slo), guess, self._attainment, stride
        )

    def _found(self, layout: Layout, found: Goodput) -> Found:
        return Found(layout, found, (found.rate,), self._question.devices or layout.num_devices)

    # -- virtual time of a simulation, and guesses ---------------------------------------------

    def _span_s(self, rate: float) -> float:
        """Some generations of requests, and long enough for a queue to become too long."""
        return max(self._outputs_span_s, self._queue_span_s(rate))

    @cached_property
    def _outputs_span_s(self) -> float:
        return _OUTPUT_TIMES * self._demand.output_tokens * self._step_s(self._batch)

    def _queue_span_s(self, rate: float) -> float:
        return min(_TTFT_TIMES * self._slo.ttft_s, _QUEUE_REQUESTS / rate)

    def _prefill_guess(self, tokens: int) -> float:
        """Rate of full chunks, one after the other."""
        prompt_tokens = self._demand.prompt_tokens
        return tokens / prompt_tokens / self.profile.cost.step_s(0, 0, tokens, prompt_tokens / 2)

    @cached_property
    def _decode_guess(self) -> float:
        return self._batch / (self._demand.output_tokens * self._step_s(self._batch))

    @cached_property
    def _batch(self) -> int:
        """The largest batch that keeps the TPOT SLO and fits into the pool, at least 1."""
        demand = self._demand
        fits = int(self._pool_tokens / (demand.prompt_tokens + demand.output_tokens))
        sizes = range(max(1, min(_MOST_DECODES, fits)), 1, -1)
        return next((each for each in sizes if self._step_s(each) <= self._slo.tpot_s), 1)

    def _step_s(self, num_decodes: int) -> float:
        context = num_decodes * (self._demand.prompt_tokens + self._demand.output_tokens / 2)
        return self.profile.cost.step_s(num_decodes, context, 0, 0)
