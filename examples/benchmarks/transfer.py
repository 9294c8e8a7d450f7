"""How fast KV blocks move between two processes, compared with what the machine can do.

Every way of moving the same bytes takes its turn within each repeat, so that a disturbance hits
all of them; figures are medians. NIXL takes part where it is installed; UCX_TLS=tcp in the
environment keeps it from shared memory.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_tetri.errors import TransferError
from vllm_tetri.transport.native import Layout, Receiver, Sender, TransferState
from vllm_tetri.transport.nixl import NixlWire, offer_nixl
from vllm_tetri.transport.push import Push

PAGE_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
NUM_LAYERS = 4
NUM_GROUPS = 4  # of KV cache blocks, where a way has several
NUM_PARTS = 2
EMULATED = 25e9, 5e-6  # bytes/s and seconds for each write: 200 Gbit/s
IDENTITY = {"bench": "transfer"}
TIMEOUT_S = 60.0
SOCKET_BUFFER_BYTES = 4 << 20
RAW_CHUNK_BYTES = 128 << 10  # as iperf3 does; larger ones were slower
_UNDER_WAY = (TransferState.OPENING, TransferState.SENDING)

Ways = dict[str, Callable[[int], None]]  # each moves a number of blocks


def main() -> None:
    """Measure every way with pages of every size; print, and write the rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-mib", type=int, default=64, help="MiB in one transfer; 64")
    parser.add_argument("--repeats", type=int, default=9, help="turns of every way; 9")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    total_bytes = options.total_mib << 20
    if total_bytes < NUM_LAYERS * PAGE_BYTES[-1] or options.repeats < 1:
        parser.error("--total-mib must be at least 4 and --repeats at least 1")
    rows = measure_all(total_bytes, options.repeats)
    _print(Console(), rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


def measure_all(total_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each size of pages."""
    rows, names, console = [], map(str, count()), Console(stderr=True)
    hidden = not console.is_terminal
    with receiver(_receive_tetri, total_bytes) as (endpoint, port):
        for size in track(PAGE_BYTES, "pages", console=console, transient=True, disable=hidden):
            pages = Pages(size, total_bytes)
            with ExitStack() as stack:
                ways = _ways(pages, stack, partial(_push, names, endpoint), port)
                row = measure(ways, pages, repeats)
            rows.append({"page_bytes": size, "bytes": pages.data.nbytes, **row})
    return rows


class Pages:
    """Source memory in vLLM's order (layer, block, page), and the order in which blocks go."""

    def __init__(self, page_bytes: int, total_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.num_blocks = total_bytes // (NUM_LAYERS * page_bytes)
        shape = (NUM_LAYERS, self.num_blocks, page_bytes)
        self.data = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        self.order = np.random.default_rng(1).permutation(self.num_blocks).astype(np.int32)
        self._copy = np.ones(shape, np.uint8)
        size = np.full(NUM_LAYERS, page_bytes, np.uint64)
        starts = np.array([layer.ctypes.data for layer in self.data], np.uint64)
        self.layout = Layout(starts, size, size, self.num_blocks, self.data)
        half = size // 2  # what each of two tensor-parallel ranks holds
        self.halves = [
            Layout(starts + part * half, size, half, self.num_blocks, self.data)
            for part in range(NUM_PARTS)
        ]

    def memcpy(self, num_blocks: int) -> None:
        """Copy blocks within this process."""
        for layer, target in zip(self.data, self._copy, strict=True):
            ids = self.order[:num_blocks]
            np.take(layer, ids, axis=0, out=target[:num_blocks], mode="clip")


def _ways(pages: Pages, stack: ExitStack, push: Callable[..., None], port: int) -> Ways:
    raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))
    _tune(raw)

    def raw_socket(num_blocks: int) -> None:
        size, flat = num_blocks * NUM_LAYERS * pages.page_bytes, pages.data.reshape(-1)
        raw.sendall(size.to_bytes(8, "little"))
        for start in range(0, size, RAW_CHUNK_BYTES):
            raw.sendall(flat[start : min(size, start + RAW_CHUNK_BYTES)].data)
        if raw.recv(1) != b"k":
            raise TransferError("the receiving process closed the plain socket; see its messages")

    ways: Ways = {"memcpy": pages.memcpy, "raw socket": raw_socket}
    senders = {link: Sender(identity=IDENTITY, links=[link]) for link in ("shm", "tcp")}
    senders["emulated"] = Sender(identity=IDENTITY, links=["shm"], emulate=EMULATED)
    if find_spec("nixl"):
        senders["nixl"] = sender = Sender(identity=IDENTITY, links=["nixl"])
        stack.callback(Push(sender, {"nixl": NixlWire(TIMEOUT_S)}, TIMEOUT_S).close)
    ranks = [
        Sender(identity=IDENTITY, links=["shm"], rank=rank, num_ranks=NUM_PARTS)
        for rank in range(NUM_PARTS)
    ]
    for sender in (*senders.values(), *ranks):
        stack.callback(sender.close)  # before the thread of its orders
    for link, sender in senders.items():
        ways[link] = partial(push, [(sender, pages.layout)], pages, 1)
    whole = [(senders["shm"], pages.layout)]
    ways[f"shm, {NUM_GROUPS} groups"] = partial(push, whole, pages, NUM_GROUPS)
    parts = list(zip(ranks, pages.halves, strict=True))
    ways[f"shm, {NUM_PARTS} parts"] = partial(push, parts, pages, 1)
    return ways


def _push(
    names: Iterator[str],
    endpoint: str,
    parts: list[tuple[Sender, Layout]],
    pages: Pages,
    num_groups: int,
    num_blocks: int,
) -> None:
    """Send blocks as `parts`, each by a sender of its own, and by so many runs of neighbours."""
    name, deadline = next(names), time.perf_counter() + TIMEOUT_S
    runs = np.array_split(np.arange(num_blocks), min(num_groups, num_blocks))
    transfers = []
    for sender, layout in parts:
        transfer = sender.open(endpoint, name, num_blocks, layout.block_bytes)
        for run in runs:
            transfer.write(layout, int(run[0]), pages.order[run])
        transfer.finish()
        transfers.append((sender, transfer))
    for sender, transfer in transfers:
        while transfer.state in _UNDER_WAY and time.perf_counter() < deadline:
            sender.wait(0.05)
        if transfer.state != TransferState.DONE:
            raise TransferError(f"a transfer of {num_blocks} blocks failed: {transfer.error}")


def measure(ways: Ways, pages: Pages, repeats: int) -> dict[str, float]:
    """Return bytes/s of all blocks by name, and seconds of one block by `name, one block`."""
    samples: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            for key, number in ((name, pages.num_blocks), (f"{name}, one block", 1)):
                started = time.perf_counter()
                way(number)
                samples.setdefault(key, []).append(time.perf_counter() - started)
    # The first turn warms up.
    medians = {key: statistics.median(values[1:]) for key, values in samples.items()}
    return medians | {name: pages.data.nbytes / medians[name] for name in ways}


@contextmanager
def receiver(serve: Callable[[Connection, int], None], total_bytes: int) -> Iterator[Any]:
    """Start the receiving process; yield what it says of where it is found."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, total_bytes), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            place = ours.recv()
        except EOFError:
            raise TransferError("the receiving process ended; its messages are above") from None
        yield place
    finally:
        ours.close()
        process.join()


def _receive_tetri(parent: Connection, total_bytes: int) -> None:
    """Take and free what arrives, and drain a plain socket, until the other end is closed."""
    raw = socket.create_server(("127.0.0.1", 0))
    _tune(raw)  # inherited by accepted connections
    threading.Thread(target=_drain, args=(raw,), daemon=True).start()
    receiver = Receiver(arena_bytes=4 * total_bytes, identity=IDENTITY)
    nixl = offer_nixl(receiver, "nixl", "127.0.0.1") if find_spec("nixl") else None
    threading.Thread(target=_release, args=(receiver,), daemon=True).start()
    parent.send((receiver.endpoint, raw.getsockname()[1]))
    parent.poll(None)
    if nixl is not None:
        nixl.close()
    receiver.close()


def _release(receiver: Receiver) -> None:
    for number in count():
        while receiver.take(str(number)) is None:
            receiver.wait(TIMEOUT_S)
        receiver.release(str(number))


def _tune(raw: socket.socket) -> None:
    """Set what the C++ core sets on its own data connections, so that the comparison is fair."""
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        raw.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BUFFER_BYTES)


def _drain(server: socket.socket) -> None:
    """Receive into one small buffer again and again: no receiver can be faster."""
    buffer = memoryview(bytearray(b"\1" * RAW_CHUNK_BYTES))
    while True:
        peer, _ = server.accept()
        with peer:
            while head := peer.recv(8, socket.MSG_WAITALL):
                left = int.from_bytes(head, "little")
                while left and (got := peer.recv_into(buffer[: min(left, len(buffer))])):
                    left -= got
                peer.sendall(b"k")


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    names = [name for name in rows[0] if f"{name}, one block" in rows[0]]
    throughput = Table("page", *names, "shm / memcpy", "tcp / raw", title="GB/s, all blocks")
    latency = Table("page", *names, title="microseconds from open to done, one block")
    for row in rows:
        page = f"{NUM_LAYERS} x {row['page_bytes'] >> 10} KiB"
        ratios = (row["shm"] / row["memcpy"], row["tcp"] / row["raw socket"])
        values = [*(row[name] / 1e9 for name in names), *ratios]
        throughput.add_row(page, *(f"{value:.2f}" for value in values))
        latency.add_row(page, *(f"{row[f'{name}, one block'] * 1e6:.0f}" for name in names))
    console.print(throughput, latency)


if __name__ == "__main__":
    main()
