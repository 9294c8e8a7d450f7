"""Servers with different options under the same requests: one script for what differs in options.

    order         order of waiting prompts (paper, Figure 16): mean TTFT of a full queue
    saturation    prompt tokens per second by tokens of a step
    interference  prompts and decodes in one batch (paper, Figures 3 to 5), with enough and with too
                  little KV memory: see interference.py
    tbt           a bound on the time between tokens, against fixed token budgets
    chunks        prompt tokens of a prefill step, split
    loads         KV that may be loaded within a decode step, split
    predictor     what predicting output lengths costs: not at all, by hidden states, by a folder's
                  predictor while a prompt is computed (parallel) or before (sequential)
    admission     decode admission with little KV memory (paper, Figure 18), on modelled step times
    dispatch      choice among four decode instances (paper, Figure 19), on modelled step times

With `--rows`, what `examples.predictor.head evaluate` wrote, admission and dispatch compare
predictors on outputs as long as those: none (stock's admission), `histogram`, what the head said of
them, a classifier as in `examples.predictor.worth`, and the true length.

Systems are started one after the other, in an order that is random in every repeat. What is at
once due waits in a queue, so the last two say how long all of it takes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd

from examples.benchmarks import client, interference, pace
from examples.benchmarks.client import Client, Request, Target, random_prompt
from examples.benchmarks.cluster import (
    Site,
    System,
    add_site,
    conditions,
    get_json,
    metric,
    our_cluster,
    parse,
    stock,
)
from examples.benchmarks.figures import Results, figures
from examples.predictor import replay
from examples.predictor.worth import said_by

POLICIES = ("fcfs 16", "sjf 16", "sjf 128", "ljf 16", "srtf 16", "srtf 128", "mlfq 16")
WHOLE = ("--mode", "whole", "--both", "1")
LATENCIES = ["itl_p99_ms", "ttft_mean_ms", "tpot_mean_ms", "jct_mean_ms"]
PREDICTORS = ("histogram", "head", "parallel", "sequential")


@dataclass(frozen=True, slots=True)
class Variant:
    """Options of one server; without options of `up` it is stock vLLM.

    Attributes:
        only: How the names of the loads that it gets begin.
    """

    serve: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    only: str = ""


Loads = Callable[[argparse.Namespace, Random], dict[str, list[Request]]]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Named variants, and the requests that each gets, by name.

    Attributes:
        in_rounds: Loads are played `--rounds` times, in random order, and compared in each round.
    """

    variants: dict[str, Variant]
    loads: Loads
    is_paced: bool = False
    in_rounds: bool = False
    metrics: list[str] = field(default_factory=lambda: ["ttft_mean_ms", "jct_mean_ms", "total_s"])


def heavy_tailed(rng: Random, median: float, sigma: float, most: int) -> int:
    """Draw a length like those of ShareGPT: most are short, a few are very long."""
    return min(max(round(rng.lognormvariate(math.log(median), sigma)), 1), most)


def prompts(output_tokens: int) -> Loads:
    """Make a queue of prompts that are all due at once."""

    def draw(options: argparse.Namespace, rng: Random) -> dict[str, list[Request]]:
        lengths = [heavy_tailed(rng, 200, 1.2, 2000) for _ in range(options.num_prompts)]
        return {"queue": [Request(0.0, random_prompt(n, rng), output_tokens) for n in lengths]}

    return draw


def equal_prompts(options: argparse.Namespace, rng: Random) -> dict[str, list[Request]]:
    """Make prompts of 512 tokens, so that tokens per second do not depend on lengths."""
    return {"512": [Request(0.0, random_prompt(512, rng), 1) for _ in range(options.num_prompts)]}


def beside_others(options: argparse.Namespace, rng: Random) -> dict[str, list[Request]]:
    """Make prompts and decodes beside others (Figures 3 to 5)."""
    return interference.loads(rng, options.batches)


def mixed_stream(options: argparse.Namespace, rng: Random) -> dict[str, list[Request]]:
    """Make Poisson arrivals of prompts of 100 to 1,000 tokens with 32 to 128 output tokens."""
    at_s, requests = 0.0, []
    for _ in range(options.num_prompts):
        at_s += rng.expovariate(options.request_rate)
        length = round(100 * 10 ** rng.random())
        requests.append(Request(at_s, random_prompt(length, rng), rng.randint(32, 128)))
    return {f"{options.request_rate:g}/s": requests}


def at_once(options: argparse.Namespace, rng: Random) -> dict[str, list[Request]]:
    """Make requests of very different lengths, all due at once; with `--rows`, outputs are as long
    as those there."""
    draw: Callable[[], float] = partial(heavy_tailed, rng, 180, 0.9, 1000)
    if options.rows:
        tokens = _rows(options.rows)["tokens"].tolist()
        draw = iter(rng.choices(tokens, k=options.num_prompts)).__next__
    lengths = [
        (heavy_tailed(rng, 100, 1.1, 1500), max(2, int(draw()))) for _ in range(options.num_prompts)
    ]
    return {"at once": [Request(0.0, random_prompt(p, rng), out) for p, out in lengths]}


