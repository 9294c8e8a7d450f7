"""`vllm-tetri bench flip`: a load that swings between prefill and decode, and who follows it.

Phases of code (long prompts) and of conversation (long answers) come to a few instances
whose roles are fixed, in every split, or flipped by a policy of the router. Instances
stay for all of it: between two runs the router is exchanged and roles are set by flips.
All keep the pace of a device of their own (`vllm_tetri.bench.pace`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import count as count_up
from pathlib import Path
from random import Random
from typing import Any

from rich.progress import Progress, TaskID

from vllm_tetri.bench import arrivals, fleet, setting
from vllm_tetri.bench.arrivals import Answered, Arrival, Kind, Length, Slo, Source
from vllm_tetri.bench.fleet import Fleet, Member, pool
from vllm_tetri.bench.flip import report as flip_report
from vllm_tetri.bench.flip.run import Look, Run, Watch, run_of
from vllm_tetri.bench.flip.times import Times, time_flips
from vllm_tetri.errors import ConfigError
from vllm_tetri.types import Role

POLICIES = ("idle", "threshold", "balance")
_NOBODY = "off"
# In a second of the device one instance computes 1,490 prompt tokens, so 0.9 prompts of
# code or 1.35 of conversation; it writes 155 tokens of conversation (six at a time fill
# 8,192 tokens of KV, 39 ms a step), so 0.74 answers. At these rates two prefill instances
# are busy for 3/4 of code and one has 1.5 times too much; of conversation two decode
# instances are busy for 2/3, one has 1.35 times too much, and one prefills for 3/4.
_RATES = [1.3, 1.0]
_LIMIT_S = 1800.0
_WARM_UP = 4  # requests per instance and split


class Load(StrEnum):
    """What comes: the two kinds in turn, or one of them all the time."""

    SWING = "swing"
    CODE = "code"
    CONVERSATION = "conversation"


@dataclass(frozen=True, slots=True)
class System:
    """A split that instances start from, and who flips them (`--flip`)."""

    name: str
    prefills: int
    flip: str

    @property
    def is_fixed(self) -> bool:
        """Whether roles stay as they are."""
        return self.flip == _NOBODY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or name of a small model with a tokenizer")
    add("--instances", type=int, default=3, metavar="N", help="each takes about 1.2 GB (3)")
    add("--phase", type=float, default=60.0, metavar="SECONDS", help="length of a phase (60)")
    add("--phases", type=int, default=4, metavar="N", help="phases of a run (4)")
    add(
        "--rates",
        type=setting.decimals,
        default=_RATES,
        metavar="CODE,CONVERSATION",
        help="requests per second; the default suits 3 instances (1.3,1)",
    )
    for kind in Kind:
        add(
            f"--{kind}",
            type=Path,
            metavar="FILE",
            help=f"CSV with ContextTokens and GeneratedTokens, such as the {kind} trace of Azure's "
            "LLM inference dataset 2023; default: drawn like it",
        )
    add("--longest-prompt", type=int, default=3500, metavar="N", help="prompts are cut (3500)")
    add("--longest", type=int, default=512, metavar="N", help="answers are cut (512)")
    add(
        "--kv-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens whose KV an instance can hold (8192)",
    )
    add(
        "--flip-after",
        type=float,
        metavar="SECONDS",
        help="how long idle and threshold look before they flip (a quarter of a phase)",
    )
    add("--slo-ttft", type=float, default=5.0, metavar="SECONDS", help="to the first token (5)")
    add("--slo-tpot", type=float, default=0.1, metavar="SECONDS", help="per further token (0.1)")
    add("--systems", metavar="NAME,NAME", help="fixed splits such as 2P1D, and policies (all)")
    add("--loads", default=",".join(Load), metavar="NAME,NAME", help="which to run (all)")
    add(
        "--timing",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="flip one instance after the other for so long, under code; 0: do not (120)",
    )
    add("--repeats", type=int, default=3, metavar="N", help="with other requests each (3)")
    fleet.add_common(parser, scale=0.5)
    setting.add_place(parser, "flip", cores=2)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write flip.json and flip.svg."""
    _check(options)
    known = systems(options.instances)
    wanted = setting.names(options.systems or ",".join(known), "--systems", list(known))
    loads = [Load(name) for name in setting.names(options.loads, "--loads", list(Load))]
    sources = {kind: _source(options, kind) for kind in Kind}
    console = setting.console()
    path = options.output / "flip.json"
    fresh: dict[str, Any] = {"conditions": _conditions(options, sources), "loads": {}}
    results = fleet.kept(options, path, fresh)
    missing = [
        (repeat, load, known[name])
        for repeat in range(options.repeats)
        for load in loads
        for name in Random(f"{options.seed} {repeat} {load}").sample(wanted, len(wanted))
        if len(results["loads"].get(load, {}).get(name, [])) <= repeat
    ]
    is_timed = options.timing > 0 and "timing" not in results
    if missing or is_timed:
        with Progress(console=console) as progress:
            task = progress.add_task("starting", total=len(missing) + is_timed)
            with _warm_fleet(options, sources, progress, task) as cluster:
                if is_timed:
                    progress.update(task, description="timing flips")
                    times = _time(cluster, options, sources)
                    results["timing"] = [asdict(each) for each in times]
                    setting.write_json(path, results)
                    progress.advance(task)
                runs = _measure(cluster, options, sources, missing, progress, task)
                for load, name, found in runs:
                    results["loads"].setdefault(load, {}).setdefault(name, []).append(asdict(found))
                    setting.write_json(path, results)
    flip_report.show(console, results)
    flip_report.draw(results, options.output / "flip.svg")
    console.print(f"written: {path}, flip.svg")
    return 0


