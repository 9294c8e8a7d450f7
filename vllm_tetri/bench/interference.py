"""`vllm-tetri bench interference`: prefill beside prefill (paper Figure 3).

One prompt is watched: how long from its arrival to its first token, alone and
with others that came together with it. Its place among them is random, and the
same for every system. Stock vLLM computes with its own default budget.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from random import Random
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_tetri.bench import picture, setting
from vllm_tetri.bench.process import EngineProcess

# Paper section 2.2: light prompts have about 18 tokens, heavy ones 512.
LIGHT, HEAVY = "light", "heavy"
_MS = 1e3


@dataclass(frozen=True, slots=True)
class Case:
    """One point: the watched prompt, and how many of which kind came with it."""

    watched: str
    others: str
    count: int

    @property
    def panel(self) -> str:
        """Where it is drawn."""
        return f"{self.watched} among {self.others}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    setting.add_arguments(parser, "interference", repeats=3)
    add = parser.add_argument
    add(
        "--counts",
        type=setting.numbers,
        default=[1, 3, 7, 15, 31, 63],
        metavar="N,N",
        help="other prompts (1,3,7,15,31,63)",
    )
    add("--light", type=int, default=18, metavar="N", help="tokens of a light prompt (18)")
    add("--heavy", type=int, default=512, metavar="N", help="tokens of a heavy prompt (512)")
    add(
        "--batches",
        type=setting.numbers,
        default=[16, 64],
        metavar="N,N",
        help="sizes of the sched batch for sjf (16,64)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write interference.json and interference.svg."""
    setting.check(options, counts=1, light=1, heavy=1, batches=1, chunk=1)
    console = setting.console()
    with Progress(console=console) as progress, ExitStack() as stack:
        results = _measure(options, progress, stack)
    setting.write_json(options.output / "interference.json", results)
    show(console, results)
    draw(results, options.output / "interference.svg")
    console.print(f"written: {options.output}/interference.json, interference.svg")
    return 0


def cases(counts: list[int]) -> list[Case]:
    """Alone first, then every mixture."""
    alone = [Case(watched, "nobody", 0) for watched in (LIGHT, HEAVY)]
    return alone + [Case(*each) for each in product((LIGHT, HEAVY), (LIGHT, HEAVY), counts)]


def place_of(repeat: int, repeats: int, count: int, rng: Random) -> int:
    """How many of `count` others stand before the watched prompt: random, but spread
    evenly over the repeats."""
    part = (repeat + rng.random()) / repeats
    return int(part * (count + 1))


def _measure(options: argparse.Namespace, progress: Progress, stack: ExitStack) -> dict[str, Any]:
    words, cores = setting.engines(options), setting.cores(options)
    task = progress.add_task("starting two engines", total=None)
    engines = {
        name: stack.enter_context(
            EngineProcess(serve, cores, options.output / f"engine-{name}.log")
        )
        for name, serve in (("ours", words.ours), ("stock", words.stock))
    }
    facts = {name: engine.ready() for name, engine in engines.items()}
    progress.remove_task(task)
    budget = facts["stock"]["budget_tokens"]
    systems: dict[str, tuple[str, dict[str, Any]]] = {
        f"stock, {budget} a step": ("stock", {}),
        "ours, fcfs": ("ours", {"policy": "fcfs"}),
    }
    for batch in options.batches:
        systems[f"ours, sjf {batch}"] = ("ours", {"policy": "sjf", "sched_batch": batch})
    rng = Random(options.seed)
    tokens = {LIGHT: options.light, HEAVY: options.heavy}
    for engine, question in systems.values():
        engines[engine].ask(lengths=[tokens[HEAVY]] * 5, **question)
    points = cases(options.counts)
    task = progress.add_task("prompts", total=len(points) * options.repeats * len(systems))
    found: list[dict[str, Any]] = []
    for repeat, case in product(range(options.repeats), points):
        place = place_of(repeat, options.repeats, case.count, rng)
        lengths = [tokens.get(case.others, 0)] * case.count
        lengths.insert(place, tokens[case.watched])
        for name in rng.sample(list(systems), len(systems)):
            engine, question = systems[name]
            answer = engines[engine].ask(lengths=lengths, seed=repeat, watch=place, **question)
            point: dict[str, Any] = {"system": name, "watched": case.watched, "others": case.others}
            point |= {"count": case.count, "place": place, "ttft_s": answer["ttft_s"][place]}
            found.append(point)
            progress.advance(task)
    conditions = {
        "model": setting.model_name(options),
        "cores": len(cores),
        "repeats": options.repeats,
        "light_tokens": options.light,
        "heavy_tokens": options.heavy,
        "chunk": options.chunk,
        "engines": facts,
    }
    return {"conditions": conditions, "systems": list(systems), "points": found}


def latency_s(results: dict[str, Any], system: str, case: Case) -> list[float]:
    """Of the watched prompt, once per repeat."""
    return [
        point["ttft_s"]
        for point in results["points"]
        if point["system"] == system
        and Case(point["watched"], point["others"], point["count"]) == case
    ]


def _cases_of(results: dict[str, Any]) -> list[Case]:
    found = (Case(each["watched"], each["others"], each["count"]) for each in results["points"])
    return list(dict.fromkeys(found))


def show(console: Console, results: dict[str, Any]) -> None:
    """Print every case."""
    conditions, systems = results["conditions"], results["systems"]
    facts = conditions["engines"]["ours"]
    light, heavy = conditions["light_tokens"], conditions["heavy_tokens"]
    console.print(
        f"{facts['device']}, {conditions['cores']} core(s), vLLM {facts['vllm']}, "
        f"{conditions['model']} {facts['dtype']}, chunk {conditions['chunk']}, prompts of {light} "
        f"and {heavy} tokens, {conditions['repeats']} repeats"
    )
    title = "Time to first token of one prompt that came with others: mean, least to most (ms)"
    table = Table("watched", "with", *systems, title=title)
    for case in _cases_of(results):
        what = f"{case.count} {case.others}" if case.count else "nobody"
        cells = (_cell(latency_s(results, system, case)) for system in systems)
        table.add_row(case.watched, what, *cells)
    console.print(table)


def _cell(latencies_s: list[float]) -> str:
    """No confidence interval: places are spread on purpose, so their spread says nothing
    about the mean's."""
    least, most = min(latencies_s) * _MS, max(latencies_s) * _MS
    return f"{fmean(latencies_s) * _MS:.0f}  ({least:.0f} to {most:.0f})"


def draw(results: dict[str, Any], path: Any) -> None:
    """The paper's Figure 3: latency by number of other prompts."""
    panels: dict[str, list[Case]] = {}
    for case in _cases_of(results):
        if case.count:
            panels.setdefault(case.panel, []).append(case)
    figure, axes = picture.new("One prompt beside others", 2, rows=2)
    for axis, (panel, points) in zip(axes, panels.items(), strict=True):
        alone = Case(points[0].watched, "nobody", 0)
        line = [alone, *points]
        for system in results["systems"]:
            found = [fmean(latency_s(results, system, case)) * _MS for case in line]
            counts = [case.count for case in line]
            axis.plot(counts, found, marker="o", markersize=3, label=system)
        axis.set_title(panel)
        axis.set_xlabel("other prompts")
        axis.set_ylabel("TTFT (ms)")
        axis.set_yscale("log")
    axes[0].legend(fontsize=7)
    picture.save(figure, path)
