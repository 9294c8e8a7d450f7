"""Running outputs that move between decode instances, and the same cluster where they stay.

One prefill and two decode instances on modelled step times (pace.py). *Flips*: decode-1 becomes a
prefill instance and a decode instance again, in turns, while outputs of conversations run there;
timed is how long each drain waits. *Skew*: requests go to the decode instances in turn, and every
other output is long, so that one of them has all long ones. The verdict says whether moves shorten
drains and the tail, and whether a request was lost; the exit status is 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd

from examples.benchmarks import client, pace
from examples.benchmarks.client import Reply, Request, Target, random_prompt
from examples.benchmarks.cluster import (
    Site,
    System,
    add_site,
    conditions,
    get_json,
    metric,
    our_cluster,
    parse,
)
from examples.benchmarks.faults import Promise
from examples.benchmarks.figures import Results, figures
from examples.benchmarks.flip import LIMIT_S, flip
from examples.benchmarks.report import summary
from examples.benchmarks.soak import conclude
from vllm_tetri.policy.cluster import InstanceRow, Need
from vllm_tetri.policy.dispatch import DecodeCandidates

SYSTEMS = {"moves": (), "stays": ("--moves", "off")}
LOADS = ["flips", "skew"]
LONG, SHORT = (300, 450), (8, 30)  # output tokens
PROMPT = (50, 400)
MOST_TAIL = 0.7  # of the completion times' 99th percentile where outputs stay
MOST_DRAIN_S = 0.1  # at p99, beyond a move
MOST_PAUSE = 2.0  # of a stream's usual gaps, beyond one, at p99
SKEW_S = 0.002  # between the clocks of a router and its client, by their first tokens
_turns = count()


def alternate(candidates: DecodeCandidates, need: Need) -> InstanceRow | None:
    """A dispatch policy: to each instance in turn, whatever they have to do."""
    rows = sorted(candidates.draw(8), key=lambda row: row.id)
    return rows[next(_turns) % len(rows)] if rows else None


def draw(load: str, options: argparse.Namespace, rng: Random) -> list[Request]:
    """Draw Poisson arrivals on the modelled device's clock."""
    requests: list[Request] = []
    at_s, rate = 0.0, options.request_rates[LOADS.index(load)]
    while (at_s := at_s + rng.expovariate(rate)) < options.seconds:
        is_long = load == "flips" or len(requests) % 2 == 0
        prompt_ids = random_prompt(rng.randint(*PROMPT), rng)
        output_tokens = rng.randint(*(LONG if is_long else SHORT))
        requests.append(Request(at_s * options.scale, prompt_ids, output_tokens))
    return requests


@contextmanager
def serving(name: str, load: str, site: Site, options: argparse.Namespace) -> Iterator[str]:
    """Start a cluster and yield its router's URL."""
    device = pace.Pace(str(site.folder / "late"), options.scale)
    serve: tuple[str, ...] = ()
    if load == "skew":
        serve = ("--tetri-dispatch-policy", f"examples.benchmarks.moves:{alternate.__name__}")
    site = pace.on_device(site, device, options.kv_tokens, is_ours=True, serve=serve)
    up = ["--mode", "split", "--placement", "shared-cores", "--flip", "off"]
    up += ["--prefill", "1", "--decode", "2", *SYSTEMS[name]]
    with our_cluster(site, up, name, System()) as facts:
        yield facts["url"]


def moved(url: str) -> dict[str, float]:
    """Return how many outputs moved, and mean seconds of these moves and of gaps in streams."""
    found = {"moves": metric(url, "tetri_moves_total", 'outcome="moved"')}
    for part, name in (("whole", "move_s"), ("gap", "gap_s")):
        label = f'part="{part}"'
        num = metric(url, "tetri_move_seconds_count", label)
        found[name] = metric(url, "tetri_move_seconds_sum", label) / (num or 1)
    return found


def pauses(url: str, replies: Sequence[Reply]) -> list[tuple[float, float]]:
    """Return of each move by how much the gap in its stream was longer than the stream's usual one,
    and that one, in seconds."""
    found = []
    for each in replies:
        row = get_json(f"{url}/tetri/v1/requests/{each.headers.get('x-request-id')}")
        marks = [mark["s"] for mark in row.get("timeline", ()) if mark["event"] == "answering"]
        gaps = np.array(each.gaps_us or [0]) / 1e6
        event_s = (row.get("ttft_s") or 0.0) + np.array([*accumulate(gaps)])
        usual_s = float(np.median(gaps))
        for at_s in marks[1:]:  # the first event from another instance comes a moment later
            place = min(int(np.searchsorted(event_s, at_s - SKEW_S)), len(gaps) - 1)
            found.append((float(gaps[place]) - usual_s, usual_s))
    return found


async def flips(
    url: str, playing: asyncio.Task[list[Reply]], options: argparse.Namespace
) -> list[float]:
    """Flip decode-1 to and fro while requests come; return the seconds of drains from decode."""
    drains: list[float] = []
    await asyncio.sleep(options.rest)
    while not playing.done():
        took = await flip(url, "decode-1", "prefill", is_now=False)
        drains.append(took["drain_s"])
        await flip(url, "decode-1", "decode", is_now=False)
        await asyncio.sleep(options.rest)
    return drains


