"""`vllm-tetri bench budget`: a step budget from an SLO beside fixed ones (Sarathi-Serve).

One `vllm serve` after the other gets the same requests at the same times from
`vllm bench serve`: stock vLLM with its default token budget, with smaller ones,
and ours with `--role both --tetri-tbt-slo`. Everything else is the same for all:
executor, cores, threads, KV memory, requests at a time, type, prefix cache.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_tetri.bench import picture, setting
from vllm_tetri.bench.serving import Answered, Load, Server, send, write_prompts
from vllm_tetri.bench.stats import estimate, quantile
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.machine import vllm_version
from vllm_tetri.policy.order import PrefillPolicy

_MS = 1e3
# Figures of one run: title, factor to its unit, digits.
FIGURES = {
    "ttft_mean_s": ("TTFT mean (ms)", _MS, 0),
    "ttft_p99_s": ("TTFT p99 (ms)", _MS, 0),
    "itl_p50_s": ("ITL p50 (ms)", _MS, 0),
    "itl_p99_s": ("ITL p99 (ms)", _MS, 0),
    "over_slo": ("ITL over SLO (%)", 100.0, 1),
    "jct_mean_s": ("JCT mean (ms)", _MS, 0),
    "output_tokens_per_s": ("output (tok/s)", 1.0, 1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or name of a model with a tokenizer")
    add(
        "--slo",
        type=float,
        default=0.15,
        metavar="S",
        help="longest time between two tokens to aim at, in seconds (0.15)",
    )
    add(
        "--rates",
        type=setting.decimals,
        default=[1.5],
        metavar="F,F",
        help="requests a second (1.5)",
    )
    add("--requests", type=int, default=48, metavar="N", help="requests of a run (48)")
    add(
        "--prompt",
        type=setting.numbers,
        default=[64, 1500],
        metavar="N,N",
        help="least and most words of a prompt, log-uniform (64,1500)",
    )
    add(
        "--answer",
        type=setting.numbers,
        default=[32, 128],
        metavar="N,N",
        help="least and most tokens of an answer, uniform (32,128)",
    )
    add(
        "--budgets",
        type=setting.numbers,
        default=[512, 256, 128],
        metavar="N,N",
        help="token budgets of stock vLLM besides its default (512,256,128)",
    )
    add(
        "--policies",
        type=lambda text: text.split(","),
        default=["sjf"],
        metavar="NAME,NAME",
        help="orders of prompts for ours (sjf)",
    )
    add("--max-num-seqs", type=int, default=64, metavar="N", help="requests at a time (64)")
    add(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="repeats; systems take turns in each, in random order (1)",
    )
    setting.add_place(parser, "budget", cores=1)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write budget.json and budget.svg."""
    setting.check(options, requests=2, slo=1e-3, rates=1e-3, prompt=1, answer=2, budgets=1)
    _check(options)
    console = setting.console()
    results: dict[str, Any] = {"conditions": _conditions(options), "runs": []}
    systems = systems_of(options)
    with Progress(console=console) as progress:
        turns = options.repeats * len(systems)
        task = progress.add_task("serving", total=turns * len(options.rates))
        for repeat in range(options.repeats):
            rng = Random(f"{options.seed}-{repeat}")
            # New ones for every rate: what an instance has seen, its prefix cache would hold.
            loads = [_load(options, number, rate, rng) for number, rate in enumerate(options.rates)]
            for name in rng.sample(list(systems), len(systems)):
                progress.update(task, description=name)
                for found in _serve(options, systems[name], loads):
                    results["runs"].append({"system": name, "repeat": repeat, **found})
                    setting.write_json(options.output / "budget.json", results)
                    progress.advance(task)
    show(console, results)
    draw(results, options.output / "budget.svg")
    console.print(f"written: {options.output}/budget.json, budget.svg")
    return 0


def systems_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """What tells the systems apart: options of `vllm serve`, by name."""
    stock = {"stock default": list[str]()}
    for budget in options.budgets:
        stock[f"stock {budget}"] = ["--max-num-batched-tokens", str(budget)]
    ours = ["--role", "both", "--tetri-tbt-slo", str(options.slo), "--tetri-arena-bytes", "16M"]
    return stock | {
        f"ours {policy}": [*ours, "--tetri-prefill-policy", policy] for policy in options.policies
    }


def figures(answered: Answered, slo_s: float) -> dict[str, float]:
    """One number per entry of `FIGURES`. JCT is from sending to the last token."""
    gaps = [gap for request in answered.itl_s for gap in request]
    jcts = [ttft + sum(itl) for ttft, itl in zip(answered.ttft_s, answered.itl_s, strict=True)]
    return {
        "ttft_mean_s": fmean(answered.ttft_s),
        "ttft_p99_s": quantile(answered.ttft_s, 0.99),
        "itl_p50_s": quantile(gaps, 0.5),
        "itl_p99_s": quantile(gaps, 0.99),
        "over_slo": fmean(gap > slo_s for gap in gaps),
        "jct_mean_s": fmean(jcts),
        "output_tokens_per_s": sum(answered.output_tokens) / answered.took_s,
    }