def systems(instances: int) -> dict[str, System]:
    """Every fixed split of so many instances, and every policy; those start from the most
    even split, where the odd instance prefills."""
    splits = [
        System(f"{prefills}P{instances - prefills}D", prefills, _NOBODY)
        for prefills in range(1, instances)
    ]
    flipping = [System(name, (instances + 1) // 2, name) for name in POLICIES]
    return {each.name: each for each in [*splits, *flipping]}


def kinds_of(load: Load, phases: int, repeat: int) -> list[Kind]:
    """What each phase has; a swing begins with the other kind in every other repeat."""
    if load is not Load.SWING:
        return [Kind(load.value)] * phases
    both = list(Kind)
    return [both[(repeat + phase) % len(both)] for phase in range(phases)]


def moves(roles: Mapping[str, str], prefills: int) -> list[tuple[str, Role]]:
    """The fewest flips that leave so many prefill instances, as names and new roles."""
    names = {
        role: sorted(name for name in roles if roles[name] == role)
        for role in (Role.PREFILL, Role.DECODE)
    }
    surplus = len(names[Role.PREFILL]) - prefills
    if surplus > 0:
        return [(name, Role.DECODE) for name in names[Role.PREFILL][-surplus:]]
    return [(name, Role.PREFILL) for name in names[Role.DECODE][:-surplus]]


# -- options -----------------------------------------------------------------------


def _check(options: argparse.Namespace) -> None:
    if options.flip_after is None:
        options.flip_after = options.phase / 4
    setting.check(
        options,
        instances=3,
        phase=1,
        phases=1,
        rates=0.001,
        longest_prompt=1,
        longest=2,
        kv_tokens=fleet.WINDOW_TOKENS,
        flip_after=0.001,
        slo_ttft=0.001,
        slo_tpot=0.001,
        scale=0.01,
    )
    if len(options.rates) != len(Kind):
        raise ConfigError(f"--rates: {len(Kind)} numbers, of {' and '.join(Kind)}")
    if options.longest_prompt + options.longest > fleet.WINDOW_TOKENS:
        raise ConfigError(
            f"--longest-prompt {options.longest_prompt} and --longest {options.longest}: together "
            f"at most {fleet.WINDOW_TOKENS}"
        )


def _source(options: argparse.Namespace, kind: Kind) -> Source:
    path = _trace(options, kind)
    known = arrivals.read(path, f"--{kind}") if path else []
    return Source(kind, known, Length(options.longest_prompt, options.longest))


def _trace(options: argparse.Namespace, kind: Kind) -> Path | None:
    found: Path | None = getattr(options, kind)
    return found


def _conditions(options: argparse.Namespace, sources: Mapping[Kind, Source]) -> dict[str, Any]:
    traces = {kind: _trace(options, kind) for kind in Kind}
    return fleet.common(
        options,
        **{kind: path.name if path else sources[kind].text() for kind, path in traces.items()},
        instances=options.instances,
        phase_s=options.phase,
        phases=options.phases,
        rates=options.rates,
        longest_prompt=options.longest_prompt,
        longest=options.longest,
        flip_after_s=options.flip_after,
        slo_ttft_s=options.slo_ttft,
        slo_tpot_s=options.slo_tpot,
        scale=options.scale,
    )


# -- measuring ---------------------------------------------------------------------


@contextmanager
def _warm_fleet(
    options: argparse.Namespace, sources: dict[Kind, Source], progress: Progress, task: TaskID
) -> Iterator[Fleet]:
    with Fleet(
        options.model,
        options.tail,
        scale=options.scale,
        cores=setting.cores(options),
        folder=options.output,
    ) as cluster:
        _start(cluster, options)
        for system in filter(lambda each: each.is_fixed, systems(options.instances).values()):
            progress.update(task, description=f"warming up {system.name}")
            _arrange(cluster, system, options)
            _warm_up(cluster, sources[Kind.CONVERSATION], options)
        yield cluster


def _time(cluster: Fleet, options: argparse.Namespace, sources: dict[Kind, Source]) -> list[Times]:
    """Flips under half of the load of code, of which one instance can do the prompts."""
    rng = Random(f"{options.seed} timing")
    rates = {Kind.CODE: options.rates[0] / 2}
    asks = arrivals.draw([Kind.CODE], options.timing, rates, sources, rng)
    _arrange(cluster, systems(options.instances)[f"{options.instances - 1}P1D"], options)
    return time_flips(cluster, lambda: _send(cluster, asks, rng, options))


def _measure(
    cluster: Fleet,
    options: argparse.Namespace,
    sources: dict[Kind, Source],
    missing: Sequence[tuple[int, Load, System]],
    progress: Progress,
    task: TaskID,
) -> Iterator[tuple[str, str, Run]]:
    """Load, name of the system, and run of each."""
    for repeat, load, system in missing:
        progress.update(task, description=f"{load}, {system.name}, repeat {repeat + 1}")
        tries = (_try(cluster, options, sources, repeat, load, system) for _ in count_up())
        found = fleet.in_time(tries, lambda run: run.late_s / run.overall.jct_s)
        yield load.value, system.name, found
        progress.advance(task)


def _start(cluster: Fleet, options: argparse.Namespace) -> None:
    # Else only those that start as prefill instances refuse prompts when they have many.
    unbounded = ("--max-num-queued-tokens", str(1 << 30))
    own = ("--tetri-predictor", "oracle", *pool(options.kv_tokens), *unbounded)
    prefills = systems(options.instances)[POLICIES[0]].prefills
    roles = [Role.PREFILL] * prefills + [Role.DECODE] * (options.instances - prefills)
    cluster.start([Member(f"instance-{place}", role, own) for place, role in enumerate(roles)])


def _arrange(cluster: Fleet, system: System, options: argparse.Namespace) -> None:
    """Give instances the roles that the system starts from, and the router its policy."""
    cluster.restart_router(fleet.KEEP_ROLES)
    roles = {name: row["role"] for name, row in cluster.at_rest().items()}
    for name, role in moves(roles, system.prefills):
        cluster.flip(name, role)
    if not system.is_fixed:
        after_s = options.flip_after * options.scale
        cluster.restart_router(["--flip", system.flip, "--flip-after", str(after_s)])


def _warm_up(cluster: Fleet, source: Source, options: argparse.Namespace) -> None:
    rng = Random(f"{options.seed} warm-up")
    asks = [Arrival(0.0, 0, source.draw(rng)) for _ in range(_WARM_UP * options.instances)]
    _send(cluster, asks, rng, options)


def _try(
    cluster: Fleet,
    options: argparse.Namespace,
    sources: dict[Kind, Source],
    repeat: int,
    load: Load,
    system: System,
) -> Run:
    """One run, over the same requests at the same times whatever the system."""
    rng = Random(f"{options.seed} {repeat} {load}")
    kinds = kinds_of(load, options.phases, repeat)
    rates = dict(zip(Kind, options.rates, strict=True))
    asks = arrivals.draw(kinds, options.phase, rates, sources, rng)
    if not asks:
        raise ConfigError("--rates: no request comes in so short a time")
    _arrange(cluster, system, options)
    before = cluster.at_rest()
    cluster.clear_counts()
    answered, looks = _send(cluster, asks, rng, options)
    after, counts = cluster.at_rest(), cluster.counts().values()
    return run_of(
        answered,
        kinds,
        Slo(options.slo_ttft, options.slo_tpot),
        looks=looks,
        before=before,
        after=after,
        busy_s=sum(each.paced_s for each in counts),
        late_s=max(each.late_s for each in counts),
        scale=options.scale,
    )


def _send(
    cluster: Fleet, asks: Sequence[Arrival], rng: Random, options: argparse.Namespace
) -> tuple[list[Answered], list[Look]]:
    requests = arrivals.bodies(cluster.served_name, asks, rng)
    started = time.monotonic()
    with Watch(cluster.instances, started) as watch:
        answered = arrivals.send(
            cluster.url, asks, requests, started=started, scale=options.scale, limit_s=_LIMIT_S
        )
    return answered, watch.looks
