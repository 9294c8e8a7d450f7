"""`vllm-tetri bench dispatch`: which decode instance gets a request (Figure 19).

Prefill instances choose among 2 to 8 decode instances for more requests at once than
these can hold; predictions are true. The decode instances stay while the prefill
instances are exchanged for others with the next policy. All keep the pace of a device
of their own (`vllm_tetri.bench.pace`), so cores that they share do not show.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count as count_up
from random import Random
from typing import Any

from rich.progress import Progress, TaskID

from vllm_tetri.bench import dispatch_report, fleet, setting, workload
from vllm_tetri.bench.fleet import Fleet, Member, pool
from vllm_tetri.policy.dispatch import DispatchPolicy
from vllm_tetri.policy.lengths import HEAVY_TOKENS

_LIMIT_S = 1800.0
_WARM_UP = 4  # requests per decode instance


@dataclass(frozen=True, slots=True)
class Share:
    """What one decode instance got of a run, and when it was done with it."""

    heavy: int
    light: int
    tokens: int
    done_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one repeat, in seconds of the imagined device.

    Attributes:
        decode_s: From the first first token to the last last one.
        jct_s: Mean from sending to the last token.
        late_s: The furthest that a step of any instance was behind its pace.
        preemptions: Of all decode instances.
        scale: Of the pace it was run at.
    """

    shares: list[Share]
    decode_s: float
    jct_s: float
    late_s: float
    preemptions: int
    scale: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or name of a small model with a tokenizer")
    add(
        "--instances",
        type=setting.numbers,
        default=[2, 4, 8],
        metavar="N,N",
        help="numbers of decode instances; each takes about 1.2 GB (2,4,8)",
    )
    add("--prefill", type=int, default=2, metavar="N", help="prefill instances (2)")
    add("--requests", type=int, default=32, metavar="N", help="per decode instance, at once (32)")
    add(
        "--kv-tokens",
        type=int,
        default=6144,
        metavar="N",
        help="tokens whose KV a decode instance can hold (6144)",
    )
    add(
        "--longest",
        type=int,
        default=512,
        metavar="N",
        help="answers are cut to so many tokens; else a single one decides how long all take (512)",
    )
    fleet.add_arguments(parser, scale=1.0)
    add("--repeats", type=int, default=5, metavar="N", help="with other requests each (5)")
    add(
        "--policies",
        default=",".join(DispatchPolicy),
        metavar="NAME,NAME",
        help="which to run (all)",
    )
    setting.add_place(parser, "dispatch", cores=2)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write dispatch.json and dispatch.svg."""
    setting.check(options, requests=2, kv_tokens=4096, instances=1, prefill=1, scale=0.01)
    policies = setting.names(options.policies, "--policies", list(DispatchPolicy))
    known = workload.read(options.prompts) if options.prompts else None
    console = setting.console()
    path = options.output / "dispatch.json"
    fresh: dict[str, Any] = {
        "conditions": fleet.conditions(options, prefill=options.prefill, longest=options.longest),
        "instances": {},
    }
    results = fleet.kept(options, path, fresh)
    with Progress(console=console) as progress:
        for count in options.instances:
            total = len(policies) * options.repeats
            task = progress.add_task(f"{count} decode instances", total=total)
            found = results["instances"].setdefault(str(count), {})
            for policy, runs in _measure(options, count, policies, known, progress, task):
                found[policy] = [asdict(each) for each in runs]
                setting.write_json(path, results)
    dispatch_report.show(console, results)
    dispatch_report.draw(results, options.output / "dispatch.svg")
    console.print(f"written: {path}, dispatch.svg")
    return 0


def _measure(
    options: argparse.Namespace,
    count: int,
    policies: Sequence[str],
    known: Sequence[workload.Ask] | None,
    progress: Progress,
    task: TaskID,
) -> Iterator[tuple[str, list[Run]]]:
    """Each policy's runs with so many decode instances."""
    order = Random(f"{options.seed} {count}").sample(policies, len(policies))
    with Fleet(
        options.model,
        options.tail,
        scale=options.scale,
        cores=setting.cores(options),
        folder=options.output,
    ) as cluster:
        own = pool(options.kv_tokens)
        decodes = [Member(f"decode-{index}", "decode", own) for index in range(count)]
        cluster.start([*decodes, *_prefills(options, order[0])])
        for position, policy in enumerate(order):
            prefills = _prefills(options, policy)
            if position:
                cluster.start(prefills)
            runs = []
            for repeat in range(-1, options.repeats):
                # The first one is for warming up.
                requests = (_WARM_UP if repeat < 0 else options.requests) * count
                asks = workload.pick(
                    known,
                    requests,
                    Random(f"{options.seed} {repeat}"),
                    longest_tokens=options.longest,
                )
                names = [each.name for each in decodes]
                if repeat < 0:
                    _send(cluster, asks, names, options.scale)
                    continue
                tries = (_send(cluster, asks, names, options.scale) for _ in count_up())
                runs.append(fleet.in_time(tries, lambda run: run.late_s / run.decode_s))
                progress.advance(task)
            yield policy, runs
            cluster.stop([each.name for each in prefills])


def _prefills(options: argparse.Namespace, policy: str) -> list[Member]:
    words = ("--tetri-dispatch-policy", policy, "--tetri-predictor", "oracle")
    return [
        Member(f"prefill-{index}-{policy}", "prefill", words) for index in range(options.prefill)
    ]


def _send(
    cluster: Fleet, asks: Sequence[workload.Ask], decodes: Sequence[str], scale: float
) -> Run:
    before = cluster.at_rest()
    cluster.clear_counts()
    answered = workload.send(cluster.url, cluster.served_name, asks, limit_s=_LIMIT_S)
    after = cluster.at_rest()
    return run_of(
        answered,
        decodes,
        scale=scale,
        late_s=max(each.late_s for each in cluster.counts().values()),
        preemptions=sum(
            after[name]["preemptions"] - before[name]["preemptions"] for name in decodes
        ),
    )


def run_of(
    answered: Sequence[workload.Answered],
    decodes: Sequence[str],
    *,
    scale: float,
    late_s: float,
    preemptions: int,
) -> Run:
    """The figures of a run: what each decode instance got, and how long all took."""
    first_s = min(each.first_s for each in answered)
    shares = []
    for name in decodes:
        own = [each for each in answered if each.decode == name]
        heavy = sum(each.output_tokens > HEAVY_TOKENS for each in own)
        shares.append(
            Share(
                heavy=heavy,
                light=len(own) - heavy,
                tokens=sum(each.output_tokens for each in own),
                done_s=max((each.done_s - first_s for each in own), default=0.0) / scale,
            )
        )
    return Run(
        shares=shares,
        decode_s=(max(each.done_s for each in answered) - first_s) / scale,
        jct_s=sum(each.done_s for each in answered) / len(answered) / scale,
        late_s=late_s / scale,
        preemptions=preemptions,
        scale=scale,
    )
