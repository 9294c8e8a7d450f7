"""How many prefill and decode instances, or none: DistServe's search, by simulation.

The aim is goodput per GPU, or per unit of price, power or space. Single instances with prompts
alone, decodes alone or both tell which profile each role should have, which chunk, and in which
ratio; then whole clusters are simulated, with roles and without. KV goes between any two instances
(DistServe's algorithm 1), or stays on a node (algorithm 2): then one node is simulated, and as many
as are needed serve alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import attrgetter

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.config import (
    ClusterConfig,
    EngineConfig,
    InstanceConfig,
    Stock,
    make_instances,
    of_profile,
)
from vllm_tetri.sim.cost.profiles import Profile
from vllm_tetri.sim.plan.goodput import Score, highest_rate, score
from vllm_tetri.sim.plan.values import Found, Layout, Plan, Question, Single, System
from vllm_tetri.types import InstanceId, Role, StepCoefficients

Tell = Callable[[str], object]
Search = Callable[[int, Sequence[int]], list[Found]]
"""Layouts of so many GPUs, with the GPUs of an instance of each role. Where all instances count as
one, layouts of so many instances."""

_SERVES = 0.97  # of a rate that was asked for: goodput is only found to 3 %
_MOST_INSTANCES = 256
_WORTHY = 0.85  # of the best promise: simulated as clusters, but only the first
_MOST_WORTHY = 4
_MIDDLE_TOKENS = 1024  # of a step
_LARGER, _SMALLER = (2048, 4096, 8192), (512, 256, 128)
_WORTH = 1.03  # what other tokens in a step must bring
_OUTPUT_TIMES = 5  # of a mean output, that a simulation lasts at least
_TTFT_TIMES = 30  # of the SLO: 3 % too much work lets a queue grow that far in it
_QUEUE_REQUESTS = 6000  # the most that are simulated to let a queue grow
_ARENA_TOKENS = 16384
_ARENA_REQUESTS = 8  # longest requests that may be on their way to an instance at once
_INSTANT = StepCoefficients(base_s=1e-9, confidence=1.0)
_ENDLESS = 1 << 24


def plan(question: Question, tell: Tell = lambda _: None) -> Plan:
    """Compare layouts, with a call of `tell` before every search with its subject; raises
    ConfigError if no instance can keep the SLOs, or hold the longest request."""
    return _Search(question, tell).plan()


def config_of(question: Question, layout: Layout) -> ClusterConfig:
    """Return a layout as the simulator takes it."""
    longest = max(prompt for prompt, _ in question.demand.lengths)
    arena_tokens = max(_ARENA_TOKENS, _ARENA_REQUESTS * longest)
    usual = EngineConfig(arena_tokens=arena_tokens, chunk_tokens=layout.tokens)
    engine, mode = of_profile(usual, layout.profile), layout.system.value
    if layout.system is System.STOCK:
        engine, mode = replace(engine, kind=Stock(layout.tokens)), "least-in-flight"
    instances = make_instances(layout.prefill, 0, layout.both, engine=engine)
    decode_engine = of_profile(engine, layout.decode_profile or layout.profile)
    instances += make_instances(0, layout.decode, engine=decode_engine)
    if layout.decode and not layout.prefill:
        instant = replace(engine, cost=_INSTANT, chunk_tokens=_ENDLESS, kv_blocks=_ENDLESS)
        instances += (InstanceConfig(InstanceId("instant"), Role.PREFILL, instant),)
    # A link cannot be simulated without the KV bytes of a token.
    is_known = all(each.kv_token_bytes is not None for each in layout.profiles)
    link = question.link if is_known else None
    return ClusterConfig(instances, mode, question.demand.seed, link=link)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Profiles of both roles, or of instances that do both, before clusters of them are simulated.
    The rate that single instances promise is per instance, in the best ratio."""

    name: str
    rate: float
    promise: float  # the same per unit of what is to be least
    sizes: tuple[int, ...]  # GPUs of an instance of each role
    search: Search