def _check(options: argparse.Namespace) -> None:
    setting.names(",".join(options.policies), "--policies", list(PrefillPolicy))
    for name in ("prompt", "answer"):
        value = getattr(options, name)
        if len(value) != 2 or value[0] > value[1]:
            raise ConfigError(f"--{name}: write the least and the most, such as 32,128")
    if any(budget < options.max_num_seqs for budget in options.budgets):
        raise ConfigError(
            f"--budgets: vLLM wants at least --max-num-seqs ({options.max_num_seqs}) tokens a step"
        )


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    names = ("slo", "rates", "requests", "prompt", "answer", "max_num_seqs", "repeats")
    return {
        **{name: getattr(options, name) for name in names},
        "model": setting.model_name(options),
        "seed": options.seed,
        "cores": options.cores,
        "device": setting.device(),
        "vllm": vllm_version(),
        "options": options.tail,
    }


def _load(options: argparse.Namespace, number: int, rate: float, rng: Random) -> Load:
    prompts = options.output / f"prompts-{number}.jsonl"
    write_prompts(prompts, options.requests, options.prompt, options.answer, rng)
    return Load(prompts, options.requests, rate, rng.getrandbits(30))


def _serve(
    options: argparse.Namespace, extra: Sequence[str], loads: Sequence[Load]
) -> Iterator[dict[str, Any]]:
    """One instance from start to end, every load on it."""
    cores = setting.cores(options)
    others = [core for core in sorted(os.sched_getaffinity(0)) if core not in cores]
    serve = [*setting.serve_options(options.model, options.max_num_seqs), *options.tail, *extra]
    with Server(serve, cores, options.output / "server.log") as server:
        for load in loads:
            answered = send(server, options.model, load, others or cores, options.output)
            found = {"rate": load.rate, "figures": figures(answered, options.slo)}
            yield {**found, "answered": asdict(answered)}


def _runs(results: Mapping[str, Any]) -> dict[tuple[float, str], list[dict[str, float]]]:
    found: dict[tuple[float, str], list[dict[str, float]]] = {}
    for run in results["runs"]:
        found.setdefault((run["rate"], run["system"]), []).append(run["figures"])
    return dict(sorted(found.items(), key=lambda item: (item[0][0], _rank(item[0][1]))))


def _rank(system: str) -> tuple[bool, bool, int]:
    """Stock first, its default before its budgets, large ones first."""
    number = system.rpartition(" ")[2]
    is_number = number.isdecimal()
    return (not system.startswith("stock"), is_number, -int(number) if is_number else 0)


def show(console: Console, results: Mapping[str, Any]) -> None:
    """Print one table per rate."""
    conditions, runs = results["conditions"], _runs(results)
    console.print(
        f"{conditions['device']}, {conditions['cores']} core(s), vLLM {conditions['vllm']}, "
        f"{conditions['model']}, SLO {conditions['slo'] * _MS:.0f} ms, {conditions['requests']} "
        f"requests of {_range(conditions['prompt'])} words and {_range(conditions['answer'])} "
        f"tokens of answer, {conditions['repeats']} repeats"
    )
    for rate in sorted({rate for rate, _ in runs}):
        heads = [title for title, *_ in FIGURES.values()]
        table = Table("system", *heads, title=f"{rate:g} requests a second")
        for (at, system), found in runs.items():
            if at == rate:
                cells = (
                    estimate([each[key] for each in found]).text(factor, digits)
                    for key, (_, factor, digits) in FIGURES.items()
                )
                table.add_row(system, *cells)
        console.print(table)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Mean TTFT against ITL p99: a budget is a choice between the two."""
    runs = _runs(results)
    rates = sorted({rate for rate, _ in runs})
    slo_s = results["conditions"]["slo"]
    figure, axes = picture.new("Step budgets: time to first token against stalls", len(rates))
    for axis, rate in zip(axes, rates, strict=True):
        for (at, system), found in runs.items():
            if at != rate:
                continue
            across = estimate([each["itl_p99_s"] for each in found]).mean * _MS
            up = estimate([each["ttft_mean_s"] for each in found]).mean * _MS
            marker = "o" if system.startswith("stock") else "D"
            axis.plot([across], [up], marker=marker, linestyle="")
            axis.annotate(system, (across, up), xytext=(5, 4), textcoords="offset points")
        axis.axvline(slo_s * _MS, color="#7a7a7a", linestyle="--", linewidth=1)
        axis.set_title(f"{rate:g} requests/s (dashed: the SLO)")
        axis.set_xlabel("ITL p99 (ms)")
        axis.set_ylabel("mean TTFT (ms)")
        axis.margins(0.2)  # room for the names
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    picture.save(figure, path)


def _range(pair: Sequence[int]) -> str:
    return f"{pair[0]} to {pair[1]}"
