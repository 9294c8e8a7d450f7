"""`vllm-tetri bench order`: what the order of prompts does to latency (paper Figure 16).

One engine of ours and one of stock vLLM live in two processes pinned to the same
core and take turns; ours changes its policy between two queues. All compute the
same prompts up to their first token. Three parts: a queue that is full when the
time starts; prompts that come one by one, where padding shows; and what the
scheduler itself takes with many prompts waiting.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from rich.progress import Progress

from vllm_tetri.bench import lengths, order_report, setting
from vllm_tetri.bench.process import EngineProcess
from vllm_tetri.policy.order import PrefillPolicy

PARTS = ("queue", "arrivals", "overhead")
QUEUED = 1000  # of the part on the scheduler itself
_MORE_QUEUED = 150

Arrivals = Callable[[int], list[float]]  # of so many prompts, in seconds


@dataclass(frozen=True, slots=True)
class System:
    """What computes a queue.

    Attributes:
        name: In tables and files.
        engine: ``ours`` or ``stock``.
        question: Its part of a `vllm_tetri.bench.engine.Question`.
    """

    name: str
    engine: str
    question: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """One queue computed by one system.

    Attributes:
        ttft_s: From arrival to first token, per prompt.
        waiting_s: The same less the steps that computed some of it.
        total_s: Until the last token.
        steps: Steps it took.
        full_part: Of the steps before which a chunk's worth was there to compute, the
            part that computed exactly a chunk; None when there was none.
    """

    ttft_s: list[float]
    waiting_s: list[float]
    total_s: float
    steps: int
    full_part: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    setting.add_arguments(parser, "order", repeats=3)
    add = parser.add_argument
    add("--requests", type=int, default=128, metavar="N", help="prompts of a queue (128)")
    add(
        "--batches",
        type=setting.numbers,
        default=[16, 32, 64, 128],
        metavar="N,N",
        help="sizes of the sched batch (16,32,64,128)",
    )
    add(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="prompt lengths in tokens: a CSV with a column num_prefill_tokens (or a name that "
        f"other public traces use), or one number a line; default: {lengths.BUILT_IN}",
    )
    add("--scale", type=float, default=1.0, metavar="F", help="factor for lengths (1)")
    add(
        "--load",
        type=float,
        default=0.8,
        metavar="F",
        help="of the part with arrivals: work that comes per work that can be done (0.8)",
    )
    add("--rate", type=float, metavar="F", help="prompts a second there, instead of --load")
    add(
        "--parts",
        default=",".join(PARTS),
        metavar="NAME,NAME",
        help=f"which parts to run ({','.join(PARTS)})",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write order.json and order.svg."""
    least = {"requests": 2, "batches": 1, "chunk": 1, "scale": 1e-6, "load": 1e-6, "rate": 1e-6}
    parts = setting.names(options.parts, "--parts", PARTS)
    setting.check(options, **least)
    known = lengths.read_lengths(options.lengths) if options.lengths else None
    console = setting.console()
    results: dict[str, Any] = {}
    with Progress(console=console) as progress, ExitStack() as stack:
        bench = _Bench(options, known, progress, stack)
        results["conditions"] = bench.conditions
        for part in parts:
            results[part] = getattr(bench, part)()
            setting.write_json(options.output / "order.json", results)
    order_report.show(console, results)
    if "queue" in results:
        order_report.draw(results, options.output / "order.svg")
    console.print(f"written: {options.output}/order.json, order.svg")
    return 0


def poisson(count: int, rate: float, rng: Random) -> list[float]:
    """Times at which `count` prompts come, `rate` of them per second."""
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))


def turn_of(answer: dict[str, Any]) -> Turn:
    """The figures of an answer of `vllm_tetri.bench.engine`."""
    budget = answer["budget_tokens"]
    busy = [step for step in answer["steps"] if step["unfinished_tokens"] >= budget]
    pairs = zip(answer["ttft_s"], answer["computing_s"], strict=True)
    return Turn(
        ttft_s=answer["ttft_s"],
        waiting_s=[ttft - computing for ttft, computing in pairs],
        total_s=answer["total_s"],
        steps=len(answer["steps"]),
        full_part=sum(step["tokens"] == budget for step in busy) / len(busy) if busy else None,
    )


def ours(policy: PrefillPolicy, sched_batch: int, *, pad: bool = False) -> System:
    """Our engine with this order."""
    name = policy if policy is PrefillPolicy.FCFS else f"{policy} {sched_batch}"
    question = {"policy": policy.value, "sched_batch": sched_batch, "pad": pad}
    return System(f"{name} padded" if pad else name, "ours", question)


