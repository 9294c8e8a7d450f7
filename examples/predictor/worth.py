"""What predicted lengths are worth in the end, simulated: completion times and preemptions.

    python -m examples.predictor.worth ROWS --output worth.csv.gz

ROWS are answers and what the length head said of each before it was known (`head evaluate`). They
are drawn as the outputs of requests to a cluster whose decode instances have half of the KV pool of
OPT-13B on two V100, at rates that they just sustain and at some that they do not. Of the same
requests nothing is predicted (`histogram`), or what the head said, or the true length
(`oracle`), or what a classifier as in the paper says: buckets of 200, of which the
share is right that ours reaches, and the others are next to the right one, as far off as no real
one's errors are: this one is optimistic.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
from rich.progress import track

from examples.predictor.head import MAX_TOKENS, QUANTILES
from vllm_tetri.policy.admission import ENTRY_ORDERS
from vllm_tetri.sim.cluster import run
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.workload import RequestSpec, draw, predicted
from vllm_tetri.types import Prediction

PREDICTORS = ("histogram", "head", "classifier", "oracle")
CLASSIFIER_SHARE = 0.5  # of what is served: docs/predictor.md
REQUESTS = 600
# Decode instances, and requests a second.
LOADS = ((1, 1.0), (1, 1.25), (1, 3.0), (4, 6.0))
_PROFILE = "opt-13b-2xv100"


def cases() -> Iterator[tuple[int, float, str, str, str]]:
    """Yield instances, rate, admission, order and predictor."""
    for instances, rate in LOADS:
        yield instances, rate, "greedy", "fcfs", "histogram"
        for order, who in product(ENTRY_ORDERS, PREDICTORS):
            yield instances, rate, "reserve-dynamic", order, who
        if instances == 1:
            for who in PREDICTORS:
                yield instances, rate, "reserve-static", "fcfs", who


def requests(rows: pd.DataFrame, rate: float, who: str, seed: int) -> list[RequestSpec]:
    """Draw requests, the same ones for every predictor."""
    dice, answers = Random(f"answers {seed}"), list(rows.itertuples())
    drawn = [(each, dice.choice(answers)) for each in draw("mixed", REQUESTS, rate, seed)]
    arrivals = [(each.arrival_s, each.prompt_tokens, int(answer.tokens)) for each, answer in drawn]
    specs = predicted(arrivals, CLASSIFIER_SHARE, seed)
    if who == "classifier":
        return specs
    guesses: list[Prediction | None] = [None] * len(specs)
    if who == "oracle":
        guesses = [Prediction((float(answer.tokens),)) for _, answer in drawn]
    elif who == "head":
        guesses = [_by_head(answer) for _, answer in drawn]
    return [replace(spec, predicted=guess) for spec, guess in zip(specs, guesses, strict=True)]


def _by_head(answer: Any) -> Prediction:
    # Those answers were bounded by `max_tokens`, which an instance knows.
    return Prediction(tuple(min(getattr(answer, name), MAX_TOKENS) for name in QUANTILES))


def said_by(who: str, rows: pd.DataFrame) -> dict[int, list[Prediction]]:
    """Return what the head, or the classifier, said of answers, by how long they were."""
    answers, found = list(rows.itertuples()), defaultdict[int, list[Prediction]](list)
    specs = predicted([(0.0, 1, int(each.tokens)) for each in answers], CLASSIFIER_SHARE, 0)
    for answer, spec in zip(answers, specs, strict=True):
        said = _by_head(answer) if who == "head" else spec.predicted
        if said is not None:
            found[spec.output_tokens].append(said)
    return found


def play(
    rows: pd.DataFrame, instances: int, rate: float, admission: str, order: str, who: str, seed: int
) -> dict[str, float]:
    """Simulate one case; completion times in seconds, and how often a request was preempted."""
    engine = of_profile(EngineConfig(admission=admission, decode_order=order), profile(_PROFILE))
    engine = replace(engine, kv_blocks=engine.kv_blocks // 2)
    cluster = make_instances(4, instances, engine=engine)
    found = run(ClusterConfig(cluster, "split", seed), requests(rows, rate, who, seed))
    times = np.array([each.jct_s for each in found.served])
    p50, p99 = np.percentile(times, (50, 99))
    return {"jct_s": times.mean(), "p50_s": p50, "p99_s": p99, "preemptions": found.preemptions}


def main(words: list[str] | None = None) -> int:
    """Simulate everything; returns the exit status."""
    parser = argparse.ArgumentParser(prog="worth", description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(words)
    rows = pd.read_csv(options.rows).dropna()
    names = ("instances", "rate", "admission", "order", "predictor")
    cells = [
        {**dict(zip(names, case, strict=True)), "seed": seed, **play(rows, *case, seed)}
        for seed in range(options.seeds)
        for case in track(list(cases()), f"seed {seed}")
    ]
    pd.DataFrame(cells).round(3).to_csv(options.output, index=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
