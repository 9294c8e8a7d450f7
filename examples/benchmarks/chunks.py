"""What sizes of chunks are worth, simulated: one instance that computes prompts beside decodes.

`python -m examples.benchmarks.chunks --output FILE.jsonl` simulates, on measured CPU cores and on
an estimated H100, fixed chunks, chunks by what steps cost (`policy.step_tokens`), stock vLLM with
token budgets and with a cadence. Requests arrive at 0.7 of the rate at which stock vLLM serves as
many that come at once. Every system sees the same requests; three seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from examples.benchmarks.rivals.engines import Cadence
from vllm_tetri.policy.adaptive import NO_OBJECTIVE
from vllm_tetri.sim.cluster import run
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, Stock, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.figures import figures
from vllm_tetri.sim.workload import KINDS, draw

PROFILES = "smollm2-2cores", "estimate-h100-8b"
METRICS = "ttft_mean_s", "itl_p99_s", "itl_max_s", "jct_mean_s"
OF_STOCK = 0.7
SEEDS = 3


def systems(usual: EngineConfig) -> dict[str, tuple[EngineConfig, str]]:
    """Return engines and modes by name."""
    budgets = sorted({128, 256, 512, 2048, usual.most_tokens})
    stock = {f"stock, {budget}": Stock(budget) for budget in budgets}
    kinds = stock | {f"cadence {every}": Cadence(interval=every) for every in (2, 4)}
    rivals = {name: (replace(usual, kind=kind), "least-in-flight") for name, kind in kinds.items()}
    fixed = {f"chunks of {size}": replace(usual, chunk_tokens=size) for size in (128, 256, 512)}
    ours = fixed | {"chunks by cost": replace(usual, has_sized_chunks=True)}
    return rivals | {name: (engine, "whole") for name, engine in ours.items()}


def rows(names: Sequence[str], num: int) -> Iterator[dict[str, Any]]:
    """Yield means over the seeds, by profile, class and system."""
    for name in names:
        usual = of_profile(EngineConfig(order="fcfs"), profile(name))
        for kind in KINDS:
            at_once = _play(usual, f"stock, {usual.most_tokens}", draw(kind, num, 1e6, 0))
            rate = OF_STOCK * num / at_once["span_s"]
            for system in systems(usual):
                found = [_play(usual, system, draw(kind, num, rate, seed)) for seed in range(SEEDS)]
                means = {each: mean(one[each] for one in found) for each in METRICS}
                yield {"profile": name, "kind": kind, "system": system, "rate": rate, **means}


def _play(usual: EngineConfig, system: str, specs: Sequence[Any]) -> dict[str, float]:
    engine, mode = systems(usual)[system]
    outcome = run(ClusterConfig(make_instances(both=1, engine=engine), mode), specs)
    return {**figures(outcome.served, NO_OBJECTIVE), "span_s": outcome.end_s}


def main(words: list[str] | None = None) -> None:
    """Simulate, print every row, and write them."""
    parser = argparse.ArgumentParser("python -m examples.benchmarks.chunks", description=__doc__)
    parser.add_argument("--requests", type=int, metavar="N", default=200, help="of a cell; 200")
    parser.add_argument("--profiles", nargs="+", default=PROFILES, metavar="NAME")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args(words)
    found = []
    for row in rows(options.profiles, options.requests):
        found.append(row)
        shown = "  ".join(f"{each} {row[each]:.4g}" for each in METRICS)
        print(f"{row['profile']}, {row['kind']}, {row['system']}: {shown}", flush=True)
    if options.output is not None:
        options.output.write_text("".join(json.dumps(each) + "\n" for each in found))


if __name__ == "__main__":
    main()
