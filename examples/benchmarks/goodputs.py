"""Goodput of ways of serving, by search (DistServe's definition), simulated.

`python -m examples.benchmarks.goodputs --output FILE.jsonl` finds, for four instances of each
profile and each class, the highest rate at which 90 % of the requests keep both strict SLOs: four
times the TTFT and two and a half times the TPOT of one request alone on stock vLLM, means over
requests of the class. Stock vLLM stands behind a router that sends to the least in flight. The
last way is the usual one with these SLOs promised (`--ttft-slo`, `--tpot-slo`).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from examples.benchmarks.classes import CLASSES, STRICT
from examples.benchmarks.figures import Results
from examples.benchmarks.regrets import ACCURACY, INSTANCES, USUAL, at_once_per_s, clusters
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, Stock, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.modes import AdaptiveMode
from vllm_tetri.sim.plan.goodput import Demand, Score, highest_rate, score

PROFILES = ("opt-13b-2xv100", "roofline:llama-3-8b:h100", "roofline:llama-3-70b:h100:4")
ATTAINMENT, LONE, LONE_S = 0.9, 24, 1e3
_OUTPUT_TIMES = 5  # of a mean output at the slowest pace that counts, that a simulation lasts


def strict(engine: EngineConfig, kind: str) -> Objective:
    """Return the SLOs of a class, from requests that are alone."""
    one = ClusterConfig(make_instances(both=1, engine=replace(engine, kind=Stock())), "whole")
    alone = simulate(one, Demand(kind, least_requests=LONE).specs(1 / LONE_S, 0))
    times, paces = (each.ttft_s for each in alone), (each.tpot_s for each in alone)
    return Objective(STRICT[0] * fmean(times), STRICT[1] * fmean(paces))


def goodput(config: ClusterConfig, demand: Demand, slo: Objective, guess: float) -> float:
    """Return requests per second."""

    # Some generations of outputs, or batches are judged before they are as large as they become.
    span_s = _OUTPUT_TIMES * demand.output_tokens * slo.tpot_s

    def scored(rate: float) -> Score:
        return score(config, demand.specs(rate, span_s), slo)

    return highest_rate(scored, guess, ATTAINMENT)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", default=",".join(PROFILES), help="of instances")
    parser.add_argument("--num-prompts", type=int, default=720, help="at each rate, or more; 720")
    parser.add_argument("--output", type=Path, default=Path("goodputs.jsonl"), help="result file")
    options = parser.parse_args()
    given = {"instances": INSTANCES, "num_prompts": options.num_prompts}
    by = ["profile", "class", "way"]
    results = Results.of(options.output, by, ["per_s"], given, is_new=True)
    for name in options.profiles.split(","):
        engine = of_profile(EngineConfig(), profile(name))
        for kind in CLASSES:
            slo = strict(engine, kind)
            guess = at_once_per_s(engine, kind, options.num_prompts) / 2
            demand = Demand(kind, accuracy=ACCURACY, least_requests=options.num_prompts)
            ways = clusters(engine)
            ways["adaptive, promised"] = replace(
                ways[USUAL], mode=type("Promised", (AdaptiveMode,), {"objective": slo})
            )
            for way, config in ways.items():
                if "chunks of" in way:
                    continue  # of one size
                per_s = goodput(config, demand, slo, guess)
                results.add(
                    profile=name, **{"class": kind}, way=way, per_s=round(per_s, 4),
                    ttft_slo_s=round(slo.ttft_s, 5), tpot_slo_s=round(slo.tpot_s, 6),
                )  # fmt: skip
                print(f"{name} {kind} {way}: {per_s:.3g}/s", flush=True)


if __name__ == "__main__":
    main()