class _Bench:
    """The two engines while the benchmark runs."""

    def __init__(
        self,
        options: argparse.Namespace,
        known: Sequence[int] | None,
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        self._options = options
        self._known = known
        self._progress = progress
        self._rng = Random(options.seed)
        task = progress.add_task("starting two engines", total=None)
        cores = setting.cores(options)
        words = setting.engines(options)
        self._engines = {
            name: stack.enter_context(
                EngineProcess(serve, cores, options.output / f"engine-{name}.log")
            )
            for name, serve in (("ours", words.ours), ("stock", words.stock))
        }
        facts = {name: engine.ready() for name, engine in self._engines.items()}
        progress.remove_task(task)
        self._longest_tokens = facts["ours"]["window"] - 1
        self._default_tokens = facts["stock"]["budget_tokens"]
        self.conditions = {
            "model": setting.model_name(options),
            "lengths": str(options.lengths.name) if options.lengths else lengths.BUILT_IN,
            "scale": options.scale,
            "requests": options.requests,
            "repeats": options.repeats,
            "seed": options.seed,
            "cores": len(cores),
            "engines": facts,
        }

    def queue(self) -> dict[str, Any]:
        """Everything is there when the time starts."""
        fcfs = ours(PrefillPolicy.FCFS, self._options.batches[0])
        others = (PrefillPolicy.SJF, PrefillPolicy.LJF, PrefillPolicy.SRTF)
        systems = [
            *self._stock(),
            fcfs,
            *(ours(policy, batch) for policy in others for batch in self._options.batches),
        ]
        return self._repeat("queue", systems, lambda count: [])

    def arrivals(self) -> dict[str, Any]:
        """Prompts come one by one; so there are chunks that are not full."""
        batch = self._options.batches[0]
        systems = [
            *self._stock(),
            *(ours(policy, batch) for policy in PrefillPolicy),
            ours(PrefillPolicy.SJF, batch, pad=True),
        ]
        cost_s, mean_tokens = self._cost_s(), self._mean_tokens()
        rate = self._options.rate or self._options.load / (cost_s * mean_tokens)
        found = self._repeat("arrivals", systems, lambda count: poisson(count, rate, self._rng))
        return {"rate": rate, "load": rate * mean_tokens * cost_s, **found}

    def overhead(self) -> dict[str, Any]:
        """What the scheduler takes of a step while many prompts wait."""
        batches = sorted({min(self._options.batches), max(self._options.batches)})
        others = (PrefillPolicy.SJF, PrefillPolicy.LJF, PrefillPolicy.SRTF)
        systems = [
            self._stock()[-1],
            ours(PrefillPolicy.FCFS, batches[0]),
            *(ours(policy, batch) for policy in others for batch in batches),
        ]
        steps: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
        task = self._progress.add_task("overhead", total=self._options.repeats * len(systems))
        for repeat in range(self._options.repeats):
            prompts = self._lengths(QUEUED + _MORE_QUEUED)
            for system in self._rng.sample(systems, len(systems)):
                answer = self._ask(system, prompts, [], repeat, least_queued=QUEUED)
                # The first step may still warm something up.
                steps[system.name] += answer["steps"][1:]
                self._progress.advance(task)
        return {
            name: {
                key: [step[key] for step in taken] for key in ("schedule_s", "update_s", "requests")
            }
            for name, taken in steps.items()
        }

    # -- inside ---------------------------------------------------------------------

    def _stock(self) -> list[System]:
        """With its default budget, and with ours."""
        chunk = self._options.chunk
        return [
            System(f"stock, {self._default_tokens} a step", "stock"),
            System(f"stock, {chunk} a step", "stock", {"budget_tokens": chunk}),
        ]

    def _repeat(self, name: str, systems: Sequence[System], arrivals: Arrivals) -> dict[str, Any]:
        """The same prompts for every system within a repeat, the systems in random order."""
        turns: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
        lengths_of: list[list[int]] = []
        task = self._progress.add_task(name, total=self._options.repeats * len(systems))
        self._warm_up(systems)
        for repeat in range(self._options.repeats):
            prompts = self._lengths(self._options.requests)
            lengths_of.append(prompts)
            times = arrivals(len(prompts))
            for system in self._rng.sample(systems, len(systems)):
                turn = turn_of(self._ask(system, prompts, times, repeat))
                turns[system.name].append(asdict(turn))
                self._progress.advance(task)
        return {"lengths": lengths_of, "systems": turns}

    def _warm_up(self, systems: Sequence[System]) -> None:
        """What an engine does for the first time takes longer."""
        tokens = min(self._longest_tokens, 2 * self._default_tokens)
        for system in systems:
            self._ask(system, [tokens], [], 0)

    def _cost_s(self) -> float:
        """Seconds a token while the engine is never idle."""
        fcfs = ours(PrefillPolicy.FCFS, 1)
        prompts = self._lengths(self._options.requests)
        return float(self._ask(fcfs, prompts, [], 0)["total_s"]) / sum(prompts)

    def _mean_tokens(self) -> float:
        if self._known is None:
            many = self._lengths(10_000, Random(0))
        else:
            many = [
                min(max(round(each * self._options.scale), 1), self._longest_tokens)
                for each in self._known
            ]
        return sum(many) / len(many)

    def _lengths(self, count: int, rng: Random | None = None) -> list[int]:
        return lengths.sample(
            self._known,
            count,
            rng or self._rng,
            scale=self._options.scale,
            longest=self._longest_tokens,
        )

    def _ask(
        self, system: System, prompts: list[int], times: list[float], seed: int, **more: Any
    ) -> dict[str, Any]:
        return self._engines[system.engine].ask(
            lengths=prompts, arrivals_s=times, seed=seed, **system.question, **more
        )
