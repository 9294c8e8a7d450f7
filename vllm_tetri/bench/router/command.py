"""`vllm-tetri bench router`: what the router adds to what instances take.

Instances without an engine answer at once, so that what is left is the way to them:
asked directly, through the router served whole, and through the router as prefill and
decode. Systems take turns in random order. The router has a core of its own; instances
and client share another one, or have one each where there are three.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import psutil
from rich.progress import Progress

from vllm_tetri.bench import setting
from vllm_tetri.bench.router import client as router_client
from vllm_tetri.bench.router import systems as router_systems
from vllm_tetri.bench.router.client import Turn
from vllm_tetri.bench.router.report import FLOOD, LOOPS, PACED, TIMED, draw, show
from vllm_tetri.bench.router.systems import Places, System, Talker
from vllm_tetri.errors import UnsupportedError

_REST_S = 30.0
_LOOK_S = 0.1
_IDLE = 0.1  # of a core, per system
_STEP_S = 0.05  # of an engine with a full batch
_BUSY_STREAMS = 64
_FLOW_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add(
        "--streams",
        type=setting.numbers,
        default=[1, 64, 512],
        metavar="N,N",
        help="streams that flow at a time (1,64,512)",
    )
    add("--requests", type=int, default=80, metavar="N", help="timed requests per turn (80)")
    add("--repeats", type=int, default=5, metavar="N", help="turns of every system (5)")
    add("--prompt", type=int, default=500, metavar="N", help="tokens of the prompt (500)")
    add(
        "--rival",
        metavar="PROGRAM",
        help="path of an installed vllm-router to measure beside ours",
    )
    setting.add_place(parser, "router", cores=2)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write router.json and router.svg."""
    setting.check(options, streams=1, requests=2, prompt=1, cores=1)
    console = setting.console()
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=console))
        started = progress.add_task("starting", total=None)
        places = router_systems.places(options)
        systems = stack.enter_context(router_systems.systems(options, places))
        client = stack.enter_context(router_systems.client(options, places))
        progress.remove_task(started)
        points = _measure(options, systems, client, progress)
    content = {"conditions": _conditions(options, places), "points": points}
    setting.write_json(options.output / "router.json", content)
    show(console, content)
    draw(content, options.output / "router.svg")
    console.print(f"written: {options.output}/router.json, router.svg")
    return 0


def _turns(options: argparse.Namespace) -> dict[tuple[str, int], Turn]:
    """What every system is asked in each repeat, by kind and number of streams."""
    turn = Turn(url="", prompt_tokens=options.prompt, seconds=_FLOW_S, step_s=_STEP_S)
    most = max(options.streams)
    return {
        **{
            (TIMED, streams): replace(turn, streams=streams, requests=options.requests)
            for streams in options.streams
        },
        (PACED, most): replace(turn, streams=most),
        (FLOOD, _BUSY_STREAMS): replace(turn, streams=_BUSY_STREAMS, step_s=0.0),
        (LOOPS, _BUSY_STREAMS): replace(turn, streams=_BUSY_STREAMS, loops=True),
    }


def _measure(
    options: argparse.Namespace, systems: Sequence[System], client: Talker, progress: Progress
) -> list[dict[str, Any]]:
    """Every turn of every system, in random order within a repeat."""
    rng, points = Random(options.seed), []
    turns = _turns(options)
    task = progress.add_task("turns", total=options.repeats * len(turns) * len(systems))
    for repeat in range(options.repeats):
        for (kind, streams), turn in turns.items():
            for system in rng.sample(systems, len(systems)):
                progress.advance(task)
                if kind == LOOPS and system.decode_url:
                    continue  # two legs in a row are no stream of requests
                _wait_until_idle(systems)
                asked = replace(
                    turn, url=system.url, decode_url=system.decode_url, pids=system.pids,
                    headers=system.headers, seed=rng.getrandbits(32),
                )  # fmt: skip
                found = client.ask(asdict(asked))
                point = {"kind": kind, "shape": system.shape, "system": system.name}
                points.append({**point, "streams": streams, "repeat": repeat, **found})
    return points


def _wait_until_idle(systems: Sequence[System]) -> None:
    """Routers may still be closing what belongs to the turn before."""
    processes = [psutil.Process(pid) for system in systems for pid in system.pids]
    deadline, used_s = time.monotonic() + _REST_S, router_client.cpu_s(processes)
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        before_s, used_s = used_s, router_client.cpu_s(processes)
        if used_s - before_s <= _IDLE * _LOOK_S * len(systems):
            return
    raise UnsupportedError("the routers do not come to rest")


def _conditions(options: argparse.Namespace, places: Places) -> dict[str, Any]:
    return {
        "device": setting.device(),
        "cores": {name: list(cores) for name, cores in asdict(places).items()},
        "prompt_tokens": options.prompt,
        "answer_tokens": router_client.TOKENS,
        "step_s": _STEP_S,
        "requests": options.requests,
        "repeats": options.repeats,
        "rival": options.rival and Path(options.rival).name,
    }
