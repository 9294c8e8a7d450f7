"""What equal steps save where layers are spread over stages (ORCA, Sarathi), simulated.

`python -m examples.benchmarks.pipeline --output FILE.jsonl` takes Sarathi-Serve's largest model on
its devices, four tensor parallel GPUs in each of two stages and an Ethernet link between, and eight
tensor parallel GPUs without stages beside them. As in vLLM of 2023, there are as many schedulers as
stages, each with its part of the memory, and each has one step on its way. All figures are
estimates: step costs come from data sheets.

- At once: all requests arrive together. `bubbles` is the part of the stages' time in which they
  wait although a step is on its way.
- Capacity, as Sarathi-Serve defines it: requests a second with p99 of the time between tokens
  within its strict SLO and a median scheduling delay of at most 2 s.
- Phases (DistServe, sections 3 and 4): goodput per GPU of OPT-13B, of instances that compute
  prompts alone, decode alone (prompts cost nothing) or do both, tensor parallel, in stages within a
  node, or both. Lengths are those of its example, SLOs are ours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from examples.benchmarks.paper.cases import conversations
from examples.benchmarks.rivals.engines import (
    Orca,
    OrcaInstance,
    PromptsFirst,
    PromptsFirstInstance,
)
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import ENGINES, Outcome, run
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, EngineKind, Stock, make_instances
from vllm_tetri.sim.cost.hardware import GPUS, MODELS, OVERHEAD_S, Model, kv_tokens, roofline
from vllm_tetri.sim.cost.step_cost import Roofline
from vllm_tetri.sim.engine.instance import Share
from vllm_tetri.sim.engine.stock import StockInstance
from vllm_tetri.sim.figures import gap_quantiles
from vllm_tetri.sim.plan.goodput import Demand, Score, highest_rate, score
from vllm_tetri.sim.workload import RequestSpec

# Its published configuration. Sarathi-Serve, tables 1 and 3: on two servers of four A100, with
# 100 Gbit/s between them; p99 of the time between tokens at most 1 s.
FALCON = Model("falcon-180b", 80, 14848, 232, 8, 64, 4 * 14848, 2, 65024, is_tied=True)
DEVICE, ETHERNET, TBT_SLO_S, DELAY_S = GPUS["a100-80g"], 12.5e9, 1.0, 2.0
WINDOW_TOKENS = 8192
SYSTEMS = ("orca", "vllm-2023", "vllm", "sarathi")
LAYOUTS = {"4 x 2 stages": (4, 2), "8, no stages": (8, 1)}
# Tensor parallel degree and stages of an instance.
PHASE_LAYOUTS = tuple((parallel, stages) for parallel in (1, 2, 4) for stages in (1, 2, 4))
PHASES = ("prefill", "decode", "both")
PHASE_SLOS = {"strict": Objective(0.1, 0.02), "loose": Objective(0.4, 0.04)}


@dataclass(frozen=True)
class Stages(Roofline):
    """Steps of one stage, which has its part of the layers, and when each stage is free. A step
    passes the stages in order and overtakes none."""

    free_s: list[float] = field(default_factory=lambda: [0.0])
    send_s: float = 0.0  # activations of a token to the next stage
    busy_s: list[float] = field(default_factory=lambda: [0.0])  # all stages together
    period_s: list[float] = field(default_factory=lambda: [0.0])  # with a step on its way

    def passed(self, now: float, stage_s: float, tokens: int) -> float:
        """Return when a step that is ready now leaves the last stage."""
        arrival_s, empty_s = now, max(now, self.free_s[-1])
        for stage, free_s in enumerate(self.free_s):
            sent_s = tokens * self.send_s if stage else 0.0
            arrival_s = self.free_s[stage] = max(arrival_s + sent_s, free_s) + stage_s
        self.busy_s[0] += stage_s * len(self.free_s)
        self.period_s[0] += arrival_s - empty_s
        return arrival_s

    @property
    def bubbles(self) -> float:
        """Part of the stages' time in which they wait although a step is on its way."""
        return 1 - self.busy_s[0] / (self.period_s[0] * len(self.free_s))


class FreePrompts(Stages):
    """Stages in which prompts cost nothing."""

    def step_s(
        self, num_decodes: float, decode_context: float, prompt_tokens: float, prompt_context: float
    ) -> float:
        return Stages.step_s(self, num_decodes, decode_context, 0, 0) if num_decodes else 0.0


class StagedInstance(StockInstance):
    """One of the schedulers; its steps wait for those of the others at every stage."""

    def wake(self, now: float) -> None:
        self._now = now
        super().wake(now)

    def duration_s(self, shares: list[Share]) -> float:
        stages, stage_s = self.engine.cost, super().duration_s(shares)
        assert isinstance(stages, Stages)
        tokens = sum(num for _, num in shares) + len(self.batch) * (not self.is_batch_paused)
        return stages.passed(self._now, stage_s, tokens) - self._now


class StagedOrca(Orca):
    """`Orca` in stages."""


class StagedPromptsFirst(PromptsFirst):
    """`PromptsFirst` in stages."""


class StagedStock(Stock):
    """`Stock` in stages."""


class _Orca(StagedInstance, OrcaInstance):
    pass


class _PromptsFirst(StagedInstance, PromptsFirstInstance):
    pass


