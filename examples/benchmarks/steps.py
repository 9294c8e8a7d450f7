"""CPU time of vLLM's scheduler in a step while prompts wait, by their order, beside stock.

No model runs: the schedulers are real, and every prompt ends with a token that is made up. For
each order stock gets the same prompts in the order in which ours started them, so that both
compute the same prompts per step, and takes its steps in turn with ours. Reports of caches rest on
vLLM's KV events, so stock is timed with them as well. All is done several times, and the quickest
of each step counts: what else runs on the machine only adds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.envs import enable_envs_cache
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from examples.benchmarks.client import random_prompt
from examples.benchmarks.cluster import Site, conditions
from examples.benchmarks.compare import heavy_tailed
from examples.benchmarks.figures import Results
from tests.engine.harness import BLOCK, Engine
from vllm_tetri.policy.order import ORDERS
from vllm_tetri.types import Role

WARM_UP = 20
SYSTEMS = ("ours", "stock", "stock, KV events")
NUM_BLOCKS = 8192
ARGS = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 256}
Step = tuple[float, float, list[str]]  # µs of `schedule` and `update_from_output`; what started


def requests_of(prompts: Sequence[tuple[str, list[int]]], engine: Engine) -> Iterator[Request]:
    """Make the requests of prompts, one by one."""
    for name, tokens in prompts:
        sampling = SamplingParams(max_tokens=1)
        yield Request(name, tokens, sampling, None, block_hasher=engine.hasher)


def play(scheduler: Any, requests: Iterator[Request], queued: int) -> Iterator[Step]:
    """Schedule steps, before each of which so many prompts wait."""
    while True:
        while len(scheduler.waiting) < queued:
            scheduler.add_request(next(requests))
        began = time.thread_time_ns()
        output = scheduler.schedule()
        scheduled = time.thread_time_ns()
        ids = list(output.num_scheduled_tokens)
        ended = [not scheduler.requests[each].is_prefill_chunk for each in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[[7] if each else [] for each in ended],
        )
        resumed = time.thread_time_ns()
        scheduler.update_from_output(output, result)
        now = time.thread_time_ns()
        new = [each.req_id for each in output.scheduled_new_reqs]
        yield (scheduled - began) / 1e3, (now - resumed) / 1e3, new


def stock(engine: Engine, chunk: int, *, has_events: bool) -> Scheduler:
    """Make vLLM's own scheduler, with as much KV and as many tokens a step."""
    config = copy.deepcopy(engine.config)
    config.kv_transfer_config = None
    config.scheduler_config.max_num_scheduled_tokens = chunk
    made = Scheduler(
        vllm_config=config,
        kv_cache_config=engine.cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )
    made.kv_cache_manager.block_pool.enable_kv_cache_events = has_events
    return made


def compare(folder: Path, policy: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time the steps of an order and of stock, in turn."""
    rng, most = Random(options.seed), ARGS["max_model_len"] - 1
    count, queued = options.steps + WARM_UP, options.queued
    lengths = [heavy_tailed(rng, 200, 1.2, most) for _ in range(queued + 4 * count)]
    prompts = {f"p{i}": random_prompt(each, rng) for i, each in enumerate(lengths)}
    found: dict[str, list[list[tuple[float, float, int]]]] = {each: [] for each in SYSTEMS}
    starts: list[str] = []
    for _ in range(options.repeats + 1):  # the first only tells what starts when
        engine = Engine(
            folder, Role.BOTH, num_blocks=NUM_BLOCKS, page=1, args=ARGS,
            prefill_policy=policy, sched_batch=batch, chunk_size=options.chunk,
        )  # fmt: skip
        ours = play(engine.scheduler, requests_of([*prompts.items()], engine), queued)
        if not starts:
            starts = [name for _ in range(count) for name in next(ours)[2]]
        else:
            ordered = [(each, prompts[each]) for each in dict.fromkeys([*starts, *prompts])]
            own = [stock(engine, options.chunk, has_events=each) for each in (False, True)]
            others = [play(each, requests_of(ordered, engine), queued) for each in own]
            turns = [[next(each) for each in (ours, *others)] for _ in range(count)][WARM_UP:]
            for name, steps in zip(SYSTEMS, zip(*turns, strict=True), strict=True):
                found[name].append([(a, b, len(new)) for a, b, new in steps])
            for each in own:
                each.shutdown()
        engine.close()
    return {name: np.min(each, axis=0) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queued", type=int, default=1000, help="prompts that wait; 1000")
    parser.add_argument("--steps", type=int, default=1000, help="per order; 1000")
    parser.add_argument("--chunk", type=int, default=256, help="prompt tokens per step; 256")
    parser.add_argument("--orders", default=",".join(ORDERS), help="all")
    parser.add_argument("--batches", default="16,128", help="--tetri-sched-batch; 16,128")
    parser.add_argument("--repeats", type=int, default=5, help="of every step; 5")
    parser.add_argument("--seed", type=int, default=0, help="of lengths; 0")
    parser.add_argument("--output", type=Path, default=Path("steps.jsonl"), help="result file")
    options = parser.parse_args()
    site = Site("none", tuple(sorted(os.sched_getaffinity(0))), Path())
    asked = {name: getattr(options, name) for name in ("queued", "steps", "chunk", "repeats")}
    kinds: dict[str, Any] = {
        "median": np.median,
        "p99": lambda values: np.quantile(values, 0.99),
        "mean": np.mean,
    }
    names = [f"{what}_{kind}_us" for what in ("schedule", "update") for kind in kinds]
    by, given = ["order", "batch", "system"], conditions(site, **asked)
    results = Results.of(options.output, by, [*names, "prompts"], given, is_new=True)
    enable_envs_cache()  # as EngineCore does
    gc.disable()
    for policy, batch in product(options.orders.split(","), options.batches.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found = compare(Path(folder), policy, int(batch), options)
        gc.collect()
        for system, times in found.items():
            taken = [float(kind(times[:, i])) for i in range(2) for kind in kinds.values()]
            cell = dict(zip(names, taken, strict=True)) | {"prompts": float(times[:, 2].mean())}
            results.add(order=policy, batch=int(batch), system=system, **cell)


if __name__ == "__main__":
    main()
