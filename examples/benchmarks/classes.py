"""Five classes of requests on several systems: latencies, and requests in time at two SLOs.

Stock vLLM first shows how long one request takes, and how many of each class a second it serves
when all come at once: SLOs and rates are parts of that, measured in the same run. So what is in
time is a number per second at fixed rates; goodput would be the highest rate that keeps SLOs. Then,
in every repeat, systems come in random order; each is started, warmed up, asked every class in
random order, and ended. Lengths and times of requests depend on class, rate and repeat, never on
the system. Results are lines of one file; an interrupted run goes on where it stopped.

Lengths are drawn from the simulator's ranges, tokens at random. With `--sharegpt FILE` requests are
pairs of that data set: five classes by the paper's thresholds. With `--profile NAME` every engine
keeps the pace of a device that the simulator knows (`pace`), and all times are that device's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil

from examples.benchmarks import client, pace, sharegpt
from examples.benchmarks.client import Client, Reply, Request, Target
from examples.benchmarks.cluster import (
    SYSTEMS,
    WINDOW_TOKENS,
    Site,
    add_site,
    conditions,
    parse,
    post_json,
    serving,
)
from examples.benchmarks.figures import Results, figures, share_in_time, tpot_s
from examples.benchmarks.pace import Play
from vllm_tetri.sim import workload

PLAIN, CLASSES = workload.CLASSES, workload.KINDS
RATES = {"light": 0.35, "knee": 0.7, "past": 1.1}  # parts of stock's rate when all come at once
LOOSE, STRICT = (10.0, 6.0), (4.0, 2.5)  # times the TTFT and TPOT of one request on idle stock
AT_ONCE, WARM_UP, LONE = 48, 16, 6
METRICS = [
    *("completed", "failed", "ttft_mean_ms", "ttft_p99_ms", "itl_p99_ms", "tpot_mean_ms"),
    *(
        "jct_mean_ms",
        "in_time_loose_per_s",
        "in_time_strict_per_s",
        "split_percent",
        "others_percent",
    ),
]
REST_S = 1.0
ROLES = ("prefill", "decode")


Draw = Callable[[str, Random], tuple[list[int], int]]
"""Token ids of a prompt and the number of output tokens of one request of a class."""


def draw(name: str, rng: Random) -> tuple[list[int], int]:
    """Draw lengths from the ranges of a class (of prompts log-uniform), and tokens at random."""
    (least, most), output = PLAIN[rng.choice(list(PLAIN)) if name == "mixed" else name]
    prompt_tokens = round(least * (most / least) ** rng.random())
    output_tokens = rng.randint(*output)
    return client.random_prompt(prompt_tokens, rng), output_tokens


def schedule(
    name: str, count: int, rate_per_s: float, seed: str, draw: Draw = draw
) -> list[Request]:
    """Draw requests with Poisson arrivals; a rate of 0 makes all due at once."""
    rng, at_s, requests = Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate_per_s) if rate_per_s else 0.0
        requests.append(Request(at_s, *draw(name, rng)))
    return requests


def measure_stock(play: Play, options: argparse.Namespace) -> Any:
    """Return the latencies of one request at a time, and requests per second of each class when
    all come at once."""
    seed = options.seed
    requests = schedule("hphd", options.lone, 0.0, f"{seed} lone", options.draw)
    lone = [play([each])[0] for each in requests]
    at_once = {}
    for name in options.classes:
        requests = schedule(name, options.at_once, 0.0, f"{seed} at once {name}", options.draw)
        replies = play(requests)
        _require(replies, f"all {name} at once")
        at_once[name] = round(options.at_once / max(each.jct_s for each in replies), 4)
    return {
        "ttft_s": round(median(each.ttft_s for each in lone), 5),
        "tpot_s": round(median(tpot_s(each) for each in lone), 6),
        "at_once_per_s": at_once,
    }


def measure_cell(
    play: Play, requests: Sequence[Request], stock: Mapping[str, Any]
) -> dict[str, Any]:
    """Play one schedule and return its figures and one short row per request."""
    time.sleep(REST_S)
    psutil.cpu_percent(None)  # starts the interval
    begun_s, own_s = time.monotonic(), _own_cpu_s()
    replies = play(requests)
    busy, seconds = psutil.cpu_percent(None), time.monotonic() - begun_s
    own = 100 * (_own_cpu_s() - own_s) / seconds / (psutil.cpu_count() or 1)
    split = [len({each.headers.get(f"x-tetri-{role}") for role in ROLES}) > 1 for each in replies]
    took_s = max(each.at_s + reply.jct_s for each, reply in zip(requests, replies, strict=True))
    cell: dict[str, Any] = {"took_s": round(took_s, 4), **figures(replies)}
    cell |= {"split_percent": 100 * sum(split) / len(split), "others_percent": round(busy - own, 1)}
    for name, (ttft, tpot) in (("loose", LOOSE), ("strict", STRICT)):
        share = share_in_time(replies, ttft * stock["ttft_s"], tpot * stock["tpot_s"])
        cell[f"share_{name}"] = round(share, 4)
        cell[f"in_time_{name}_per_s"] = round(share * len(replies) / took_s, 4)
    cell["requests"] = [
        [round(at.at_s, 3), len(at.prompt), reply.num_tokens, reply.ttft_s, reply.jct_s, is_split]
        for at, reply, is_split in zip(requests, replies, split, strict=True)
    ]
    cell["errors"] = [each.error for each in replies if each.error][:3]
    return cell


def _own_cpu_s() -> float:
    """CPU time of this process and of all that it started; the rest of the machine is others'."""
    own, seconds = psutil.Process(), 0.0
    for each in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(each.cpu_times()[:2])
    return seconds


