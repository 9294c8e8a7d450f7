"""Stage C: full graphs, and a model of 8B's shape with made-up weights under this package's own
benchmarks. On a CPU the tests' tiny model shows that the steps work; its figures say nothing.

On one GPU the instances of a system share it. Where one system runs at a time, `up` divides its
memory; where several do, `--gpu-memory-utilization` says what must be free for each, and
`--kv-cache-memory-bytes` how much of it is KV.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.e2e.client import Answer, ask_all, flipped, load, order, until
from tests.e2e.cluster import Cluster, Stock, running, side_by_side
from tests.e2e.compare import merged, replies_to
from tests.e2e.prompts import STREAM, completion
from tests.gpu.reuse import benchmark, run
from tests.gpu.serving import PAIR, REST_S, TRIO
from tests.tiny_model import make_tokenizer, tiny_model

# Of log probabilities, where a step's size decides the last bit: the tiny model's are up to 0.20
# from those in float32 (1,171 tokens; in bfloat16 up to 1.8). Wrong KV moves them by several.
NEAR_TIE = 0.4
GRAPHS = ("--no-enforce-eager", "--dtype", "float16", "--gpu-memory-utilization", "0.1")
CAPTURED = "Graph capturing finished"  # says vLLM
LARGE = ("--dtype", "bfloat16", "--load-format", "dummy")
FULL = (*LARGE, "--no-enforce-eager", "--enable-prefix-caching")
SMALL = ("--dtype", "float32", "--enable-prefix-caching")
KV_BYTES = 12 << 30  # of all instances of a system together
SYSTEMS = "stock,stock-2048,stock-16384,split,adaptive-1p1d"
MOST_COMMIT_S = 0.05


def model_for(device: str, folder: Path) -> str:
    """The tiny model, or a folder with the configuration of Llama 3.1 8B and our tokenizer, and no
    weights: 7 billion parameters, because the vocabulary is the tokenizer's."""
    if device == "cpu":
        return str(tiny_model())
    from transformers import LlamaConfig

    target = folder / "shape-8b"
    target.mkdir(exist_ok=True)
    make_tokenizer(target)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(target)
    return str(target)


def graphs(device: str, folder: Path) -> dict[str, Any]:
    """Compiled, with full graphs and the attention kernels that vLLM chooses: outputs of stock and
    ours are the same up to the first token at which the two likeliest were nearly equal."""
    asked = [completion(length, max_tokens=48, logprobs=5) for length in range(20, 1500, 60)]
    stock = Stock(tiny_model(), folder, serve=GRAPHS)
    cluster = Cluster(tiny_model(), folder, roles=PAIR, serve=GRAPHS)
    with side_by_side(stock, cluster):
        theirs = asyncio.run(replies_to(stock.url, asked))
        ours = asyncio.run(replies_to(cluster.url, asked))
        cluster.rest(REST_S)
    for log in (folder / "stock.log", *cluster.logs.glob("*code-*.log")):
        assert CAPTURED in log.read_text(), f"no graph was captured: {log}"
    same = 0
    for body, mine, other in zip(asked, ours, theirs, strict=True):
        (a,), (b,) = merged(mine)["choices"], merged(other)["choices"]
        same += a["token_ids"] == b["token_ids"]
        problem = diverges(a, b)
        assert not problem, f"prompt of {len(body['prompt'])} tokens: {problem}"
    words = f"{same} of {len(asked)} outputs equal, the rest up to a near tie"
    return {"equal": same, "of": len(asked), "summary": words}


def diverges(mine: dict[str, Any], other: dict[str, Any]) -> str:
    """How two greedy outputs differ other than at a near tie; empty if they do not."""
    if len(mine["token_ids"]) != len(other["token_ids"]):
        return f"{len(mine['token_ids'])} tokens instead of {len(other['token_ids'])}"
    rows = zip(mine["token_ids"], other["token_ids"], mine["logprobs"]["token_logprobs"],
               other["logprobs"]["token_logprobs"], other["logprobs"]["top_logprobs"],
               strict=True)  # fmt: skip
    for at, (token, expected, value, wanted, top) in enumerate(rows):
        if token != expected:
            first, second = sorted(top.values())[-1:-3:-1]
            is_tie = first - second < NEAR_TIE
            return "" if is_tie else f"token {at}: {token}, not {expected} ({first} > {second})"
        if abs(value - wanted) > NEAR_TIE:
            return f"token {at}: log probability {value} instead of {wanted}"
    return ""


def bench(device: str, folder: Path) -> dict[str, Any]:
    """`vllm-tetri bench --mode split`: every request that stock completes, ours completes."""
    result, serve = folder / "bench.json", FULL if device == "cuda" else SMALL
    words = ["--num-prompts=256", "--input-len=1024", "--output-len=128", "--request-rate=8"]
    if device == "cpu":
        words = ["--num-prompts=8", "--input-len=64", "--output-len=8"]
    words += ["--mode=split", "--json", str(result), "--log-dir", str(folder), "--", *serve]
    run(folder, "bench", "vllm_tetri.cli", "bench", model_for(device, folder), *words)
    found = json.loads(result.read_text())
    systems = {name: {key: value for key, value in each.items() if not isinstance(value, list)}
               for name, each in found["systems"].items()}  # fmt: skip
    return {"systems": systems, "summary": found["verdict"]}


