"""Whether `vllm-tetri regret` tells the truth: every mode measured, and simulated from one.

One cluster serves the same lengths and arrivals in every mode, with other tokens so that no prefix
cache helps the later ones. After each the router's history is simulated in all modes. A row has
what a mode cost as measured, what the simulation from the adaptive run said that it would cost,
and the regret against the best mode of both kinds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from examples.benchmarks import client
from examples.benchmarks.classes import CLASSES, schedule, warm_up
from examples.benchmarks.client import Client, Target, random_prompt
from examples.benchmarks.cluster import (
    SYSTEMS,
    add_site,
    conditions,
    get_json,
    parse,
    post_json,
    serving,
)
from examples.benchmarks.figures import Results
from vllm_tetri.regret import Figures, compare, cost, verdict

MODES = ("adaptive", "whole", "split")
METRICS = [
    *("ttft_mean_ms", "jct_mean_ms", "simulated_ttft_mean_ms", "simulated_jct_mean_ms"),
    *("regret_percent", "simulated_regret_percent"),
]


def measure(
    asked: Client, target: Target, name: str, options: argparse.Namespace, results: Results
) -> None:
    """Play one class in every mode."""
    found, simulated = dict[str, Figures](), dict[str, Any]()
    for number, mode in enumerate(MODES):
        post_json(f"{target.url}/tetri/v1/mode", {"mode": mode})
        rng = Random(f"{options.seed} {name} {mode}")
        requests = [
            replace(each, prompt=random_prompt(len(each.prompt), rng))
            for each in schedule(name, options.num_prompts, options.rate, f"{options.seed} {name}")
        ]
        replies = asked.play(target, requests)
        if errors := [each.error for each in replies if each.error]:
            raise RuntimeError(f"{name}, {mode}: {len(errors)} failed, the first with: {errors[0]}")
        found[mode] = {
            "ttft_mean_s": fmean(each.ttft_s for each in replies),
            "jct_mean_s": fmean(each.jct_s for each in replies),
        }
        if number == 0:
            history = get_json(f"{target.url}/tetri/v1/history")
            history["requests"] = history["requests"][-options.num_prompts :]
            shown = compare(history)
            print(name, verdict(shown), sep="\n", flush=True)
            simulated = {row["system"]: row for row in shown["systems"]}
    for mode in MODES:
        both = found, simulated
        regrets = [
            100 * (cost(each[mode]) / min(cost(each[one]) for one in MODES) - 1) for each in both
        ]
        times_ms = [
            round(1e3 * each[mode][name], 2)
            for each in both
            for name in ("ttft_mean_s", "jct_mean_s")
        ]
        figures = [*times_ms, *(round(each, 2) for each in regrets)]
        results.add(name=name, mode=mode, **dict(zip(METRICS, figures, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_site(parser)
    known = ", ".join(CLASSES)
    parser.add_argument("--classes", nargs="+", default=list(CLASSES), choices=CLASSES, help=known)
    parser.add_argument("--system", default="adaptive-1p1d", choices=SYSTEMS, help="the instances")
    parser.add_argument("--num-prompts", type=int, default=48, help="requests in a cell; 48")
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second; 0.5")
    parser.add_argument("--output", type=Path, default=Path("regret.jsonl"), help="result file")
    options, site = parse(parser)
    chosen = {name: getattr(options, name) for name in ("num_prompts", "rate", "system")}
    results = Results.of(options.output, ["name", "mode"], METRICS, conditions(site, **chosen))
    with serving(options.system, site) as url, client.client(site.cores) as asked:
        target = Target(url, site.name)
        warm_up(partial(asked.play, target), options.system, options)
        for name in options.classes:
            measure(asked, target, name, options, results)
    results.rewrite()


if __name__ == "__main__":
    main()