def _require(replies: Sequence[Reply], title: str) -> None:
    errors = [each.error for each in replies if each.error and not each.is_refused]
    if errors:
        raise RuntimeError(f"{title}: {len(errors)} requests failed, the first with: {errors[0]}")


def measure_load(
    play: Play, site: Site, key: Mapping[str, Any], options: argparse.Namespace, results: Results
) -> None:
    """Measure the cell of this system, repeat, name and rate, unless it is there."""
    if results.has(**key):
        return
    name, rate, stock = key["name"], key["rate"], results.head["stock"]
    rate_per_s = RATES[rate] * stock["at_once_per_s"][name] * options.devices
    seed = f"{options.seed} {name} {rate} {key['repeat']}"
    requests = schedule(name, options.num_prompts, rate_per_s, seed, options.draw)
    options.device.lateness(site)  # of what came before
    cell = measure_cell(play, requests, stock) | options.device.lateness(site)
    results.add(**key, rate_per_s=round(rate_per_s, 4), **cell)
    shown = {each: round(cell.get(each, 0)) for each in ("completed", "ttft_mean_ms")}
    print(f"repeat {key['repeat']}, {key['system']}, {name} {rate}: {shown}", flush=True)


def warm_up(play: Play, name: str, options: argparse.Namespace) -> None:
    """Ask for a few requests of all kinds that do not count."""
    requests = schedule("mixed", WARM_UP, 0.0, f"{options.seed} warm-up")
    _require(play(requests), f"warming up {name}")


def measure_system(
    system: str, repeat: int, site: Site, options: argparse.Namespace, results: Results
) -> None:
    """Start one system and measure every cell of a repeat that is missing, in random order."""
    loads = [{"name": name, "rate": rate} for name in options.classes for rate in options.rates]
    key = {"system": system, "repeat": repeat}
    left = [each for each in loads if not results.has(**key, **each)]
    if not left:
        return
    Random(f"{options.seed} {system} {repeat}").shuffle(left)
    site = options.device.on(site, SYSTEMS[system])
    with serving(system, site, up=options.up) as url, client.client(site.cores) as asked:
        play = player(asked, url, site, options)
        warm_up(play, system, options)
        for each in left:
            measure_load(play, site, {**key, **each}, options, results)


def player(asked: Client, url: str, site: Site, options: argparse.Namespace) -> Play:
    """Return what plays schedules on a system that serves at `url`, on its devices' clock."""
    device: pace.Device = options.device
    return device.in_its_time(partial(asked.play, Target(url, site.name)))