def classes(device: str, folder: Path) -> dict[str, Any]:
    """Five classes of requests on stock, tuned stock, split and adaptive, one after the other."""
    words, serve = ["--systems", SYSTEMS, "--kv-bytes", str(KV_BYTES), "--cores", "64"], FULL
    if device == "cpu":
        few = "--systems split,adaptive-1p1d --in-turns --classes lpld --num-prompts 4"
        words, serve = few.split(), SMALL
    model = model_for(device, folder)
    found = benchmark(folder, "classes", model, *words, "--repeats", "1", serve=serve)
    cells = [{key: value for key, value in each.items() if key != "requests"}
             for each in found["cells"]]  # fmt: skip
    failed = [each for each in cells if each["failed"]]
    assert not failed, f"requests failed: {failed[0]['system']}, {failed[0]['errors']}"
    split = [each["split_percent"] for each in cells if each["system"] == "split"]
    assert min(split) > 90, f"the share of split requests is {min(split)} %"
    return {"stock": found["head"]["stock"], "cells": cells,
            "summary": f"{len(cells)} cells, no request failed"}  # fmt: skip


def sweeps(device: str, folder: Path) -> dict[str, Any]:
    """Prompt tokens of a step, and how much KV may be loaded within one."""
    load = ["--num-prompts", "96", "--request-rate", "8", "--cores", "64", "--kv-bytes"]
    words = {name: [*load, str(KV_BYTES // 2)] for name in ("chunks", "loads")}
    if device == "cpu":  # another value is another option, and nothing else
        few = ["--num-prompts", "8", "--request-rate", "8", "--systems"]
        words = {"chunks": [*few, "chunk 512"], "loads": [*few, "load 1M"]}
    model, serve = model_for(device, folder), FULL if device == "cuda" else SMALL
    found = {name: benchmark(folder, "compare", name, model, *each, "--repeats", "1", serve=serve)
             for name, each in words.items()}  # fmt: skip
    count = sum(len(each["cells"]) for each in found.values())
    return {**found, "summary": f"{count} settings, no request failed"}


def handover(device: str, folder: Path) -> dict[str, Any]:
    """What a hand-over costs the client, beside stock, and GB/s of KV that the client waits for."""
    words = "--num-prompts 12 --input-lens 100,500,1000,1900 --chunk 2048 --cores 64 --kv-bytes"
    serve = (*FULL, "--gpu-memory-utilization", "0.22")  # four servers
    if device == "cpu":
        words, serve = "--num-prompts 2 --input-lens 100,300 --kv-bytes", SMALL
    given = (*words.split(), str(4 << 30 if device == "cuda" else 1 << 29))
    found = benchmark(folder, "handover", model_for(device, folder), *given, serve=serve)
    sent, ours = found["head"]["handover"], [
        each for each in found["cells"] if each["system"] == "ours"]  # fmt: skip
    assert sent["kv_bytes_sent"] > 0, "no KV was handed over"
    pause = median(each["second_beyond_step_ms"] for each in ours)
    return {**sent, "cells": found["cells"],
            "summary": f"{sent['GB_per_s']:.3g} GB/s, pause {pause:.1f} ms"}  # fmt: skip


def flips(device: str, folder: Path) -> dict[str, Any]:
    """A decode instance becomes a prefill instance and back, under load: nothing is lost."""
    asked = [completion(100 + 20 * at, max_tokens=32, **STREAM) for at in range(6)]
    serve, arena_bytes = SMALL, 64 << 20
    if device == "cuda":  # three servers; no graphs, which flips leave as they are
        share = ("--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(4 << 30))
        serve, arena_bytes = (*LARGE, *share, "--tetri-chunk-size", "2048"), 2 << 30
    model = Path(model_for(device, folder))
    with running(
        Cluster(model, folder, roles=TRIO, serve=serve, arena_bytes=arena_bytes)
    ) as cluster:
        expected = asyncio.run(ask_all(cluster.url, asked))
        took, served = asyncio.run(flip_under_load(cluster, asked, expected, device))
        cluster.rest(REST_S)
    p99 = quantiles(took, n=100)[-1]
    if device == "cuda":
        assert p99 <= MOST_COMMIT_S, f"p99 of commits is {p99:.3f} s"
    words = f"{len(took)} flips, median {1e3 * median(took):.1f} ms, {served} requests kept"
    return {"commit_s": took, "commit_p99_s": p99, "requests": served, "summary": words}


async def flip_under_load(
    cluster: Cluster, asked: list[Any], expected: list[Answer], device: str
) -> tuple[list[float], int]:
    """The time of every flip's commit, and how many requests were served meanwhile."""
    took = []
    async with load(cluster.url, asked, expected, 2) as clients:
        for at in range(20 if device == "cuda" else 2):
            await until(lambda: cluster.state_of("decode-1") == "ready", "decode-1 is ready", 60)
            status, said = await order(cluster.url, "decode-1", ("prefill", "decode")[at % 2])
            assert status == 202, said
            row = await flipped(cluster, "decode-1", said["epoch"])
            assert row["flip"]["commit_s"], row["flip"]
            took.append(row["flip"]["commit_s"])
        await clients.more(1)
    assert not clients.failed, clients.failed[0]
    # In bfloat16 the size of a step decides between two tokens that are nearly as likely.
    assert device == "cuda" or not clients.wrong, clients.wrong[0]
    return took, len(clients.all)
