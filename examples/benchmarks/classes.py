"""Five classes of requests on several systems: latencies, and goodput at two SLOs.

Stock vLLM first shows how long one request takes and how many of each class it completes when all
come at once: SLOs and rates are parts of that, measured in the same run. Then, in every repeat,
systems come in random order; each is started, warmed up, asked every class in random order, and
ended. Lengths and times of requests depend on class, rate and repeat, never on the system. Results
are lines of one file; an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil

from examples.benchmarks import client
from examples.benchmarks.client import Client, Reply, Request, Target
from examples.benchmarks.cluster import SYSTEMS, Site, add_site, conditions, parse, serving
from examples.benchmarks.figures import Results, figures, share_in_time, tpot_s

LIGHT_PROMPT, HEAVY_PROMPT = (16, 511), (512, 1536)  # tokens, log-uniform
LIGHT_OUTPUT, HEAVY_OUTPUT = (8, 127), (129, 512)  # tokens, uniform
PLAIN = {
    "lpld": (LIGHT_PROMPT, LIGHT_OUTPUT),
    "lphd": (LIGHT_PROMPT, HEAVY_OUTPUT),
    "hpld": (HEAVY_PROMPT, LIGHT_OUTPUT),
    "hphd": (HEAVY_PROMPT, HEAVY_OUTPUT),
}
CLASSES = (*PLAIN, "mixed")
RATES = {"light": 0.35, "knee": 0.7, "past": 1.1}  # parts of what stock can complete
LOOSE, STRICT = (10.0, 6.0), (4.0, 2.5)  # times the TTFT and TPOT of one request on idle stock
AT_ONCE, WARM_UP, LONE = 48, 16, 6
QUIET_S = 300.0
METRICS = [
    *("completed", "failed", "ttft_mean_ms", "ttft_p99_ms", "itl_p99_ms", "tpot_mean_ms"),
    *("jct_mean_ms", "goodput_loose_per_s", "goodput_strict_per_s", "busy_percent"),
]
REST_S = 1.0


def draw(name: str, rng: Random) -> tuple[int, int]:
    """Draw the lengths of prompt and output of one request of a class."""
    (least, most), output = PLAIN[rng.choice(list(PLAIN)) if name == "mixed" else name]
    return round(least * (most / least) ** rng.random()), rng.randint(*output)


def schedule(name: str, count: int, rate_per_s: float, seed: str) -> list[Request]:
    """Draw requests with Poisson arrivals; a rate of 0 makes all due at once."""
    rng, at_s, requests = Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate_per_s) if rate_per_s else 0.0
        prompt_tokens, output_tokens = draw(name, rng)
        requests.append(Request(at_s, client.random_prompt(prompt_tokens, rng), output_tokens))
    return requests


def measure_stock(asked: Client, target: Target, classes: Sequence[str], seed: int) -> Any:
    """Return the latencies of one request at a time, and requests per second by class."""
    requests = schedule("hphd", LONE, 0.0, f"{seed} lone")
    lone = [asked.play(target, [each])[0] for each in requests]
    capacities = {}
    for name in classes:
        replies = asked.play(target, schedule(name, AT_ONCE, 0.0, f"{seed} capacity {name}"))
        _require(replies, f"capacity of {name}")
        capacities[name] = round(AT_ONCE / max(each.jct_s for each in replies), 4)
    return {
        "ttft_s": round(median(each.ttft_s for each in lone), 5),
        "tpot_s": round(median(tpot_s(each) for each in lone), 6),
        "capacities": capacities,
    }


def measure_cell(
    asked: Client, target: Target, requests: Sequence[Request], stock: Mapping[str, Any]
) -> dict[str, Any]:
    """Play one schedule and return its figures and one short row per request."""
    time.sleep(REST_S)
    psutil.cpu_percent(None)  # starts the interval
    replies = asked.play(target, requests)
    busy = psutil.cpu_percent(None)
    took_s = max(each.at_s + reply.jct_s for each, reply in zip(requests, replies, strict=True))
    cell: dict[str, Any] = {"took_s": round(took_s, 4), "busy_percent": busy, **figures(replies)}
    for name, (ttft, tpot) in (("loose", LOOSE), ("strict", STRICT)):
        share = share_in_time(replies, ttft * stock["ttft_s"], tpot * stock["tpot_s"])
        cell[f"share_{name}"] = round(share, 4)
        cell[f"goodput_{name}_per_s"] = round(share * len(replies) / took_s, 4)
    cell["requests"] = [
        [round(request.at_s, 3), len(request.prompt), reply.num_tokens, reply.ttft_s, reply.jct_s]
        for request, reply in zip(requests, replies, strict=True)
    ]
    cell["errors"] = [each.error for each in replies if each.error][:3]
    return cell


def _require(replies: Sequence[Reply], title: str) -> None:
    errors = [each.error for each in replies if each.error and not each.is_refused]
    if errors:
        raise RuntimeError(f"{title}: {len(errors)} requests failed, the first with: {errors[0]}")


def measure_system(
    system: str, repeat: int, site: Site, options: argparse.Namespace, results: Results
) -> None:
    """Start one system and measure every cell of a repeat that is missing, in random order."""
    loads = [(name, rate) for name in options.classes for rate in options.rates]
    key = {"system": system, "repeat": repeat}
    left = [(n, r) for n, r in loads if not results.has(**key, name=n, rate=r)]
    if not left:
        return
    Random(f"{options.seed} {system} {repeat}").shuffle(left)
    stock = results.head["stock"]
    up = ["--max-queue-delay", "0"]  # like the other systems, ours lets queues grow
    if system == "adaptive-slo":
        up += ["--ttft-slo", f"{STRICT[0] * stock['ttft_s']:.4f}"]
        up += ["--tpot-slo", f"{STRICT[1] * stock['tpot_s']:.5f}"]
    with serving(system, site, up=up) as url, client.client(site.cores) as asked:
        target = Target(url, site.name, QUIET_S)
        warm = asked.play(target, schedule("mixed", WARM_UP, 0.0, f"{options.seed} warm-up"))
        _require(warm, f"warming up {system}")
        for name, rate in left:
            rate_per_s = RATES[rate] * stock["capacities"][name]
            seed = f"{options.seed} {name} {rate} {repeat}"
            requests = schedule(name, options.num_prompts, rate_per_s, seed)
            cell = measure_cell(asked, target, requests, stock)
            results.add(**key, name=name, rate=rate, rate_per_s=round(rate_per_s, 4), **cell)
            shown = {each: round(cell.get(each, 0)) for each in ("completed", "ttft_mean_ms")}
            print(f"repeat {repeat}, {system}, {name} {rate}: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_site(parser)
    names = ("classes", CLASSES, CLASSES), ("rates", RATES, ["knee"]), ("systems", SYSTEMS, None)
    for name, known, default in names:
        parser.add_argument(
            f"--{name}",
            type=lambda text: text.split(","),
            default=list(default or ("stock", "stock-256", "split", "adaptive")),
            help=f"NAME,NAME of {', '.join(known)}",
        )
    parser.add_argument("--num-prompts", type=int, default=48, help="requests in a cell; 48")
    parser.add_argument("--repeats", type=int, default=3, help="with other requests each; 3")
    parser.add_argument("--output", type=Path, default=Path("classes.jsonl"), help="result file")
    options, site = parse(parser)
    head = {
        "by": ["name", "rate", "system"],
        "metrics": METRICS,
        "conditions": conditions(site, num_prompts=options.num_prompts),
    }
    results = Results(options.output, head)
    known = results.head.get("stock", {}).get("capacities", {})
    if not set(options.classes) <= set(known):
        with serving("stock", site) as url, client.client(site.cores) as asked:
            target = Target(url, site.name, QUIET_S)
            _require(asked.play(target, schedule("mixed", WARM_UP, 0.0, "warm")), "warming up")
            results.head["stock"] = measure_stock(asked, target, options.classes, options.seed)
        results.rewrite()
    for repeat in range(options.repeats):
        order = list(options.systems)
        Random(f"{options.seed} {repeat}").shuffle(order)
        for system in order:
            measure_system(system, repeat, site, options, results)


if __name__ == "__main__":
    main()
