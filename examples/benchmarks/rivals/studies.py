"""What mechanisms of papers are worth in the simulator, each beside what is without it, and ours.

`python -m examples.benchmarks.rivals.studies --output FILE.jsonl [--trace FILE]`, a line per cell;
the trace is one of Mooncake's, whose names of blocks are not used. Times are of virtual devices,
estimated from data sheets or the paper's proportions; nothing here is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from examples.benchmarks.figures import Results
from examples.benchmarks.rivals.adrenaline import attended, synchronised
from examples.benchmarks.rivals.engines import Unchunked
from examples.benchmarks.rivals.rejection import Rule
from examples.benchmarks.rivals.systems import Parts, mooncake, splitwise, system_of
from examples.benchmarks.rivals.tgi import Tgi
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import Outcome, run
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, make_instances, of_profile
from vllm_tetri.sim.cost.hardware import GPUS, MODELS
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.figures import figures
from vllm_tetri.sim.modes import AdaptiveMode
from vllm_tetri.sim.workload import RequestSpec, draw, predicted, read_trace

TOLERANCE = 1.25  # `policy.overload` refuses what is later than promised by this
KEPT = (
    "ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "itl_p99_s", "itl_max_s", "jct_mean_s",
    "jct_p99_s", "good", "good_per_s", "refused", "split",
)  # fmt: skip
Specs = Sequence[RequestSpec]
Cells = Iterator[tuple[dict[str, Any], ClusterConfig, Specs, Objective]]
"""Names of a cell, what is simulated, and what counts as in time."""


class Refusing(AdaptiveMode):
    """Ours, with `--refuse-late`."""

    refuses_late = True

    def __init__(self, config: ClusterConfig, objective: Objective) -> None:
        super().__init__(config)
        self.objective = objective


def engine_of(name: str) -> EngineConfig:
    engine = of_profile(EngineConfig(), profile(name))
    return replace(engine, arena_tokens=engine.pool_tokens // 2)


def swing(outcome: Outcome, specs: Specs) -> dict[str, float]:
    """Return the mean of requests that are decoded and of those that wait for their first token,
    and by how much both vary, every half second from a fifth of the arrivals to the last one."""
    arrivals, firsts, lasts = np.array([
        (each.spec.arrival_s, each.spec.arrival_s + each.ttft_s, each.spec.arrival_s + each.jct_s)
        for each in outcome.served
    ]).T  # fmt: skip
    times = np.arange(specs[len(specs) // 5].arrival_s, specs[-1].arrival_s, 0.5)[:, None]
    decoded = ((firsts <= times) & (times < lasts)).sum(1)
    waiting = ((arrivals <= times) & (times < firsts)).sum(1)
    return {
        "decoded_mean": float(decoded.mean()),
        "decoded_cv": float(decoded.std() / decoded.mean()),
        "waiting_mean": float(waiting.mean()),
        "waiting_sd": float(waiting.std()),
    }


def cell(config: ClusterConfig, specs: Specs, slo: Objective) -> dict[str, float]:
    """Simulate one, and return its figures."""
    outcome = run(config, specs)
    found = figures(outcome.served, slo, outcome.refused)
    vain = sum(each.computed_tokens for each in outcome.refused)
    computed = vain + sum(each.spec.prompt_tokens for each in outcome.served)
    return {
        **{name: found[name] for name in KEPT},
        "refused_late": sum(each.computed_tokens > 0 for each in outcome.refused),
        "wasted": vain / computed,
        "preemptions": outcome.preemptions,
        "preempted_most": max(each.preemptions for each in outcome.served),
        "busy": float(np.mean([*outcome.busy.values()])),
        **swing(outcome, specs),
    }


# -- the studies ---------------------------------------------------------------------------


def rejection(seed: int, trace: Path | None) -> Cells:
    """Mooncake, section 7: more requests than 8 prefill instances and a decode instance serve in
    time. All rules are told a promise that with their tolerance is that which counts."""
    engine, slo = engine_of("roofline:llama-3-70b:a100-80g:8"), Objective(30.0, 0.03)
    if trace is None:
        specs = draw("hphd", 800, 60.0, seed)
    else:
        read = read_trace(trace)[800 * seed : 800 * (seed + 1)]
        first_s = read[0][0]
        specs = predicted(
            [((at_s - first_s) / 2.5, prompt, output) for at_s, prompt, output in read], 1.0, seed
        )
    told = Objective(slo.ttft_s / TOLERANCE, slo.tpot_s / TOLERANCE)
    parts = Parts(9, engine, 8, objective=told, seed=seed)
    for rule in (None, *Rule):
        name = f"mooncake {rule.name if rule else 'SENT'}"
        yield {"system": name}, mooncake(parts, rule), specs, slo
    ours = system_of("adaptive", parts)
    split = replace(ours, instances=system_of("tetri", parts).instances)
    for name, config in (("ours", ours), ("ours, 8P1D", split)):
        yield {"system": name}, config, specs, slo
        refusing = replace(config, mode=partial(Refusing, objective=told))
        yield {"system": f"{name}, refusing"}, refusing, specs, slo


def attention(seed: int, trace: Path | None) -> Cells:
    """Adrenaline, section 3: Llama-2-13B on A100s, light prompts with heavy outputs and mixed."""
    model, gpu, slo = "llama-2-13b", "a100-80g", Objective(1.0, 0.05)
    parts = Parts(4, engine_of(f"roofline:{model}:{gpu}"), seed=seed)
    plain = system_of("distserve", parts)
    for kind, rate in (("lphd", 24.0), ("lphd", 40.0), ("mixed", 32.0)):
        specs = draw(kind, 500, rate, seed)
        named = {"kind": kind, "rate": rate}
        yield {**named, "system": "distserve"}, plain, specs, slo
        for part, reached in ((0.2, 0.2), (0.2, 0.6), (0.4, 0.8)):
            places = attended(
                plain.instances, *synchronised(MODELS[model], GPUS[gpu]),
                part=part, bandwidth_part=reached,
            )  # fmt: skip
            name = f"adrenaline {part:g}, reads {reached:g}"
            yield {**named, "system": name}, replace(plain, instances=places), specs, slo
        for name in ("adaptive", "vllm"):
            yield {**named, "system": name}, system_of(name, parts), specs, slo


def ratio(seed: int, trace: Path | None) -> Cells:
    """TGI: ratios, and how long prompts wait at most, in steps."""
    engine, slo = engine_of("opt-13b-2xv100"), Objective(1.0, 0.1)
    parts = Parts(2, engine, seed=seed)
    for rate in (3.0, 6.0):
        specs = draw("mixed", 300, rate, seed)
        for served, waited in ((0.0, 20), (0.3, 20), (1.2, 20), (1.2, 100)):
            kind = Tgi(served, waited)
            places = make_instances(both=2, engine=replace(engine, kind=kind))
            name = f"tgi {served:g}, {waited} steps"
            config = ClusterConfig(places, "least-in-flight")
            yield {"rate": rate, "system": name}, config, specs, slo
        for name in ("vllm-2023", "vllm", "adaptive"):
            yield {"rate": rate, "system": name}, system_of(name, parts), specs, slo


def ageing(seed: int, trace: Path | None) -> Cells:
    """Splitwise, section IV-B: bounds of preemption where memory is short."""
    engine, slo = engine_of("opt-13b-2xv100"), Objective(1.0, 0.1)
    parts = Parts(4, engine, seed=seed)
    specs = draw("mixed", 600, 14.0, seed)
    for most, after_s in ((10**6, None), (2, None), (2, 20.0), (2, 5.0), (2, 1.0), (0, None)):
        kind = Unchunked(most) if after_s is None else Unchunked(most, after_s)
        name = f"at most {most if most < 10**6 else 'any'}, aged {after_s}"
        yield {"system": name}, splitwise(parts, kind), specs, slo
    for name in ("distserve", "adaptive", "vllm"):
        yield {"system": name}, system_of(name, parts), specs, slo


def pipeline(seed: int, trace: Path | None) -> Cells:
    """Mooncake, section 5.1: prompts of 32,768 to 131,072 tokens, one in ten of the others."""
    engine, slo = engine_of("roofline:llama-3-70b:a100-80g:8"), Objective(30.0, 0.1)
    parts = Parts(5, engine, 4, seed=seed)
    light = [(length, 200) for length in range(1000, 9001, 500)]
    long = [(length, 200) for length in range(32768, 131073, 16384)]
    known = [*light * 9 * len(long), *long * len(light)]
    for rate in (0.1, 0.4, 1.0):
        specs = draw("", 150, rate, seed, known=known)
        for nodes in (1, 2, 4):
            name = f"mooncake, groups of {nodes}"
            yield {"rate": rate, "system": name}, mooncake(parts, nodes=nodes), specs, slo
        yield {"rate": rate, "system": "adaptive"}, system_of("adaptive", parts), specs, slo


STUDIES: dict[str, Callable[[int, Path | None], Cells]] = {
    "rejection": rejection,
    "attention": attention,
    "ratio": ratio,
    "ageing": ageing,
    "pipeline": pipeline,
}


def main(words: list[str] | None = None) -> None:
    """Simulate what the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="for the study of rejection")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=[*STUDIES])
    parser.add_argument("--seeds", type=int, default=2, metavar="N")
    options = parser.parse_args(words)
    by = ["study", "kind", "rate", "system"]
    metrics = ["ttft_mean_s", "tpot_mean_s", "jct_mean_s", "good", "refused"]
    given = {"simulated": True, "trace": getattr(options.trace, "name", None)}
    results = Results.of(options.output, by, metrics, given)
    for study in options.studies:
        for seed in range(options.seeds):
            for names, config, specs, slo in STUDIES[study](seed, options.trace):
                if not results.has(study=study, seed=seed, **names):
                    results.add(study=study, seed=seed, **names, **cell(config, specs, slo))
                    print(study, seed, *names.values(), flush=True)


if __name__ == "__main__":
    main()
