"""By how much ways of serving cost more than the best one, cell by cell, simulated.

`python -m examples.benchmarks.regrets --output FILE.jsonl` simulates four instances with the step
costs of each profile, five classes and three rates: mode adaptive with four `both` and chunks sized
by cost, as by default; the same with roles; split with one, two or three prefill instances; whole;
and chunks of fixed sizes. As in `vllm-tetri regret`, a way costs the geometric mean of mean TTFT
and mean JCT; its regret is the part by which that is more than the best one's. Four instances of
stock vLLM stand beside them, with the default budget of the device and with others. Predictions are
right to 85 %; all profiles are estimates but that of a CPU core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from examples.benchmarks.classes import CLASSES, RATES
from examples.benchmarks.figures import Results
from vllm_tetri.policy.adaptive import NO_OBJECTIVE
from vllm_tetri.regret import cost
from vllm_tetri.sim.cluster import run
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, Stock, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.figures import figures
from vllm_tetri.sim.workload import RequestSpec, draw

PROFILES = ("smollm2-1core", "opt-13b-2xv100", "roofline:llama-3-8b:h100",
            "roofline:llama-3-70b:h100:4")  # fmt: skip
INSTANCES, ACCURACY = 4, 0.85
# Modes, and instances by role: prefill, decode, both.
USUAL, ROLES, STOCK = "adaptive", "adaptive 2P2D", "stock, budget "
LAYOUTS = {
    USUAL: ("adaptive", (0, 0, INSTANCES)),
    "whole": ("whole", (0, 0, INSTANCES)),
    **{
        f"{mode} {n}P{INSTANCES - n}D": (mode, (n, INSTANCES - n, 0))
        for mode in ("adaptive", "split")
        for n in (1, 2, 3)
    },
}
CHUNKS = (256, 512, 1024)  # tokens, of the usual layout and of whole
BUDGETS = (512, 2048)  # tokens of a step of stock vLLM, beside its default
SHOWN = ("ttft_mean_s", "itl_p99_s", "jct_mean_s")
LINK = 25e9  # bytes per second


def clusters(engine: EngineConfig) -> dict[str, ClusterConfig]:
    """Return each way of serving requests, those of stock vLLM last."""
    sized = replace(engine, has_sized_chunks=True)
    ways = {name: (*layout, sized) for name, layout in LAYOUTS.items()}
    for name, tokens in product((USUAL, "whole"), CHUNKS):
        fixed = replace(engine, chunk_tokens=tokens)
        ways[f"{name}, chunks of {tokens}"] = (*LAYOUTS[name], fixed)
    for tokens in sorted({*BUDGETS, engine.most_tokens}):
        stock = replace(engine, kind=Stock(budget_tokens=tokens))
        ways[f"{STOCK}{tokens}"] = ("least-in-flight", LAYOUTS[USUAL][1], stock)
    return {
        name: ClusterConfig(make_instances(*roles, engine=each), mode, link=LINK)
        for name, (mode, roles, each) in ways.items()
    }


def outcomes(engine: EngineConfig, specs: Sequence[RequestSpec]) -> dict[str, dict[str, float]]:
    """Return the figures of each way of serving requests."""
    found = {}
    for name, config in clusters(engine).items():
        outcome = run(config, specs)
        found[name] = figures(outcome.served, NO_OBJECTIVE, outcome.refused)
    return found


def at_once_per_s(engine: EngineConfig, kind: str, count: int) -> float:
    """Return the rate at which four stock engines serve requests that come all at once."""
    stock = make_instances(both=INSTANCES, engine=replace(engine, kind=Stock()))
    specs = draw(kind, count, 1.0, 0, variation=None)
    served = run(ClusterConfig(stock, "least-in-flight"), specs).served
    return count / max(each.jct_s for each in served)


def cells(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Simulate all classes and rates with one profile."""
    engine = of_profile(EngineConfig(), profile(name))
    for kind in CLASSES:
        most = at_once_per_s(engine, kind, options.num_prompts)
        for rate, seed in product(options.rates.split(","), range(options.repeats)):
            per_s = RATES[rate] * most
            count = max(options.num_prompts, round(options.seconds * per_s))
            specs = draw(kind, count, per_s, seed, accuracy=ACCURACY)
            ran = outcomes(engine, specs)
            found = {way: cost(each) for way, each in ran.items() if not way.startswith(STOCK)}
            best = min(found, key=found.__getitem__)
            least = {"best": found[best], "layout": min(found[each] for each in LAYOUTS)}
            yield {
                "profile": name, "class": kind, "rate": rate, "seed": seed, "best": best,
                "usual": found[USUAL] / least["best"] - 1,
                "usual_of_layouts": found[USUAL] / least["layout"] - 1,
                "roles": found[ROLES] / least["best"] - 1,
                "figures": {
                    way: [round(each[metric], 5) for metric in SHOWN] for way, each in ran.items()
                },
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", default=",".join(PROFILES), help="of instances")
    parser.add_argument("--num-prompts", type=int, default=240, help="requests in a cell; 240")
    parser.add_argument("--seconds", type=float, default=0, help="or all that come in so long; 0")
    parser.add_argument("--rates", default=",".join(RATES), help="of requests")
    parser.add_argument("--repeats", type=int, default=3, help="seeds; 3")
    parser.add_argument("--output", type=Path, default=Path("regrets.jsonl"), help="result file")
    options = parser.parse_args()
    by, metrics = ["profile", "class", "rate"], ["usual", "usual_of_layouts", "roles"]
    asked = {"num_prompts": options.num_prompts, "seconds": options.seconds}
    given = {"instances": INSTANCES, **asked}
    results = Results.of(options.output, by, metrics, given, is_new=True)
    for name in options.profiles.split(","):
        found = []
        for cell in cells(name, options):
            results.add(**cell)
            found.append(cell)
        for way in ("usual", "roles"):
            regrets = [each[way] for each in found]
            print(f"{name}, {way}: {mean(regrets):.1%}, at most {max(regrets):.1%}", flush=True)


if __name__ == "__main__":
    main()