def measure_in_turns(site: Site, options: argparse.Namespace, results: Results) -> None:
    """Start all systems at once and let them take turns in random order, cell by cell, so that
    what else the machine does meets all alike. Systems that only differ in the mode of the router
    share their instances."""
    with ExitStack() as stack, client.client(site.cores) as asked:
        players: dict[tuple[str, ...], tuple[str, Play]] = {}
        systems = {name: SYSTEMS[name] for name in options.systems}
        layouts = {name: (*each.up[2:], *each.serve) or (name,) for name, each in systems.items()}
        for name, layout in layouts.items():
            if layout not in players:
                there = options.device.on(site, SYSTEMS[name])
                url = stack.enter_context(serving(name, there, up=options.up))
                players[layout] = url, player(asked, url, site, options)
                warm_up(players[layout][1], name, options)
        for repeat, name, rate in product(range(options.repeats), options.classes, options.rates):
            key = {"repeat": repeat, "name": name, "rate": rate}
            order = Random(f"{options.seed} {key}").sample(options.systems, len(options.systems))
            for system in order:
                url, play = players[layouts[system]]
                if SYSTEMS[system].up:
                    mode = {"mode": SYSTEMS[system].up[1]}
                    post_json(f"{url}/tetri/v1/mode", mode)
                measure_load(play, site, {"system": system, **key}, options, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_site(parser)
    names = ("classes", CLASSES, CLASSES), ("rates", RATES, ["knee"]), ("systems", SYSTEMS, None)
    for name, known, default in names:
        parser.add_argument(
            f"--{name}",
            type=lambda text: text.split(","),
            default=list(default or ("stock", "stock-256", "split", "both")),
            help=f"NAME,NAME of {', '.join(known)}",
        )
    from_file = "draw requests from a data set in ShareGPT's format: .json, .jsonl, .gz, .tar.gz"
    parser.add_argument("--sharegpt", type=Path, metavar="FILE", help=from_file)
    parser.add_argument("--num-prompts", type=int, default=48, help="requests in a cell; 48")
    turns = "run all systems at the same time, in turns, instead of one after the other"
    parser.add_argument("--in-turns", action="store_true", help=turns)
    parser.add_argument("--repeats", type=int, default=3, help="with other requests each; 3")
    parser.add_argument("--output", type=Path, default=Path("classes.jsonl"), help="result file")
    pace.add_device(parser)
    options, site = parse(parser)
    options.device = pace.device_of(options)
    # Devices share nothing, whatever the cores of this machine think.
    options.up = ["--placement", "shared-cores"] if options.device.profile else []
    # A modelled device takes as long every time, and holds more at once than these cores.
    options.lone = 1 if options.device.profile else LONE
    options.at_once = options.num_prompts if options.device.profile else AT_ONCE
    facts: dict[str, Any] = {"num_prompts": options.num_prompts, "in_turns": options.in_turns}
    facts |= options.device.facts
    options.draw = draw
    if options.sharegpt:
        tokenize = sharegpt.tokenizer(site.model)
        options.draw = sharegpt.read(options.sharegpt, tokenize, WINDOW_TOKENS)
        facts["sharegpt"] = {"file": options.sharegpt.name, "pairs": options.draw.facts()}
    by, given = ["name", "rate", "system"], conditions(site, **facts)
    results = Results.of(options.output, by, METRICS, given)
    known = results.head.get("stock", {}).get("at_once_per_s", {})
    if not set(options.classes) <= set(known):
        there = options.device.on(site, SYSTEMS["stock"])
        with serving("stock", there) as url, client.client(site.cores) as asked:
            play = player(asked, url, site, options)
            warm_up(play, "stock", options)
            results.head["stock"] = measure_stock(play, options)
        results.rewrite()
    if options.in_turns:
        measure_in_turns(site, options, results)
        return
    for repeat in range(options.repeats):
        order = list(options.systems)
        Random(f"{options.seed} {repeat}").shuffle(order)
        for system in order:
            measure_system(system, repeat, site, options, results)


if __name__ == "__main__":
    main()