def _rows(path: Path) -> pd.DataFrame:
    return pd.read_csv(path).dropna()


def by_predictor(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Return options of instances by predictor, having written those that only repeat."""
    known = "--tetri-predictor"
    found: dict[str, tuple[str, ...]] = {each: (known, each) for each in ("histogram", "oracle")}
    rows = _rows(options.rows)
    for who in ("head", "classifier"):
        folder = options.folder.resolve() / who
        replay.write(folder, said_by(who, rows))
        found[who] = (known, str(folder))
    return found


def _order(policy: str) -> Variant:
    name, _, batch = policy.partition(" ")
    return Variant(("--tetri-prefill-policy", name, "--tetri-sched-batch", batch), WHOLE)


def _budget(tokens: int) -> Variant:
    return Variant(("--max-num-batched-tokens", str(tokens)))


def _at_least(tokens: int) -> tuple[str, ...]:
    """Let a step have so many tokens."""
    return ("--max-num-batched-tokens", str(max(tokens, 2048)))


def _split(decodes: int, *serve: str) -> Variant:
    up = ("--mode", "split", "--prefill", "1", "--decode", str(decodes), "--flip", "off")
    return Variant(serve, up)


def experiments(options: argparse.Namespace) -> dict[str, Experiment]:
    """Return every experiment by name."""
    known = "--tetri-predictor"
    oracle = (known, options.predictor or "oracle")
    budgets = {f"stock {tokens}": _budget(tokens) for tokens in (32, 64, 128, 256, 512, 1024)}
    two = {"stock": Variant(), "stock 256": _budget(256)}
    little = ("--num-gpu-blocks-override", str(interference.LITTLE_KV * max(options.batches)))
    by = by_predictor(options) if options.rows else {"": oracle}
    beside = two | {"ours": Variant((), WHOLE), "little KV": Variant(little, only="5")}
    blocks = ("--block-size", str(interference.BLOCK_TOKENS))
    return {
        "order": Experiment(two | {each: _order(each) for each in POLICIES}, prompts(1)),
        "saturation": Experiment(budgets, equal_prompts, metrics=["prompt_tokens_per_s"]),
        "interference": Experiment(
            {name: replace(each, serve=(*each.serve, *blocks)) for name, each in beside.items()},
            beside_others,
            in_rounds=True,
            metrics=interference.METRICS,
        ),
        "tbt": Experiment(
            two
            | {f"tbt {slo}": Variant(("--tetri-tbt-slo", str(slo)), WHOLE) for slo in (0.15, 0.25)},
            mixed_stream,
            metrics=LATENCIES,
        ),
        "chunks": Experiment(
            {
                f"chunk {tokens}": _split(1, "--tetri-chunk-size", str(tokens), *_at_least(tokens))
                for tokens in (512, 1024, 2048, 4096, 8192)
            },
            mixed_stream,
            metrics=LATENCIES,
        ),
        "loads": Experiment(
            {
                f"load {size}": _split(1, "--tetri-load-budget-bytes", size)
                for size in ("1", "1M", "16M", "64M")
            },
            mixed_stream,
            metrics=LATENCIES,
        ),
        "predictor": Experiment(
            {
                mode: _split(1, known, mode)
                if mode in PREDICTORS[:2]
                else _split(1, *oracle, "--tetri-predictor-mode", mode)
                for mode in PREDICTORS
            },
            prompts(2),
        ),
        "admission": Experiment(
            {
                f"{name} {who}".strip(): _split(1, "--tetri-decode-policy", name, *chosen)
                for who, chosen in by.items()
                for name in ("greedy", "reserve-static", "reserve-dynamic")
            },
            at_once,
            is_paced=True,
            metrics=["jct_mean_ms", "total_s", "preemptions", "late_ms"],
        ),
        "dispatch": Experiment(
            {
                f"{name} {who}".strip(): _split(4, "--tetri-dispatch-policy", name, *chosen)
                for who, chosen in by.items()
                for name in options.dispatch.split(",")
            },
            at_once,
            is_paced=True,
            metrics=["total_s", "jct_mean_ms", "preemptions", "late_ms"],
        ),
    }


def measure(
    asked: Client,
    target: Target,
    late: Path | None,
    scale: float,
    requests: Sequence[Request],
    watched: str = "",
) -> dict[str, Any]:
    """Play one load; times of paced engines are those of the modelled device.

    Args:
        watched: Name of a load of interference; others have none.
    """
    before = preemptions(target.url)
    replies = asked.play(target, requests)
    errors = [each.error for each in replies if each.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed, the first with: {errors[0]}")
    took_s = max(each.due_s + each.jct_s for each in replies)
    cell = {name: value / scale for name, value in figures(replies).items() if "_ms" in name}
    return {
        **cell,
        "total_s": took_s / scale,
        "prompt_tokens_per_s": sum(len(each.prompt) for each in requests) / took_s,
        "probe_ttft_ms": 1e3 * replies[0].ttft_s,
        "preemptions": preemptions(target.url) - before,
        **({"late_ms": 1e3 * pace.worst_s(late) / scale} if late else {}),
        **(interference.figures_of(watched, requests, replies) if watched else {}),
    }


def preemptions(url: str) -> int:
    """Return how often instances have preempted a request."""
    if rows := get_json(f"{url}/tetri/v1/instances").get("instances", ()):
        return sum(row["preemptions"] for row in rows)
    return int(metric(url, "vllm:num_preemptions_total"))


def run_variant(
    name: str, experiment: Experiment, site: Site, options: argparse.Namespace, repeat: int
) -> Iterator[dict[str, Any]]:
    """Start one server and yield a cell per load, and per round."""
    variant, late, scale = experiment.variants[name], None, 1.0
    if experiment.is_paced:
        late, scale = site.folder / "late", options.scale
        device = pace.Pace(str(late), scale)
        site = pace.on_device(site, device, options.kv_tokens, is_ours=True, serve=pace.NO_STREAM)
    system = System(1, variant.serve)
    up = [*variant.up]
    if experiment.is_paced:
        up += ["--placement", "shared-cores"]
    label = name.replace(" ", "-")
    started = (
        our_cluster(site, up, label, system)
        if variant.up
        else stock(site, label, system, site.cores)
    )
    key = {"system": name, "repeat": repeat}
    with started as found, client.client(site.cores) as asked:
        url = found if isinstance(found, str) else str(found["url"])
        play = partial(measure, asked, Target(url, site.name), late, scale)
        if experiment.in_rounds:
            yield from play_rounds(play, experiment, options, variant.only, key)
            return
        warm_up = experiment.loads(options, Random(f"{options.seed} {repeat} warm-up"))
        play(next(iter(warm_up.values()))[:8])  # prompts that no cache finds again
        loads = experiment.loads(options, Random(f"{options.seed} {repeat}"))
        for load, requests in loads.items():
            yield shown({"load": load, **key, **play(requests)})


def play_rounds(
    play: Callable[..., dict[str, Any]],
    experiment: Experiment,
    options: argparse.Namespace,
    only: str,
    key: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Play the loads that were asked for, in random order in every round, and compare them."""
    chosen = tuple(options.loads.split(","))
    for turn in range(-1, options.rounds):
        rng = Random(f"{options.seed} {key['repeat']} {turn}")
        loads = experiment.loads(options, rng)
        if turn < 0:
            play(loads[interference.WARM_UP])
            continue
        names = [each for each in loads if each.startswith(only) and each.startswith(chosen)]
        cells = {
            load: shown({"load": load, **key, "round": turn, **play(loads[load], load)})
            for load in rng.sample(names, len(names))
        }
        yield from interference.compare([cells[load] for load in names])


def shown(cell: dict[str, Any]) -> dict[str, Any]:
    """Print a cell and return it."""
    print({key: str(value)[:40] for key, value in cell.items()}, flush=True)
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", help="one of the above")
    add_site(parser)
    parser.add_argument("--num-prompts", type=int, default=128, help="requests of a load; 128")
    parser.add_argument("--request-rate", type=float, default=2.0, help="of tbt, per second; 2")
    parser.add_argument("--repeats", type=int, default=3, help="with other requests each; 3")
    parser.add_argument("--systems", help="NAME,NAME of the experiment; all")
    parser.add_argument("--predictor", help="folder of a trained predictor; oracle")
    parser.add_argument("--rows", type=Path, help="of `head evaluate`: compare predictors, too")
    parser.add_argument("--dispatch", default="power-of-two,power-of-two-ratio", help="policies")
    parser.add_argument("--kv-tokens", type=int, default=8192, help="KV memory, if paced; 8192")
    parser.add_argument("--scale", type=float, default=0.25, help="of modelled step times; 0.25")
    beside = "of interference: "
    parser.add_argument("--rounds", type=int, default=3, help=f"{beside}per server; 3")
    parser.add_argument("--loads", default="", help=f"{beside}3b,4a: those that begin so; all")
    parser.add_argument(
        "--batches",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[16, 64, 128],
        help=f"{beside}of figure 5; 16,64,128",
    )
    parser.add_argument("--output", type=Path, help="result file; EXPERIMENT.jsonl")
    options, site = parse(parser)
    experiment = experiments(options)[options.experiment]
    output = options.output or Path(f"{options.experiment}.jsonl")
    given = conditions(site, experiment=options.experiment, n=options.num_prompts)
    results = Results.of(output, ["load", "system"], experiment.metrics, given)
    names = options.systems.split(",") if options.systems else list(experiment.variants)
    for repeat in range(options.repeats):
        for name in Random(f"{options.seed} {repeat}").sample(names, len(names)):
            if not results.has(system=name, repeat=repeat):
                for cell in run_variant(name, experiment, site, options, repeat):
                    results.add(**cell)


if __name__ == "__main__":
    main()
