"""Prefix caches in the simulator, and what reporting them costs.

`caches TRACE.jsonl` replays one of Mooncake's traces, which name the blocks of prompts, on clusters
of several sizes, as many times faster as a cluster has instances, times `--speed`. Every mode gets
the same requests and engines. Best possible is one cache with the memory of all instances that
knows every prompt as soon as it arrives, with LRU (what engines do), and with Belady's rule, which
knows the future. `caches --traffic` measures real reports of one instance whose blocks turn over.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from examples.benchmarks.cluster import Site, conditions
from examples.benchmarks.figures import Results
from examples.benchmarks.rivals.caches import MODES
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.policy.residency import Residency, names_of
from vllm_tetri.sim.cluster import run
from vllm_tetri.sim.config import ClusterConfig, EngineConfig, make_instances, of_profile
from vllm_tetri.sim.cost.profiles import profile
from vllm_tetri.sim.figures import figures
from vllm_tetri.sim.links import link
from vllm_tetri.sim.modes import AdaptiveMode, LeastInFlight, SimMode, SplitMode, WholeMode
from vllm_tetri.sim.workload import NAME_TOKENS, RequestSpec, predicted, read_trace, with_names
from vllm_tetri.types import InstanceId

OURS: dict[str, type[SimMode]] = {
    "ours, whole": WholeMode,
    "ours, adaptive": AdaptiveMode,
    "ours, split": SplitMode,
}
NO_FETCHES: dict[str, Callable[[ClusterConfig], Any]] = {
    f"{name}, no fetches": type("NoFetches", (mode,), {"may_fetch": False})
    for name, mode in OURS.items()
}
SYSTEMS: dict[str, Callable[[ClusterConfig], Any]] = {
    **OURS,
    **NO_FETCHES,
    "least in flight": LeastInFlight,
    **MODES,
}
PREFILL_PART = 0.625  # of the instances of a split: prompts are 35 times as long as outputs
SLO = Objective(ttft_s=5.0, tpot_s=0.05)
KEPT = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "itl_p99_s", "jct_mean_s", "good", "split")
BLOCK_TOKENS, PERIOD_S = 16, 0.1


# -- the best possible -------------------------------------------------------------------


def best_hits(specs: Sequence[RequestSpec], most_names: int) -> tuple[float, float]:
    """Return the part of all prompt tokens that one cache of so many names would have, with LRU
    and with Belady's rule."""
    following: list[dict[int, float]] = []  # the next request with each name, by request
    seen: dict[int, float] = {}
    for number in reversed(range(len(specs))):
        following.append({name: seen.get(name, inf) for name in specs[number].names})
        seen.update(dict.fromkeys(specs[number].names, number))
    following.reverse()
    recent = [dict.fromkeys(spec.names, -float(number)) for number, spec in enumerate(specs)]
    tokens = sum(spec.prompt_tokens for spec in specs)
    return (_hits(specs, most_names, recent) / tokens, _hits(specs, most_names, following) / tokens)


def _hits(specs: Sequence[RequestSpec], most: int, ranks: list[dict[int, float]]) -> int:
    """Return hits in tokens if the name of the highest rank goes first, and of equal ones that
    which is furthest from the start of its prompt."""
    cache, heap, hits = dict[int, float](), list[tuple[float, int, int]](), 0
    for spec, ranked in zip(specs, ranks, strict=True):
        for name in spec.prompt_names:
            if name not in cache:
                break
            hits += NAME_TOKENS
        for position, (name, rank) in enumerate(ranked.items()):
            cache[name] = rank
            heappush(heap, (-rank, -position, name))
        while len(cache) > most:
            rank, _, name = heappop(heap)
            if cache.get(name) == -rank:  # else it was used since
                del cache[name]
    return hits


# -- clusters ----------------------------------------------------------------------------


def simulate(
    system: str,
    count: int,
    engine: EngineConfig,
    specs: Sequence[RequestSpec],
    progress: Progress,
    bytes_per_s: float | None = None,
) -> dict[str, float]:
    """Return the figures of one system, whose KV is sent so fast."""
    prefill = round(count * PREFILL_PART) if system.startswith("ours, split") else 0
    decode = count - prefill if prefill else 0
    instances = make_instances(prefill, decode, count - prefill - decode, engine=engine)
    task = progress.add_task(f"{count} instances, {system}", total=len(specs))
    begun_s = time.process_time()
    cluster = ClusterConfig(instances, SYSTEMS[system], link=bytes_per_s)
    outcome = run(cluster, specs, on_end=partial(progress.advance, task))
    found = figures(outcome.served, SLO)
    return {
        "hits": found["cached"],
        "fetched": found["fetched"],
        **{name: found[name] for name in KEPT},
        "busy": sum(outcome.busy.values()) / count,
        "preemptions": outcome.preemptions,
        "cpu_s": time.process_time() - begun_s,
    }


