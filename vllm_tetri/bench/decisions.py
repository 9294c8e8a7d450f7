"""`vllm-tetri bench decisions`: what the decisions of a busy cluster cost.

No engine: the policies alone, on made-up clusters and batches. A dispatch decision sees
one view and a few hundred own dispatches; a step of admission begins with 256 requests in
the batch and asks for the next of 1,000 held ones until it is refused. Everything is done
several times over; of the CPU times of one and the same decision the least counts, since
the rest is other work on the machine.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench import picture, setting
from vllm_tetri.bench.decisions_placement import placement, renewal
from vllm_tetri.bench.stats import quantile
from vllm_tetri.policy.admission import Admission, DecodePolicy, Held
from vllm_tetri.policy.dispatch import choose_decode
from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.policy.peers import Need, OwnDispatches, Peers
from vllm_tetri.types import (
    ClusterView,
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Prediction,
    Role,
)

INSTANCES = (10, 100, 1000)
RUNNING, HELD = 256, 1000
BLOCK_SIZE = 16
TOTAL_BLOCKS = 10_000  # of an instance that is dispatched to
POOL_BLOCKS = RUNNING * 820 // BLOCK_SIZE  # of one that admits; holds about so many requests
KV_BYTES_PER_TOKEN = 1 << 14
OWN_DISPATCHES = 300
_WARM_UP = 50
_FILLING_STEPS = 800
_US = 1e6

# Of 50 instances, those with blocks, and those with room in the arena.
CLUSTERS: dict[str, tuple[range, range]] = {
    "all have room": (range(50), range(50)),
    "1 in 50 has room": (range(1), range(50)),
    "nobody has room": (range(0), range(50)),
    "blocks here, arena there": (range(25), range(24, 50)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("--decisions", type=int, default=1000, metavar="N", help="of each kind (1000)")
    add("--repeats", type=int, default=5, metavar="N", help="of each decision (5)")
    add("--seed", type=int, default=0, metavar="N", help="of everything random (0)")
    add(
        "--output",
        type=Path,
        default=Path("bench-decisions"),
        metavar="FOLDER",
        help="where decisions.json and decisions.svg go (bench-decisions)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write decisions.json and decisions.svg."""
    setting.at_least(options, {"decisions": 1, "repeats": 1})
    picture.require_pictures()
    setting.make_output(options)
    console = setting.console()
    results = measure(options.decisions, options.repeats, options.seed)
    setting.write_json(options.output / "decisions.json", results)
    show(console, results)
    draw(results, options.output / "decisions.svg")
    console.print(f"written: {options.output}/decisions.json, decisions.svg")
    return 0


