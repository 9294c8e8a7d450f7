"""How long a hand-over takes after the last chunk, sent by chunk and layer by layer.

    python -m examples.benchmarks.layers [--repeats N] [--json FILE]

The worker half of the connector sends the KV of an 8B model's prompts (32 layers, 128 KiB a token)
over links of emulated speed. A forward pass sleeps as long as such a chunk takes on an H100 or so
(35 us a token), and calls the hook of each layer. All bytes, and the speed of the links with
them, are `SHRINK` times smaller, so that copying them in this host's memory takes little of the
time: what is measured is the protocol and the emulated link, not a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from vllm_tetri.config import TetriConfig
from vllm_tetri.engine.step import Open, StepMeta, Write
from vllm_tetri.engine.worker import KVWorker
from vllm_tetri.transport.blocks import HostMover
from vllm_tetri.transport.native import Receiver, SlotState
from vllm_tetri.transport.shards import Shards
from vllm_tetri.types import Role

SHRINK = 256
LAYERS, BLOCK = 32, 16
TOKEN_BYTES = 4096  # of one layer
FORWARD_S = 35e-6  # for a token
LINKS = {f"{speed} GB/s": f"emulate:{1000 * speed / SHRINK}MB/s,5us" for speed in (25, 300)}
# Tokens of a prompt and of a chunk.
PROMPTS = [(128, 512), (512, 512), (2048, 512), (2048, 2048), (8192, 2048), (8192, 8192)]
IDENTITY = {"bench": "layers"}
TIMEOUT_S = 30.0
_names = (f"prompt {number}" for number in count())


def main() -> None:
    """Measure all prompts on all links; print medians, and write every turn to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="turns of every way; 15")
    parser.add_argument("--json", type=Path, help="write all turns to this .jsonl.gz")
    options = parser.parse_args()
    rows = list(measure(options.repeats))
    if options.json is not None:
        with gzip.open(options.json, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    turns = dict[tuple[Any, ...], list[dict[str, Any]]]()
    for row in rows:
        turns.setdefault((row["link"], row["tokens"], row["chunk"]), []).append(row)
    print(f"{'link':>9} {'prompt':>6} {'chunk':>6} | by chunk | by layer | hooks take")
    for (link, tokens, chunk), found in turns.items():
        by_chunk, by_layer = (
            median(row["exposed_ms"] for row in found if row["push"] == push)
            for push in ("chunk", "layer")
        )
        hooks_ms = median(row["hooks_ms"] for row in found if row["push"] == "layer")
        print(
            f"{link:>9} {tokens:>6} {chunk:>6} | {by_chunk:5.2f} ms | {by_layer:5.2f} ms | "
            f"{hooks_ms:5.2f} ms"
        )


def measure(repeats: int) -> Iterator[dict[str, Any]]:
    """Yield one row for each turn; both ways take turns, and the first turn warms up."""
    num_blocks = max(tokens for tokens, _ in PROMPTS) // BLOCK
    page_bytes = BLOCK * TOKEN_BYTES // SHRINK
    caches = {f"layer{i}": torch.zeros(num_blocks, page_bytes, dtype=torch.uint8)
              for i in range(LAYERS)}  # fmt: skip
    mover = HostMover(list(caches.values()), num_blocks)
    arena_bytes = 2 * num_blocks * mover.layout.block_bytes
    for link, option in LINKS.items():
        config = TetriConfig(role=Role.PREFILL, link=option, push="layer")
        worker = KVWorker(
            config=config, identity=IDENTITY, mover=mover, rank=0, shards=Shards(1, 1, 1)
        )
        worker.track_layers(caches)
        receiver = Receiver(arena_bytes=arena_bytes, host="127.0.0.1", port=0, identity=IDENTITY)
        try:
            for tokens, chunk in PROMPTS:
                for turn in range(-1, repeats):
                    for push in ("chunk", "layer"):
                        found = hand_over(worker, receiver, tokens, chunk, by_layer=push == "layer")
                        row = {"link": link, "tokens": tokens, "chunk": chunk, "push": push}
                        if turn >= 0:
                            yield row | {"turn": turn} | found
        finally:
            worker.close()
            receiver.close()


def hand_over(
    worker: KVWorker, receiver: Receiver, tokens: int, chunk: int, *, by_layer: bool
) -> dict[str, float]:
    """Compute and send one prompt; return the milliseconds from the end of its last chunk until it
    arrived, and those that the hooks of that chunk took."""
    name, step, ids = next(_names), StepMeta(), np.arange(tokens // BLOCK, dtype=np.int32)
    step.opens.append(Open(name, 1, receiver.endpoint, name, len(ids)))
    borders = [*range(0, len(ids), chunk // BLOCK), len(ids)]
    for begin, end in pairwise(borders):
        is_last = end == len(ids)
        if is_last:
            step.tails.append(Write(name, [(begin, ids[begin:])], True, by_layer))
        worker.begin_step(step)
        hooks_s = forward(worker, (end - begin) * BLOCK)
        ended_s = time.perf_counter()
        worker.push_tails(step)
        step = StepMeta(writes=[Write(name, [(begin, ids[begin:end])], is_last=False)])
    while (slot := receiver.find(name)) is None or slot.state is not SlotState.ARRIVED:
        if time.perf_counter() - ended_s > TIMEOUT_S:
            raise TimeoutError(f"{name} did not arrive")
    exposed_s = time.perf_counter() - ended_s
    receiver.cancel(name)
    worker.collect_sent()
    return {"exposed_ms": 1e3 * exposed_s, "hooks_ms": 1e3 * hooks_s}


def forward(worker: KVWorker, num_tokens: int) -> float:
    """Sleep as a forward pass over so many tokens takes; return the seconds in hooks of layers."""
    hooks_s, begun_s = 0.0, time.perf_counter()
    for layer in range(LAYERS):
        due_s = begun_s + (layer + 1) / LAYERS * num_tokens * FORWARD_S
        time.sleep(max(0.0, due_s - time.perf_counter()))
        called_s = time.perf_counter()
        worker.record_layer(f"layer{layer}")
        hooks_s += time.perf_counter() - called_s
    return hooks_s


if __name__ == "__main__":
    main()