ENGINES.update(
    {StagedOrca: _Orca, StagedPromptsFirst: _PromptsFirst, StagedStock: StagedInstance}
)  # fmt: skip
KINDS: dict[str, EngineKind] = {
    "orca": StagedOrca(WINDOW_TOKENS),
    "vllm-2023": StagedPromptsFirst(),
    "vllm": StagedStock(),
    "sarathi": StagedStock(512),
}


def cluster(
    system: str,
    parallel: int,
    stages: int,
    seed: int,
    model: Model = FALCON,
    link: float = ETHERNET,
    kind: type[Stages] = Stages,
) -> tuple[ClusterConfig, Stages]:
    """Return as many schedulers as stages, on devices that they share, and what is counted. Stages
    take the same time each: they share the output layer and the fixed cost of a step as well."""
    part = replace(model, layers=model.layers // stages, vocabulary=model.vocabulary // stages)
    cost = roofline(part, DEVICE, parallel)
    costs = {name: getattr(cost, name) for name in Roofline.__slots__}
    costs["overhead_s"] -= OVERHEAD_S * (1 - 1 / stages)
    passed = kind(**costs, free_s=[0.0] * stages, send_s=model.hidden * 2 / link)
    blocks = kv_tokens(part, DEVICE, parallel) // EngineConfig().block_size // stages
    engine = EngineConfig(cost=passed, kv_blocks=blocks, kind=KINDS[system])
    return ClusterConfig(
        make_instances(both=stages, engine=engine), "least-in-flight", seed
    ), passed


def at_once(system: str, parallel: int, stages: int, seed: int, count: int) -> dict[str, float]:
    """Return the time that requests take which arrive together, and how stages waited."""
    config, passed = cluster(system, parallel, stages, seed)
    specs = [replace(each, arrival_s=0.0) for each in conversations(count, 1.0, seed, 1.0)]
    outcome = run(config, specs)
    tokens = sum(each.prompt_tokens + each.output_tokens for each in specs)
    return {
        "total_s": outcome.end_s,
        "tokens_per_s": tokens / outcome.end_s,
        "bubbles": passed.bubbles,
        "tbt_p99_s": gap_quantiles(outcome.served, (0.99,))[0],
    }


def capacity(system: str, parallel: int, stages: int, seed: int, count: int) -> dict[str, float]:
    """Return the highest rate that is sustained."""

    def sustained(rate: float) -> Score:
        specs = conversations(count, rate, seed, 1.0)
        is_slow, is_late = judged(run(cluster(system, parallel, stages, seed)[0], specs), specs)
        return Score(float(not (is_slow or is_late)), float(is_late), float(is_slow))

    rate, beyond = highest_rate(sustained, 0.5, 1.0)
    return {"capacity_per_s": rate, "beyond_is_late": beyond.ttft_missed}


def judged(outcome: Outcome, specs: Sequence[RequestSpec]) -> tuple[bool, bool]:
    """Whether tokens come too slowly, and whether prompts wait too long."""
    delays = [each.begun_s - each.spec.arrival_s for each in outcome.served]
    return gap_quantiles(outcome.served, (0.99,))[0] > TBT_SLO_S, median(delays) > DELAY_S


def goodput(phase: str, slo: Objective, parallel: int, stages: int, count: int) -> float:
    """Return the highest rate per GPU at which nine tenths of a phase keep their SLO."""
    kind = FreePrompts if phase == "decode" else Stages
    config, passed = cluster("vllm", parallel, stages, 0, MODELS["opt-13b"], DEVICE.link, kind)
    demand = Demand(known=((512, 64),), least_requests=count)

    def kept(rate: float) -> Score:
        passed.free_s[:] = [0.0] * stages
        specs = demand.specs(rate, 30.0)
        if phase == "prefill":
            specs = [replace(spec, output_tokens=1) for spec in specs]
        return score(config, specs, slo)

    return highest_rate(kept, 4.0, 0.9)[0] / parallel / stages


def phases(count: int) -> Iterator[dict[str, Any]]:
    """Yield goodputs of instances of each phase."""
    for name, slo in PHASE_SLOS.items():
        for phase, (parallel, stages) in product(PHASES, PHASE_LAYOUTS):
            where = {"slo": name, "phase": phase, "parallel": parallel, "stages": stages}
            yield where | {"goodput_per_gpu": goodput(phase, slo, parallel, stages, count)}


def rows(count: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of everything."""
    for layout, (parallel, stages) in LAYOUTS.items():
        for system in SYSTEMS:
            for seed in range(seeds):
                where = {"layout": layout, "system": system, "seed": seed, "requests": count}
                yield (
                    where
                    | at_once(system, parallel, stages, seed, count)
                    | capacity(system, parallel, stages, seed, count)
                )
    yield from phases(4 * count)


def main(words: list[str] | None = None) -> int:
    """Simulate, and write lines of JSON."""
    parser = argparse.ArgumentParser("python -m examples.benchmarks.pipeline", description=__doc__)
    parser.add_argument("--requests", type=int, default=256, metavar="N")
    parser.add_argument("--seeds", type=int, default=4, metavar="N")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(words)
    with options.output.open("w", encoding="utf-8") as file:
        for row in rows(options.requests, options.seeds):
            print(json.dumps({"simulated": True, **row}), file=file, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