class _Search:
    def __init__(self, question: Question, tell: Tell) -> None:
        self._question, self._tell = question, tell
        self._skipped: list[str] = []
        self._known: dict[Layout, Found] = {}

    def plan(self) -> Plan:
        question = self._question
        singles = [self._single(each) for each in question.profiles if self._fits(each)]
        layouts: list[Found] = []
        for system in (System.STOCK, System.WHOLE, System.ADAPTIVE):
            replicas = [self._both(system, each) for each in singles]
            layouts += self._worthy(replicas, question.node if system is System.ADAPTIVE else None)
        pairs = [self._pair(*each) for each in product(singles, singles)]
        layouts += self._worthy(pairs, question.node)
        asked = (question.rate or 0.0) * _SERVES
        found = [each for each in layouts if each.rate and each.rate >= asked]
        if not found:
            slo = question.slo
            missed = [
                f"{each.layout.profile.name}: of these requests, even if few come, "
                f"{each.beyond.ttft_missed:.0%} miss {slo.ttft_s:g} s to the first token and "
                f"{each.beyond.tpot_missed:.0%} miss {slo.tpot_s:g} s per token"
                for each in (single.stock for single in singles)
                if not each.rate
            ]
            raise ConfigError("; ".join([*self._skipped, *missed]))
        few = 0.0 if question.rate is None else 1.0

        def order(found: Found) -> tuple[float, float]:
            total = found.total(question.least)
            return few * total, -found.rate / total

        found.sort(key=order)
        return Plan(question, tuple(singles), tuple(found), tuple(self._skipped))

    def _fits(self, profile: Profile) -> bool:
        """Whether there can be an instance of this profile; writes down why not."""
        devices, lengths = self._question.devices, self._question.demand.lengths
        pool_tokens = of_profile(EngineConfig(), profile).pool_tokens
        need = sum(max(column) for column in zip(*lengths, strict=True))
        if devices is not None and profile.num_devices > devices:
            reason = f"an instance takes {profile.num_devices} GPUs"
        elif not self._question.least.of(profile):
            reason = f"what it takes of {self._question.least} is not known"
        elif need > pool_tokens:
            reason = f"its KV pool holds {pool_tokens} tokens, a request may have {need}"
        elif (step_s := profile.cost.step_s(1, 0, 0, 0)) > self._question.slo.tpot_s:
            reason = f"a request alone takes {step_s * 1e3:.3g} ms per token"
        else:
            return True
        self._skipped.append(f"{profile.name}: {reason}")
        return False

    # -- clusters ----------------------------------------------------------------------

    def _both(self, system: System, single: Single) -> _Candidate:
        """Instances that do both."""
        size, rate = single.profile.num_devices, single.whole_rate
        promise = rate / self._question.least.of(single.profile)
        search = partial(self._replicas, system, single)
        return _Candidate(single.profile.name, rate, promise, (size,), search)

    def _pair(self, prefill: Single, decode: Single) -> _Candidate:
        """Prefill instances of one profile, decode instances of the same or another one."""
        profiles, least = (prefill.profile, decode.profile), self._question.least
        rates = prefill.prefill.rate, decode.decode.rate
        rate, promise = 0.0, 0.0
        if all(rates):
            rate = 1 / sum(1 / each for each in rates)
            totals = map(least.of, profiles)
            promise = 1 / sum(each / part for each, part in zip(totals, rates, strict=True))
        name = " and ".join(dict.fromkeys(each.name for each in profiles))
        sizes = tuple(each.num_devices for each in profiles)
        return _Candidate(name, rate, promise, sizes, partial(self._split, prefill, decode))

    def _worthy(self, candidates: Sequence[_Candidate], node: int | None) -> list[Found]:
        """Search layouts of those that promise most per unit, or nearly; with a node, each of which
        fits on it."""
        devices, found = self._question.devices, list[Found]()
        most = min((each for each in (devices, node) if each is not None), default=math.inf)
        fitting = [each for each in candidates if each.promise and sum(each.sizes) <= most]
        fitting.sort(key=attrgetter("promise"), reverse=True)
        for each in fitting[:_MOST_WORTHY]:
            if each.promise < fitting[0].promise * _WORTHY:
                break
            if node is not None:
                found += self._on_nodes(each, node)
            elif devices is None:
                found += self._few(each, self._question.rate or 0.0)
            else:
                found += each.search(devices, each.sizes)
        return found

    def _on_nodes(self, candidate: _Candidate, node: int) -> list[Found]:
        """Search layouts of a node, as full as it can be; where a rate is asked for, of so many
        nodes, as few GPUs as serve it."""
        devices, asked = self._question.devices, self._question.rate or 0.0
        full = candidate.search(min(node, devices or node), candidate.sizes)
        best = max((each.rate for each in full), default=0.0)
        if not best:
            return []
        if devices is not None:
            nodes = devices // min(node, devices)
        else:
            nodes = math.ceil(asked * _SERVES / best)
            few = self._few(candidate, asked / nodes)
            full += [each for each in few if each.layout.num_devices <= node]
        return [each.on_nodes(nodes, devices) for each in full]

    def _few(self, candidate: _Candidate, asked: float) -> list[Found]:
        """Search as few instances as serve the rate, from what single ones promise on."""
        tried: dict[int, list[Found]] = {}
        least, ones = len(candidate.sizes), (1,) * len(candidate.sizes)
        count = max(least, math.ceil(asked / candidate.rate))
        while count not in tried and count <= _MOST_INSTANCES:
            tried[count] = candidate.search(count, ones)
            reached = max((each.rate for each in tried[count]), default=0.0)
            if reached:
                count = max(least, math.ceil(count * asked * _SERVES / reached))
        if count > _MOST_INSTANCES:
            self._skipped.append(f"{candidate.name}: it takes over {_MOST_INSTANCES} of them")
        return [each for found in tried.values() for each in found]

    def _replicas(
        self, system: System, single: Single, budget: int, sizes: Sequence[int]
    ) -> list[Found]:
        """Simulate instances that do both."""
        one, count = single.stock if system is System.STOCK else single.whole, budget // sizes[0]
        layout = replace(one.layout, system=system, both=count)
        return [self._measured(layout, count * one.rate)] if one.rate else []

    def _split(
        self, prefills: Single, decodes: Single, budget: int, sizes: Sequence[int]
    ) -> list[Found]:
        """Simulate ratios of prefill and decode instances on both sides of what single instances
        promise, as long as it gets better, and the best of these in adaptive mode."""
        tokens = prefills.prefill.layout.tokens
        other = None if decodes.profile == prefills.profile else decodes.profile

        def promised(prefill: int) -> tuple[int, float]:
            decode = (budget - prefill * sizes[0]) // sizes[1]
            rates = prefill * prefills.prefill.rate, decode * decodes.decode.rate
            return decode, min(rates)

        def measured(prefill: int) -> Found:
            decode, rate = promised(prefill)
            layout = Layout(System.SPLIT, prefills.profile, prefill, decode, 0, tokens, other)
            return self._measured(layout, rate)

        possible = range(1, (budget - sizes[1]) // sizes[0] + 1)
        first = max(possible, key=lambda prefill: promised(prefill)[1])
        found = {first: measured(first)}
        for step in (1, -1):
            prefill = first + step
            while prefill in possible:
                found[prefill] = measured(prefill)
                if found[prefill].rate <= found[prefill - step].rate:
                    break
                prefill += step
        best = max(found.values(), key=attrgetter("rate"))
        if not best.rate:
            return []
        adaptive = replace(best.layout, system=System.ADAPTIVE)
        return [*found.values(), self._measured(adaptive, best.rate)]

    # -- single instances --------------------------------------------------------------

    def _single(self, profile: Profile) -> Single:
        # A prompt in full steps of prompts alone, and an output in a part of a large batch's steps.
        demand, (batch, step_s) = self._question.demand, self._largest_batch(profile)
        parts = demand.prompt_tokens / _MIDDLE_TOKENS
        prompt_s = parts * profile.cost.step_s(0, 0, _MIDDLE_TOKENS, demand.prompt_tokens / 2)
        output_s = demand.output_tokens * step_s / batch
        one = Layout(System.SPLIT, profile, 0, 0, 0, _MIDDLE_TOKENS)
        return Single(
            profile,
            self._tuned(replace(one, prefill=1), 1 / prompt_s),
            self._measured(replace(one, decode=1), 1 / output_s),
            self._tuned(replace(one, system=System.STOCK, both=1), 1 / (prompt_s + output_s)),
            self._tuned(replace(one, system=System.WHOLE, both=1), 1 / (prompt_s + output_s)),
        )

    def _tuned(self, layout: Layout, guess: float) -> Found:
        """Take more tokens in a step as long as that is worth it, or fewer."""
        best = self._measured(layout, guess)
        for sizes, worth in ((_LARGER, _WORTH), (_SMALLER, 1 / _WORTH)):
            for tokens in sizes:
                found = self._measured(replace(layout, tokens=tokens), best.rate or guess)
                if not found.rate or found.rate <= best.rate * worth:
                    break
                best = found
        return best

    def _largest_batch(self, profile: Profile) -> tuple[int, float]:
        """Return the most decodes that keep the TPOT SLO and fit into the pool, and the seconds of
        their step."""
        demand = self._question.demand
        engine, tokens = of_profile(EngineConfig(), profile), demand.prompt_tokens
        most = min(engine.max_requests, engine.pool_tokens / (tokens + demand.output_tokens))
        context = demand.prompt_tokens + demand.output_tokens / 2
        for batch in range(max(1, int(most)), 0, -1):
            step_s = profile.cost.step_s(batch, batch * context, 0, 0)
            if step_s <= self._question.slo.tpot_s:
                break
        return batch, step_s

    # -- simulations -------------------------------------------------------------------

    def _measured(self, layout: Layout, guess: float) -> Found:
        """Search the goodput of a layout, once."""
        if layout in self._known:
            return self._known[layout]
        names = " and ".join(each.name for each in layout.profiles)
        self._tell(f"{names}: {layout.name}, {layout.tokens} tokens a step")
        question, config = self._question, config_of(self._question, layout)
        # Some generations of requests, and long enough for a queue to become too long.
        step_s = self._largest_batch(layout.decode_profile or layout.profile)[1]
        outputs_s = _OUTPUT_TIMES * question.demand.output_tokens * step_s
        has_outputs = bool(layout.decode or layout.both)

        def scored(rate: float) -> Score:
            span_s = min(_TTFT_TIMES * question.slo.ttft_s, _QUEUE_REQUESTS / rate)
            specs = question.demand.specs(rate, max(span_s, outputs_s if has_outputs else 0.0))
            if not has_outputs:
                specs = [replace(spec, output_tokens=1) for spec in specs]
            return score(config, specs, question.slo)

        rate, beyond = highest_rate(scored, guess, question.attainment)
        found = Found(layout, rate, beyond, question.devices or layout.num_devices)
        self._known[layout] = found
        return found