def clusters(options: argparse.Namespace, results: Results, progress: Progress) -> None:
    trace = read_trace(options.trace)[: options.requests]
    engine = replace(
        of_profile(EngineConfig(chunk_tokens=options.chunk_size), profile(options.profile)),
        arena_tokens=1 << 18,
    )
    bytes_per_s = options.link and link(options.link)
    for count in options.instances:
        sooner = [(at_s / options.speed / count, *lengths) for at_s, *lengths in trace]
        specs = with_names(predicted(sooner, 1.0, 0), options.trace)
        lru, belady = best_hits(specs, count * engine.pool_tokens // NAME_TOKENS)
        for system in options.systems or SYSTEMS:
            if not results.has(instances=count, system=system):
                found = simulate(system, count, engine, specs, progress, bytes_per_s)
                results.add(instances=count, system=system, lru=lru, belady=belady, **found)


# -- reports -----------------------------------------------------------------------------


def traffic(turnover: int, prompt_blocks: int) -> dict[str, float]:
    """Return what an instance that caches and evicts `turnover` blocks a second sends, and what
    that takes of a core there and at a router; requests of `prompt_blocks`, of which two thirds
    are new, end as often as that makes new blocks."""
    from vllm_tetri.engine.compat import BlockRemoved, BlockStored
    from vllm_tetri.engine.residency import CacheLog
    from vllm_tetri.messages import CacheReport, decode_to_router, encode

    pool = SimpleNamespace(
        enable_caching=True, enable_kv_cache_events=True, get_cached_block=lambda *_: None
    )
    scheduler: Any = SimpleNamespace(
        kv_event_publisher=SimpleNamespace(publish=lambda _: None),
        kv_cache_manager=SimpleNamespace(block_pool=pool),
        hash_block_size=BLOCK_TOKENS,
    )
    log = CacheLog(scheduler, SimpleNamespace(prefix_group=(0, BLOCK_TOKENS, 0)))  # type: ignore[arg-type]
    residency, me, held = Residency(), InstanceId("both-0"), list[bytes]()
    num_blocks, tokens = round(turnover * PERIOD_S), prompt_blocks * BLOCK_TOKENS
    num_bytes, instance_s, router_s = 0, 0.0, 0.0
    for seq in range(1, 51):
        new = [os.urandom(32) for _ in range(num_blocks)]
        old, held = held[: -10 * num_blocks], held[-10 * num_blocks :] + new
        stored: dict[str, Any] = {"block_hashes": new, "parent_block_hash": None, "token_ids": []}
        stored |= dict.fromkeys(("lora_id", "medium", "lora_name")) | {"block_size": BLOCK_TOKENS}
        removed = [BlockRemoved(block_hashes=old, medium=None)] if old else []
        events = SimpleNamespace(events=[BlockStored(**stored), *removed])
        ended: list[Any] = [
            SimpleNamespace(
                num_computed_tokens=tokens, block_hashes=held[:prompt_blocks],
                request_id=f"cmpl-{seq}-{number}", num_prompt_tokens=tokens,
            )
            for number in range(round(num_blocks / (prompt_blocks * 2 / 3)))
        ]  # fmt: skip
        begun_s = time.process_time()
        log.publish(events)
        for request in ended:
            log.record_request(request)
        report = log.report(me, seq, is_all=False)
        assert report is not None
        frame = encode(report)
        sent_s = time.process_time()
        got = decode_to_router(frame)
        assert isinstance(got, CacheReport)
        residency.update(me, names_of(got.added), names_of(got.removed), is_all=False)
        assert len([names_of(each.names) for each in got.chains]) == len(ended)
        router_s += time.process_time() - sent_s
        instance_s += sent_s - begun_s
        num_bytes += len(frame)
    passed_s = 50 * PERIOD_S
    cores = {"instance_core": instance_s / passed_s, "router_core": router_s / passed_s}
    return {"kb_per_s": num_bytes / passed_s / 1e3, **cores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path, help="a *.jsonl file of Mooncake's")
    parser.add_argument("--instances", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="default: all")
    parser.add_argument("--requests", type=int, help="the first ones of the trace; all")
    parser.add_argument("--speed", type=float, default=0.25, help="times the instances; 0.25")
    parser.add_argument("--profile", default="roofline:llama-3-8b:h100", help="of every instance")
    parser.add_argument("--chunk-size", type=int, default=2048, help="of every instance; 2048")
    parser.add_argument("--link", help="between instances: roce, nvlink or Gbit/s; without a limit")
    parser.add_argument("--traffic", type=int, metavar="BLOCKS", help="measure reports instead")
    parser.add_argument("--output", type=Path, default=Path("caches.jsonl"), help="result file")
    options = parser.parse_args()
    if (options.trace is None) == (options.traffic is None):
        parser.error("give either a trace or --traffic")
    where = ("trace", "output")
    given = {key: str(each) for key, each in vars(options).items() if key not in where}
    site = Site("none", tuple(sorted(os.sched_getaffinity(0))), Path())
    by, metrics = ["instances", "system"], ["hits", "lru", "belady", *KEPT, "busy"]
    if options.traffic:
        by, metrics = ["turnover"], ["kb_per_s", "instance_core", "router_core"]
    results = Results.of(options.output, by, metrics, conditions(site, **given))
    if options.traffic:
        for repeat in range(5):
            results.add(turnover=options.traffic, repeat=repeat, **traffic(options.traffic, 752))
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        clusters(options, results, progress)


if __name__ == "__main__":
    main()
