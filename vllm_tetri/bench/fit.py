"""`vllm-tetri bench fit`: what steps of a real instance cost, as a profile for the simulator.

One instance of role both runs on the given cores, answers bursts of requests of all classes
and some one at a time, and says at the end what it has fitted to its own steps
(`vllm_tetri.policy.step_fit`).
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from dataclasses import fields
from random import Random
from statistics import median
from typing import Any

from rich.progress import Progress
from rich.table import Table

from vllm_tetri.bench import setting
from vllm_tetri.bench.modes import load as modes_load
from vllm_tetri.bench.modes.cells import Request
from vllm_tetri.bench.modes.run import Client, serve
from vllm_tetri.bench.modes.systems import ADAPTIVE, OWN_OPTIONS, SYSTEMS, Site
from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.launch.plan import given_options
from vllm_tetri.sim.cost.profiles import VERSION
from vllm_tetri.sim.cost.step_cost import prompt_s
from vllm_tetri.types import StepCoefficients

# Bursts drain from many decodes to one, with prompts in between: steps of all kinds.
_BURSTS = (8, 32, 16)
_LONE = 12
_LEAST_CONFIDENCE = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and where the profile goes."""
    parser.add_argument("model", metavar="MODEL", help="folder or name of a model")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="of all bursts (2)")
    setting.add_place(parser, "fit", cores=2)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write profile.json."""
    for name in OWN_OPTIONS:
        if given_options(options.tail) & {name, f"no-{name}"}:
            raise ConfigError(f"--{name} cannot be given after --; this sets it itself")
    setting.check(options)
    site = Site(options.model, options.tail, setting.cores(options), None, options.output)
    console = setting.console()
    with Progress(console=console, refresh_per_second=1) as progress:
        cost, front_s = _measure(site, options.repeats, options.seed, progress)
    path = options.output / "profile.json"
    found = _plain(cost, front_s)
    path.write_text(json.dumps(found, indent=2) + "\n")  # not rounded
    table = Table("coefficient", "seconds", title=f"{site.served_name}, {len(site.cores)} cores")
    for name, value in found.items():
        if name != "version":
            table.add_row(name, f"{value:.3g}")
    console.print(table)
    console.print(f"confidence {cost.confidence:.2f}; written: {path}")
    return 0


def _measure(
    site: Site, repeats: int, seed: int, progress: Progress
) -> tuple[StepCoefficients, float]:
    """What steps cost, and what a request takes besides."""
    task = progress.add_task("starting an instance", total=repeats * len(_BURSTS) + _LONE)
    with serve(SYSTEMS[ADAPTIVE], site, seed) as (client, url):
        for place, count in enumerate(_BURSTS * repeats):
            progress.update(task, description=f"{count} requests at once")
            _play(client, count, f"{seed} fit {place}")
            progress.advance(task)
        lone = []
        for place in range(_LONE):
            progress.update(task, description="one request at a time")
            lone += _play(client, 1, f"{seed} lone {place}")
            progress.advance(task)
        cost, chunk_tokens = _cost(url)
    if cost.confidence < _LEAST_CONFIDENCE:
        raise UnsupportedError(
            f"steps scatter too much to be fitted (confidence {cost.confidence:.2f}); "
            "is anything else running on these cores?"
        )
    besides = [
        each.reply.ttft_s - prompt_s(cost, each.prompt_tokens, chunk_tokens) for each in lone
    ]
    return cost, max(0.0, median(besides))


def _play(client: Client, count: int, key: str) -> list[Request]:
    schedule = modes_load.at_once(modes_load.MIXED, count, Random(key))
    found = client.play(schedule, key)
    for each in found:
        if each.reply.error:
            raise UnsupportedError(f"a request failed: {each.reply.error}")
    return found


def _cost(url: str) -> tuple[StepCoefficients, int]:
    """What the instance says of its steps, and its chunk."""
    try:
        with urllib.request.urlopen(f"{url}/tetri/v1/instances", timeout=10) as answer:
            rows: list[dict[str, Any]] = json.load(answer)["instances"]
    except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
        raise UnsupportedError(f"the router does not say what steps cost: {error}") from error
    return StepCoefficients(**rows[0]["cost"]), int(rows[0]["chunk_tokens"])


def _plain(cost: StepCoefficients, front_s: float) -> dict[str, float]:
    names = [field.name for field in fields(cost) if field.name != "confidence"]
    seconds = {name: getattr(cost, name) for name in names}
    return {"version": VERSION, **seconds, "front_s": front_s}
