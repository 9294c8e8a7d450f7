"""`vllm-tetri bench admission`: who enters a decode batch, and what it costs (Figure 18).

One prefill and one decode instance with a small KV pool get more requests at once than
the pool can hold. Every system is a cluster of its own, started anew: a policy of the
decode instance and a predictor of the prefill instance. Both instances keep the pace of
a device of their own (`vllm_tetri.bench.pace`), so cores that they share do not show.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from rich.progress import Progress

from vllm_tetri.bench import admission_report, fleet, setting, workload
from vllm_tetri.bench.fleet import Fleet, Member, pool
from vllm_tetri.policy.admission import DecodePolicy

_PREFILL, _DECODE = "prefill-0", "decode-0"
_COUNTERS = ("preemptions", "swapped_out", "predictions_missed")
_LIMIT_S = 1800.0
_WARM_UP = 32  # requests


@dataclass(frozen=True, slots=True)
class System:
    """A policy of the decode instance, and where predictions come from."""

    policy: DecodePolicy
    predictor: str = "none"
    accuracy: float = 1.0

    @property
    def name(self) -> str:
        """In tables and files."""
        if self.policy is DecodePolicy.GREEDY:
            return str(self.policy)
        return f"{self.policy}, {self.source}"

    @property
    def source(self) -> str:
        """Of its predictions."""
        if self.predictor != "oracle":
            return "no predictor" if self.predictor == "none" else "real predictor"
        return f"oracle {self.accuracy:.1%}"

    def members(self, kv_tokens: int) -> list[Member]:
        """The cluster, whose decode instance holds the KV of so many tokens."""
        predictor = ["--tetri-predictor", self.predictor]
        if self.predictor == "oracle":
            predictor += ["--tetri-predictor-accuracy", str(self.accuracy)]
        decode = ["--tetri-decode-policy", self.policy.value, *pool(kv_tokens)]
        return [
            Member(_PREFILL, "prefill", tuple(predictor)),
            Member(_DECODE, "decode", tuple(decode)),
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one repeat, in seconds of the imagined device.

    Attributes:
        jct_s: From sending to the last token, per request.
        total_s: Until the last token of all.
        batch: Requests in a step of the decode instance, in the mean.
        late_s: The furthest that a step of either instance was behind its pace.
    """

    jct_s: list[float]
    total_s: float
    batch: float
    late_s: float
    counters: dict[str, int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or name of a small model with a tokenizer")
    add("--requests", type=int, default=256, metavar="N", help="sent at once (256)")
    add(
        "--kv-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens whose KV the decode instance can hold (8192)",
    )
    add(
        "--accuracies",
        type=lambda text: setting.decimals(text) if text else [],
        default=[1.0, 0.749],
        metavar="P,P",
        help="of predictions from the truth, empty for none (1,0.749)",
    )
    add("--predictor", metavar="FOLDER", help="a trained predictor to measure as well")
    fleet.add_arguments(parser, scale=0.25)
    add(
        "--policies",
        default=",".join(DecodePolicy),
        metavar="NAME,NAME",
        help=f"which to run ({','.join(DecodePolicy)})",
    )
    add("--repeats", type=int, default=3, metavar="N", help="with other requests each (3)")
    setting.add_place(parser, "admission", cores=2)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write admission.json and admission.svg."""
    setting.check(options, requests=2, kv_tokens=4096, accuracies=0, scale=0.01)
    known = workload.read(options.prompts) if options.prompts else None
    console = setting.console()
    systems = _systems(options)
    path = options.output / "admission.json"
    fresh: dict[str, Any] = {
        "conditions": fleet.conditions(options, scale=options.scale),
        "systems": {},
    }
    results = fleet.kept(options, path, fresh)
    with Progress(console=console) as progress:
        task = progress.add_task("requests", total=len(systems) * options.repeats)
        for system in Random(options.seed).sample(systems, len(systems)):
            progress.update(task, description=f"starting {system.name}")
            with _fleet(options) as cluster:
                cluster.start(system.members(options.kv_tokens))
                _send(cluster, workload.pick(known, _WARM_UP, Random(options.seed)), options)
                progress.update(task, description=system.name)
                runs = []
                for repeat in range(options.repeats):
                    asks = workload.pick(known, options.requests, _rng(options, repeat))
                    tries = (_send(cluster, asks, options) for _ in count())
                    done = fleet.in_time(tries, lambda run: run.late_s / run.total_s)
                    runs.append(asdict(done))
                    progress.advance(task)
            results["systems"][system.name] = runs
            setting.write_json(path, results)
    admission_report.show(console, results)
    admission_report.draw(results, options.output / "admission.svg")
    console.print(f"written: {path}, admission.svg")
    return 0


def _systems(options: argparse.Namespace) -> list[System]:
    sources = [("oracle", accuracy) for accuracy in options.accuracies]
    if options.predictor:
        sources.append((str(Path(options.predictor).resolve()), 1.0))
    policies = setting.names(options.policies, "--policies", list(DecodePolicy))
    reserving = [DecodePolicy(name) for name in policies if name != DecodePolicy.GREEDY]
    greedy = [System(DecodePolicy.GREEDY)] if DecodePolicy.GREEDY in policies else []
    return [*greedy, *(System(policy, *source) for source in sources for policy in reserving)]


def _rng(options: argparse.Namespace, repeat: int) -> Random:
    """The same requests for every system within a repeat."""
    return Random(f"{options.seed} {repeat}")


def _fleet(options: argparse.Namespace) -> Fleet:
    return Fleet(
        options.model,
        options.tail,
        scale=options.scale,
        cores=setting.cores(options),
        folder=options.output,
    )


def _send(cluster: Fleet, asks: Sequence[workload.Ask], options: argparse.Namespace) -> Run:
    before = cluster.at_rest()
    cluster.clear_counts()
    answered = workload.send(cluster.url, cluster.served_name, asks, limit_s=_LIMIT_S)
    after, counts = cluster.at_rest(), cluster.counts()
    scale = options.scale
    return Run(
        jct_s=[each.done_s / scale for each in answered],
        total_s=max(each.done_s for each in answered) / scale,
        batch=counts[_DECODE].requests / counts[_DECODE].steps,
        late_s=max(each.late_s for each in counts.values()) / scale,
        counters={
            name: sum(after[member][name] - before[member][name] for member in counts)
            for name in _COUNTERS
        },
    )