async def play(
    url: str, load: str, site: Site, requests: list[Request], options: argparse.Namespace
) -> dict[str, Any]:
    """Send a schedule, and flip meanwhile if that is the load; return the cell's figures, of which
    completion times are in seconds of the modelled device."""
    target = Target(url, site.name, LIMIT_S)
    with client.client(site.cores) as asked:
        playing = asyncio.create_task(asyncio.to_thread(asked.play, target, requests))
        drains = await flips(url, playing, options) if load == "flips" else []
        raw = await playing
    replies = pace.in_device_time(raw, options.scale)
    cell: dict[str, Any] = {**figures(replies), **await asyncio.to_thread(moved, url)}
    if found := await asyncio.to_thread(pauses, url, raw):
        beyond, usual_s = (np.array(each) for each in zip(*found, strict=True))
        cell |= {"paused_gaps": [round(float(each), 3) for each in beyond / usual_s]}
        cell |= {"gap_p50_ms": 1e3 * float(np.median(usual_s))}
        for name, part in {"p50": 0.5, "p99": 0.99}.items():
            cell[f"pause_{name}_steps"] = float(np.quantile(beyond / usual_s, part))
    cell["jct_p99_s"] = cell["jct_p99_ms"] / 1e3
    if drains:
        cell |= {"flips": len(drains), "drain_p50_s": float(np.median(drains))}
        cell |= {"drain_p99_s": float(np.quantile(drains, 0.99)), "drains_s": drains}
    return cell


def promises(cells: Sequence[Mapping[str, Any]]) -> list[Promise]:
    """Return what moves are to keep."""
    kept = []
    tails = {
        name: float(np.mean([each["jct_p99_s"] for each in cells if is_of(each, "skew", name)]))
        for name in SYSTEMS
        if any(is_of(each, "skew", name) for each in cells)
    }
    if len(tails) == len(SYSTEMS):
        part = tails["moves"] / tails["stays"]
        text = f"p99 of completion times under skew is at most {MOST_TAIL:g} of that without moves"
        kept.append(Promise(text, part <= MOST_TAIL, f"{part:.2f}"))
    drains = [each["drain_p99_s"] for each in cells if is_of(each, "flips", "moves")]
    if drains:
        move_s = np.mean([each["move_s"] for each in cells if is_of(each, "flips", "moves")])
        found = f"{np.mean(drains):.2f} s, a move {move_s:.2f} s"
        text = f"p99 of drains is at most {MOST_DRAIN_S:g} s and a move"
        kept.append(Promise(text, bool(np.mean(drains) <= MOST_DRAIN_S + move_s), found))
    if paused := [gaps for each in cells for gaps in each.get("paused_gaps", ())]:
        most = float(np.quantile(paused, 0.99))
        text = f"p99 of pauses is at most {MOST_PAUSE:g} usual gaps beyond one"
        kept.append(Promise(text, most <= MOST_PAUSE, f"{most:.2f}, of {len(paused)} moves"))
    lost, asked = (sum(each[key] for each in cells) for key in ("failed", "completed"))
    return [*kept, Promise("no request is lost", not lost, f"{lost:g} of {lost + asked:g}")]


def is_of(cell: Mapping[str, Any], load: str, system: str) -> bool:
    return bool(cell["load"] == load and cell["system"] == system)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_site(parser)
    parser.add_argument("--loads", default="flips,skew", help="NAME,NAME")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals; 40")
    parser.add_argument(
        "--request-rates",
        type=lambda text: [float(each) for each in text.split(",")],
        default=[1.5, 5.0],
        help="FLIPS,SKEW per second; 1.5,5",
    )
    parser.add_argument("--rest", type=float, default=2.0, help="seconds between two flips; 2")
    parser.add_argument("--kv-tokens", type=int, default=65536, help="KV memory; 65536")
    parser.add_argument("--scale", type=float, default=1.0, help="of modelled step times; 1")
    parser.add_argument("--repeats", type=int, default=3, help="with other requests each; 3")
    parser.add_argument("--output", type=Path, default=Path("moves.jsonl"), help="result file")
    options, site = parse(parser)
    shown = ["completed", "jct_mean_ms", "jct_p99_s", "moves", "move_s", "gap_s"]
    shown += ["flips", "drain_p50_s", "drain_p99_s"]
    shown += ["gap_p50_ms", "pause_p50_steps", "pause_p99_steps"]
    rates, seconds = options.request_rates, options.seconds
    about = conditions(site, scale=options.scale, rates=rates, seconds=seconds)
    results = Results.of(options.output, ["load", "system"], shown, about)
    for repeat in range(options.repeats):
        for load in options.loads.split(","):
            for name in Random(f"{options.seed} {repeat}").sample([*SYSTEMS], len(SYSTEMS)):
                if results.has(load=load, system=name, repeat=repeat):
                    continue
                requests = draw(load, options, Random(f"{options.seed} {repeat} {load}"))
                with serving(name, load, site, options) as url:
                    cell = asyncio.run(play(url, load, site, requests, options))
                results.add(load=load, system=name, repeat=repeat, **cell)
                found = {key: round(cell.get(key, 0.0), 3) for key in shown}
                print(f"repeat {repeat}, {load}, {name}: {found}", flush=True)
    rows = summary(results.head, pd.DataFrame(results.cells))
    content = {"conditions": results.head["conditions"], "rows": rows}
    return conclude(site, "moves", content, promises(results.cells))


if __name__ == "__main__":
    raise SystemExit(main())