def measure(count: int, repeats: int, seed: int) -> dict[str, Any]:
    """What everything takes, and the conditions."""

    def quickest(times: Callable[[Random], list[float]]) -> dict[str, float]:
        runs = [times(Random(seed)) for _ in range(repeats)]
        return _summary([min(each) for each in zip(*runs, strict=True)])

    conditions = {"decisions": count, "repeats": repeats, "seed": seed, "cpu": setting.device()}
    with _without_collector():
        return {
            "conditions": conditions,
            "dispatch": {
                name: {
                    str(size): quickest(partial(_dispatches, size, name, count))
                    for size in INSTANCES
                }
                for name in CLUSTERS
            },
            "view": {
                str(size): quickest(partial(_views, size, count // 20 + 1)) for size in INSTANCES
            },
            "placement": {
                name: {
                    str(size): quickest(partial(_placements, make, size, times))
                    for size in INSTANCES
                }
                for name, make, times in (
                    ("a request", placement, count),
                    ("once per view", renewal, count // 20 + 1),
                )
            },
            "admission": {
                "as predicted": _admissions(count, repeats, seed, noise_tokens=0),
                "predicted anew": _admissions(count, repeats, seed, noise_tokens=50),
            },
            "lengths": quickest(partial(_lengths, count // 10 + 1)),
        }


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _summary(seconds: list[float]) -> dict[str, float]:
    return {
        "median_us": median(seconds) * _US,
        "p99_us": quantile(seconds, 0.99) * _US,
        "mean_us": fmean(seconds) * _US,
        "count": len(seconds),
    }


def _timed(decide: Callable[[], object], count: int) -> list[float]:
    seconds = []
    for _ in range(count + _WARM_UP):
        began = time.thread_time()
        decide()
        seconds.append(time.thread_time() - began)
    return seconds[_WARM_UP:]


# -- dispatch -------------------------------------------------------------------


def _dispatches(size: int, cluster: str, count: int, rng: Random) -> list[float]:
    peers = Peers(_view(size, cluster, rng), _ME, 0.0)
    own = OwnDispatches()
    for _ in range(OWN_DISPATCHES):
        own.add(InstanceId(f"decode-{rng.randrange(size)}"), Need(1, 1, 2, False), 0.0)
    needs = iter([_need(rng) for _ in range(count + _WARM_UP)])
    return _timed(lambda: choose_decode(peers, need=next(needs), own=own, rng=rng), count)


def _views(size: int, count: int, rng: Random) -> list[float]:
    view = _view(size, "all have room", rng)
    return _timed(lambda: Peers(view, _ME, 0.0), count)


def _placements(
    make: Callable[[int, Random], Callable[[], object]], size: int, count: int, rng: Random
) -> list[float]:
    return _timed(make(size, rng), count)


def _need(rng: Random) -> Need:
    num_tokens, answer_tokens = rng.randint(50, 1000), rng.randint(1, 600)
    total_tokens, is_heavy = num_tokens + answer_tokens, answer_tokens > 128
    return Need(num_tokens, num_tokens * KV_BYTES_PER_TOKEN, total_tokens, is_heavy)


def _view(size: int, cluster: str, rng: Random) -> ClusterView:
    with_blocks, with_arena = CLUSTERS[cluster]
    instances = []
    for index in range(size):
        load = InstanceLoad(
            blocks_total=TOTAL_BLOCKS,
            blocks_used=TOTAL_BLOCKS - rng.randint(5000, 9000) * (index % 50 in with_blocks),
            arena_total_bytes=1 << 30,
            arena_used_bytes=(1 << 30) - rng.randint(1 << 28, 1 << 29) * (index % 50 in with_arena),
            heavy=rng.randrange(100),
            light=rng.randrange(100),
        )
        instances.append(InstanceView(_info(f"decode-{index}"), InstanceState.READY, load, 0.05))
    return ClusterView("router", 1, tuple(instances))


def _info(name: str, role: Role = Role.DECODE) -> InstanceInfo:
    return InstanceInfo(
        id=InstanceId(name),
        url=f"http://{name}",
        role=role,
        models=("model",),
        kv_endpoint=f"{name}:1",
        identity={"model": "model", "dtype": "bfloat16", "block_size": str(BLOCK_SIZE)},
        max_model_len=8192,
        block_size=BLOCK_SIZE,
        pid=1,
        version="0",
    )


_ME = _info("prefill-0", Role.PREFILL)


# -- admission ------------------------------------------------------------------


def _admissions(count: int, repeats: int, seed: int, *, noise_tokens: int) -> dict[str, Any]:
    """Steps with a full pool, in which what is left of an answer goes down by one, or is
    predicted anew, give or take `noise_tokens`."""
    runs = []
    for _ in range(repeats):
        batch = _Batch(Random(seed), noise_tokens)
        runs.append([batch.step() for _ in range(_FILLING_STEPS + count)][_FILLING_STEPS:])
    steps = [min(same) for same in zip(*runs, strict=True)]
    found: dict[str, Any] = {"all steps": _summary([step.took_s for step in steps])}
    for name, some in (
        ("steps that refuse", [step.took_s for step in steps if step.admitted == 0]),
        ("steps that admit", [step.took_s for step in steps if step.admitted > 0]),
    ):
        found[name] = _summary(some or [0.0])
    found["running"] = fmean(step.running for step in steps)
    found["admitted_per_step"] = fmean(step.admitted for step in steps)
    return found


class _Step(NamedTuple):
    took_s: float
    running: int
    admitted: int


class _Batch:
    """Requests that write a token per step, and others that want to join them."""

    def __init__(self, rng: Random, noise_tokens: int) -> None:
        self._rng = rng
        self._noise_tokens = noise_tokens
        self._running: list[Held] = []
        self._held = deque(self._request() for _ in range(HELD))
        self._admission = Admission(
            DecodePolicy.RESERVE_DYNAMIC, block_size=BLOCK_SIZE, total_blocks=POOL_BLOCKS
        )

    def _request(self) -> Held:
        answer_tokens = min(2000, max(2, round(self._rng.lognormvariate(5.2, 0.9))))
        return self._rng.randint(50, 1000), answer_tokens

    def step(self) -> _Step:
        running, admission, rng = self._running, self._admission, self._rng
        predicted = running
        if self._noise_tokens:
            noise = self._noise_tokens
            predicted = [
                (held, max(1, rest + rng.randint(-noise, noise))) for held, rest in running
            ]
        free_blocks = POOL_BLOCKS - sum(-(-held // BLOCK_SIZE) for held, _ in running)
        admitted = 0
        began = time.thread_time()
        admission.begin(free_blocks, predicted)
        while admission.admit(*self._held[admitted]):
            admitted += 1
        took_s = time.thread_time() - began
        for _ in range(admitted):
            running.append(self._held.popleft())
            self._held.append(self._request())
        step = _Step(took_s, len(running), admitted)
        self._running = [(held + 1, rest - 1) for held, rest in running if rest > 1]
        return step


def _lengths(count: int, rng: Random) -> list[float]:
    """What the expected lengths of a whole batch take."""
    lengths = Lengths()
    for _ in range(1000):
        lengths.observe(Prediction(rng.randrange(10), 10, 200), rng.randint(1, 1500))
    batch = [(Prediction(rng.randrange(10), 10, 200), rng.randrange(1500)) for _ in range(RUNNING)]
    return _timed(lambda: [lengths.total_tokens(*each, End.EXPECTED) for each in batch], count)


# -- what came of it --------------------------------------------------------------


def show(console: Console, results: dict[str, Any]) -> None:
    """Print all tables."""
    conditions = results["conditions"]
    count, repeats = conditions["decisions"], conditions["repeats"]
    console.print(f"{conditions['cpu']}, {count} decisions of each kind, quickest of {repeats}")
    table = Table(
        "us: median (p99)", *(f"{size} instances" for size in INSTANCES), title="Dispatch"
    )
    for name, found in results["dispatch"].items():
        table.add_row(name, *map(_text, found.values()))
    table.add_row("once per view", *map(_text, results["view"].values()))
    console.print(table)
    table = Table(
        "us: median (p99)", *(f"{size} instances" for size in INSTANCES), title="Placement"
    )
    for name, found in results["placement"].items():
        table.add_row(name, *map(_text, found.values()))
    console.print(table)
    kinds = ("all steps", "steps that refuse", "steps that admit")
    table = Table(
        "us: median (p99)", *kinds, "mean", "running", "admitted a step",
        title=f"Admission in one step, {HELD} held",
    )  # fmt: skip
    for name, found in results["admission"].items():
        table.add_row(
            f"rest {name}",
            *(_text(found[kind]) for kind in kinds),
            f"{found['all steps']['mean_us']:.0f}",
            f"{found['running']:.0f}",
            f"{found['admitted_per_step']:.2f}",
        )
    table.add_row(f"expected lengths of {RUNNING}", _text(results["lengths"]))
    console.print(table)


def draw(results: dict[str, Any], path: Path) -> None:
    """Dispatch by number of instances, and steps of admission."""
    figure, (left, right) = picture.new("What decisions take: median, and up to p99", 2)
    places = range(len(INSTANCES))
    for name, sizes in results["dispatch"].items():
        found = [sizes[str(size)] for size in INSTANCES]
        left.errorbar(places, *_bars(found), marker="o", markersize=3, capsize=2, label=name)
    left.axhline(20, color="#7a7a7a", linestyle=":", linewidth=1, label="20 us")
    left.set_xticks(places, [str(size) for size in INSTANCES])
    left.set_xlabel("decode instances in the view")
    left.set_ylabel("one dispatch decision (us)")
    left.legend(fontsize=7)
    names, steps = ("all steps", "steps that refuse", "steps that admit"), results["admission"]
    for shift, (name, found) in enumerate(steps.items()):
        middles, spread = _bars([found[each] for each in names])
        at = [place + 0.35 * (shift - 0.5) for place in range(len(names))]
        right.bar(at, middles, 0.3, yerr=spread, capsize=2, label=f"rest {name}")
    right.axhline(50, color="#7a7a7a", linestyle=":", linewidth=1, label="50 us")
    right.set_xticks(range(len(names)), names)
    right.set_ylabel(f"admission in one step, {HELD} held (us)")
    right.legend(fontsize=7)
    for axis in (left, right):
        axis.set_ylim(bottom=0)
    picture.save(figure, path)


def _text(summary: dict[str, float]) -> str:
    return f"{summary['median_us']:.1f} ({summary['p99_us']:.1f})"


def _bars(found: list[dict[str, float]]) -> tuple[list[float], list[list[float]]]:
    middles = [each["median_us"] for each in found]
    above = [each["p99_us"] - middle for each, middle in zip(found, middles, strict=True)]
    return middles, [[0.0] * len(found), above]
