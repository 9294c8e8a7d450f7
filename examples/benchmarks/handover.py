"""What a hand-over costs the client, token by token: the first token, and the pause after it.

Stock vLLM with its default token budget, stock with our chunk as its budget, and a cluster of one
prefill and one decode instance run at the same time and take turns in random order, one request at
a time. All get the same prompt. On a CPU host stock shares the prefill instance's core, which is
idle then; GPUs are shared as `--gpu-memory-utilization` says. The head of the result file has what
the prefill instance found of its hand-overs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from examples.benchmarks.client import Request, Target, random_prompt, send
from examples.benchmarks.cluster import (
    PASSIVE,
    System,
    add_site,
    conditions,
    get_json,
    our_cluster,
    parse,
    stock,
)
from examples.benchmarks.figures import Results
from vllm_tetri.launch.machine import is_cpu_build

TOKENS = 16
REST_S = 0.2  # so that nothing of one request takes time from the next
OVER = {"stock": "ttft_over_stock_ms", "stock, our chunk": "ttft_over_chunked_ms"}
SPLIT = ("--mode", "split", "--prefill", "1", "--decode", "1", "--flip", "off")


async def measure(target: Target, prompt: list[int]) -> dict[str, float]:
    """Send one request; return its first token, its second, and a usual step, in milliseconds."""
    reply = await send(target, Request(0.0, prompt, TOKENS))
    if reply.error or len(reply.gaps_us) < 3:
        raise RuntimeError(f"{target.url}: {reply.error or 'tokens did not come one by one'}")
    step_ms = median(reply.gaps_us[1:]) / 1e3
    return {
        "ttft_ms": 1e3 * reply.ttft_s,
        "step_ms": step_ms,
        "second_beyond_step_ms": reply.gaps_us[0] / 1e3 - step_ms,
    }


def measure_all(
    urls: Mapping[str, str], model: str, options: argparse.Namespace, results: Results
) -> None:
    """Measure every length on every system; the first round warms up."""
    rng = Random(options.seed)
    for length in options.input_lens:
        for repeat in range(options.num_prompts + 1):
            prompt = random_prompt(length, rng)
            cells: dict[str, dict[str, Any]] = {}
            for name in rng.sample(list(urls), len(urls)):
                time.sleep(REST_S)
                cells[name] = asyncio.run(measure(Target(urls[name], model), prompt))
            for name, cell in cells.items() if repeat else ():
                more = {
                    over: cell["ttft_ms"] - cells[each]["ttft_ms"] for each, over in OVER.items()
                }
                results.add(prompt=length, system=name, repeat=repeat, **cell, **more)


def sent(url: str, options: argparse.Namespace) -> dict[str, float]:
    """Return bytes of KV that all prompts had, how long after a prompt KV is there (a part that is
    the same for all, and one per token), and GB/s of the longest prompt's last chunk."""
    rows = get_json(f"{url}/tetri/v1/instances")["instances"]
    (row,) = (each for each in rows if each["role"] == "prefill")
    found = {name: row[name] for name in ("kv_bytes_sent", "handover_s", "handover_token_s")}
    asked_tokens = (options.num_prompts + 1) * sum(options.input_lens)
    last_tokens = min(max(options.input_lens), options.chunk)
    seconds = found["handover_s"] + last_tokens * found["handover_token_s"]
    num_bytes = last_tokens * found["kv_bytes_sent"] / asked_tokens
    return {**found, "GB_per_s": num_bytes / seconds / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_site(parser)
    parser.add_argument("--num-prompts", type=int, default=15, help="per length and system; 15")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prefill step; 256")
    parser.add_argument(
        "--input-lens",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[10, 100, 500, 1000],
        help="N,N prompt lengths; 10,100,500,1000",
    )
    parser.add_argument("--output", type=Path, default=Path("handover.jsonl"), help="result file")
    options, site = parse(parser)
    metrics = ["ttft_ms", *OVER.values(), "step_ms", "second_beyond_step_ms"]
    given = conditions(site, num_prompts=options.num_prompts, chunk=options.chunk)
    results = Results.of(options.output, ["prompt", "system"], metrics, given)
    chunked = ("--max-num-batched-tokens", str(options.chunk))
    first = site.cores[:1] if is_cpu_build() else site.cores
    chunk = ("--tetri-chunk-size", str(options.chunk))
    # What a thread starts ends with it: the threads outlive the systems.
    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        cluster = our_cluster(site, SPLIT, system=System(4, chunk))
        ours = threads.submit(stack.enter_context, cluster)
        others = {
            name: threads.submit(
                stack.enter_context, stock(site, log, System(4, words), first, (), PASSIVE)
            )
            for name, log, words in (
                ("stock", "stock", ()),
                ("stock, our chunk", "chunked", chunked),
            )
        }
        urls = {name: each.result() for name, each in others.items()}
        urls["ours"] = ours.result()["url"]
        measure_all(urls, site.name, options, results)
        results.head["handover"] = sent(urls["ours"], options)
    results.rewrite()


if __name__ == "__main__":
    main()
