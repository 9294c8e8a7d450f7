"""KV blocks over NIXL (UCX), for comparison with `vllm-tetri bench transfer`; needs `nixl`.

    python -m examples.benchmarks.nixl_transfer [MIB [REPEATS]]

Pages and repeats are those of that command.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.bench_transfer import NUM_LAYERS, PAGE_BYTES, TIMEOUT_S, Pages, measure, receiver
from vllm_tetri.errors import TransferError

# UCX refuses peers that it cannot watch for failure, so shared memory needs tcp as well.
TRANSPORTS = {"nixl shm": "sm,self,tcp", "nixl tcp": "tcp"}


def main(total_mib: int = 64, repeats: int = 9) -> None:
    """Print the throughput of all blocks and the latency of one, for every size of a page."""
    for page_bytes in PAGE_BYTES:
        pages = Pages(page_bytes, total_mib << 20)
        for name in TRANSPORTS:
            with ExitStack() as stack:
                found = measure({name: _nixl(name, pages, stack)}, pages, repeats)
            speed, latency_us = found[name] / 1e9, found[f"{name}, one block"] * 1e6
            page = f"{NUM_LAYERS} x {page_bytes >> 10} KiB"
            print(f"{page:>12} {name}: {speed:.2f} GB/s, one block {latency_us:.0f} us", flush=True)


def _nixl(name: str, pages: Pages, stack: ExitStack) -> Callable[[int], None]:
    """Write pages with one descriptor each, as users of NIXL do for paged caches."""
    settings = {"UCX_TLS": TRANSPORTS[name], "NIXL_LOG_LEVEL": "ERROR"}
    os.environ.update(settings)  # UCX reads them when an agent starts
    metadata, address = stack.enter_context(receiver(_receive_nixl, pages.data.nbytes))
    agent = _nixl_agent(f"sender-{name}", pages.data)
    peer = agent.add_remote_agent(metadata)
    stack.callback(agent.remove_remote_agent, peer)
    size = np.uint64(pages.page_bytes)

    def push(num_blocks: int) -> None:
        deadline = time.perf_counter() + TIMEOUT_S
        layers = np.arange(NUM_LAYERS, dtype=np.uint64) * np.uint64(pages.num_blocks) * size
        blocks = pages.order[:num_blocks].astype(np.uint64)[:, None] * size
        sources = (np.uint64(pages.data.ctypes.data) + blocks + layers).reshape(-1)
        targets = np.uint64(address) + np.arange(len(sources), dtype=np.uint64) * size
        lists = (_descriptors(starts, pages.page_bytes) for starts in (sources, targets))
        local, remote = (agent.get_xfer_descs(each, "DRAM") for each in lists)
        handle = agent.initialize_xfer("WRITE", local, remote, peer)
        state = agent.transfer(handle)
        while state == "PROC" and time.perf_counter() < deadline:
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferError(f"NIXL with UCX_TLS={TRANSPORTS[name]} ended in {state}")

    return push


def _nixl_agent(name: str, memory: NDArray[np.uint8]) -> Any:
    api = importlib.import_module("nixl._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    start = np.array([memory.ctypes.data], np.uint64)
    agent.register_memory(_descriptors(start, memory.nbytes), "DRAM")
    return agent


def _descriptors(starts: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    return np.stack([starts, np.full_like(starts, size), np.zeros_like(starts)], axis=1)


def _receive_nixl(parent: Connection, total_bytes: int) -> None:
    memory = np.ones(total_bytes, np.uint8)
    agent = _nixl_agent("receiver", memory)  # kept until the end
    parent.send((agent.get_agent_metadata(), memory.ctypes.data))
    parent.poll(None)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
