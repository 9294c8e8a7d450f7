"""`vllm-tetri bench transfer`: how fast blocks move, beside what the machine can do.

One run, one table: every way of moving the same bytes takes its turn within each
repeat, so that a noisy neighbour hits all of them; figures are medians. Sender
and receiver are two processes, as in reality.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_tetri.errors import TransferError
from vllm_tetri.transport import bench_nixl
from vllm_tetri.transport.native import Layout, Receiver, Sender, copy_blocks, wait_done

PAGE_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
NUM_LAYERS = 4
IDENTITY = {"bench": "transfer"}
TIMEOUT_S = 60.0
SOCKET_BUFFER_BYTES = 4 << 20
RAW_CHUNK_BYTES = 128 << 10  # as iperf3 does; larger ones were slower


@dataclass(frozen=True, slots=True)
class Row:
    """Medians for one page size: throughput in bytes/s, latency in seconds.

    What NIXL did is None when it is not installed.
    """

    page_bytes: int
    total_bytes: int
    memcpy: float
    shm: float
    tcp: float
    raw: float
    nixl_shm: float | None
    nixl_tcp: float | None
    shm_latency_s: float
    tcp_latency_s: float
    raw_latency_s: float
    nixl_shm_latency_s: float | None
    nixl_tcp_latency_s: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--total-mib", type=int, default=64, help="bytes a transfer, in MiB (64)")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved repeats (9)")
    parser.add_argument("--streams", type=int, default=2, help="TCP data connections (2)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write this")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 when everything could be measured."""
    total_bytes = args.total_mib << 20
    if total_bytes < NUM_LAYERS * PAGE_BYTES[-1] or args.repeats < 1:
        print("bench transfer: --total-mib must be at least 4 and --repeats at least 1")
        return 2
    console = Console()
    rows: list[Row] = []
    iperf = _iperf3()  # before NIXL, whose progress threads would disturb it
    try:
        with _receiving(total_bytes) as (endpoint, raw_port), Progress(console=console) as progress:
            task = progress.add_task("moving blocks", total=len(PAGE_BYTES) * args.repeats)
            for page_bytes in PAGE_BYTES:
                with _Bench(page_bytes, total_bytes, args.streams, endpoint, raw_port) as bench:
                    rows.append(bench.measure(args.repeats, lambda: progress.advance(task)))
    except (OSError, TransferError) as error:
        print(f"bench transfer: {error}")
        return 1
    _print(console, rows, iperf)
    if args.json is not None:
        report = {"rows": [asdict(row) for row in rows], "iperf3_one_stream": iperf}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


class _Bench:
    """The sending side for one page size. Owns its senders and its socket."""

    def __init__(
        self, page_bytes: int, total_bytes: int, streams: int, endpoint: str, raw_port: int
    ) -> None:
        self._page_bytes = page_bytes
        self._num_blocks = total_bytes // (NUM_LAYERS * page_bytes)
        self._endpoint = endpoint
        size = self._num_blocks * NUM_LAYERS * page_bytes
        self._pages = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        self._flat = np.ones(size, np.uint8)
        self._source = _layout(self._pages, page_bytes, self._num_blocks, block_major=False)
        self._target = _layout(self._flat, page_bytes, self._num_blocks, block_major=True)
        order = np.random.default_rng(1).permutation(self._num_blocks)
        self._ids = order.astype(np.int32)
        self._senders = {
            link: Sender(identity=IDENTITY, link=link, streams=streams) for link in ("shm", "tcp")
        }
        self._raw = socket.create_connection(("127.0.0.1", raw_port), timeout=TIMEOUT_S)
        _tune(self._raw)
        self._count = 0

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for sender in self._senders.values():
            sender.close()
        self._raw.close()

    def measure(self, repeats: int, advance: Callable[[], None]) -> Row:
        everything, one = self._num_blocks, 1
        ways: dict[str, Callable[[], float]] = {
            "memcpy": self._copy,
            "shm": lambda: self._push("shm", everything),
            "tcp": lambda: self._push("tcp", everything),
            "raw": lambda: self._send_raw(everything),
            "shm_latency_s": lambda: self._push("shm", one),
            "tcp_latency_s": lambda: self._push("tcp", one),
            "raw_latency_s": lambda: self._send_raw(one),
        }
        medians = _medians(ways, repeats, advance)
        if bench_nixl.available():
            for link in bench_nixl.TRANSPORTS:
                medians |= self._measure_nixl(link, repeats)
        return self._row(medians)

    def _measure_nixl(self, link: str, repeats: int) -> dict[str, float]:
        """After the others, not among them: its progress threads keep both processes busy."""
        pair = bench_nixl.NixlPair(link, self._pages)
        try:
            ways: dict[str, Callable[[], float]] = {
                f"nixl_{link}": lambda: self._push_nixl(pair, self._num_blocks),
                f"nixl_{link}_latency_s": lambda: self._push_nixl(pair, 1),
            }
            return _medians(ways, repeats, lambda: None)
        finally:
            pair.close()

    def _row(self, medians: dict[str, float]) -> Row:
        size = self._num_blocks * self._source.block_bytes

        def rate(name: str) -> float | None:
            return size / medians[name] if name in medians else None

        return Row(
            page_bytes=self._page_bytes,
            total_bytes=size,
            memcpy=size / medians["memcpy"],
            shm=size / medians["shm"],
            tcp=size / medians["tcp"],
            raw=size / medians["raw"],
            nixl_shm=rate("nixl_shm"),
            nixl_tcp=rate("nixl_tcp"),
            shm_latency_s=medians["shm_latency_s"],
            tcp_latency_s=medians["tcp_latency_s"],
            raw_latency_s=medians["raw_latency_s"],
            nixl_shm_latency_s=medians.get("nixl_shm_latency_s"),
            nixl_tcp_latency_s=medians.get("nixl_tcp_latency_s"),
        )

    def _copy(self) -> float:
        in_order = np.arange(self._num_blocks, dtype=np.int32)
        started = time.perf_counter()
        copy_blocks(self._target, in_order, self._source, self._ids)
        return time.perf_counter() - started

    def _push(self, link: str, num_blocks: int) -> float:
        sender = self._senders[link]
        self._count += 1
        name = f"{link}-{self._page_bytes}-{self._count}"
        started = time.perf_counter()
        transfer = sender.open(self._endpoint, name, num_blocks, self._source.block_bytes)
        transfer.write(self._source, 0, self._ids[:num_blocks])
        transfer.finish()
        wait_done(sender, transfer, TIMEOUT_S)
        took = time.perf_counter() - started
        sender.send(self._endpoint, name.encode(), TIMEOUT_S)  # the receiver frees it
        return took

    def _push_nixl(self, pair: bench_nixl.NixlPair, num_blocks: int) -> float:
        blocks = self._ids[:num_blocks].astype(np.uint64)
        step = np.uint64(self._page_bytes)
        layers = np.arange(NUM_LAYERS, dtype=np.uint64) * np.uint64(self._num_blocks) * step
        starts = np.uint64(self._pages.ctypes.data) + blocks[:, None] * step + layers
        return pair.push(starts.reshape(-1), self._page_bytes)

    def _send_raw(self, num_blocks: int) -> float:
        size = num_blocks * self._source.block_bytes
        started = time.perf_counter()
        self._raw.sendall(struct.pack("<Q", size))
        for start in range(0, size, RAW_CHUNK_BYTES):
            self._raw.sendall(self._pages[start : min(size, start + RAW_CHUNK_BYTES)].data)
        if self._raw.recv(1) != b"k":
            raise OSError("the raw receiver went away")
        return time.perf_counter() - started


def _medians(
    ways: dict[str, Callable[[], float]], repeats: int, advance: Callable[[], None]
) -> dict[str, float]:
    for way in ways.values():
        way()
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            samples[name].append(way())
        advance()
    return {name: statistics.median(values) for name, values in samples.items()}


def _layout(
    memory: NDArray[np.uint8], page_bytes: int, num_blocks: int, *, block_major: bool
) -> Layout:
    layers = np.arange(NUM_LAYERS, dtype=np.uint64)
    step = page_bytes if block_major else page_bytes * num_blocks
    stride = page_bytes * NUM_LAYERS if block_major else page_bytes
    return Layout(
        np.uint64(memory.ctypes.data) + layers * np.uint64(step),
        np.full(NUM_LAYERS, stride, np.uint64),
        np.full(NUM_LAYERS, page_bytes, np.uint64),
        num_blocks,
        memory,
    )


@contextmanager
def _receiving(total_bytes: int) -> Iterator[tuple[str, int]]:
    """The other process: its KV endpoint and the port of its raw socket."""
    command = [sys.executable, "-m", "vllm_tetri.transport.bench", str(total_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            answer = child.stdout.readline().split()
            if len(answer) != 2:
                raise OSError("the receiving process did not start")
            yield answer[0], int(answer[1])
        finally:
            assert child.stdin is not None
            child.stdin.close()  # the child closes its receiver and ends


def _receive(total_bytes: int) -> None:
    """What the other process does until it is terminated."""
    raw = socket.create_server(("127.0.0.1", 0))
    _tune(raw)  # inherited by what it accepts
    threading.Thread(target=_serve_raw, args=(raw,), daemon=True).start()
    receiver = Receiver(
        arena_bytes=4 * total_bytes,
        host="127.0.0.1",
        port=0,
        identity=IDENTITY,
        fill_timeout_s=TIMEOUT_S,
        hold_timeout_s=TIMEOUT_S,
    )
    closer = threading.Thread(target=_close_with_parent, args=(receiver,))
    closer.start()
    print(receiver.endpoint, raw.getsockname()[1], flush=True)
    while receiver.stats().threads > 0:
        name = receiver.receive(TIMEOUT_S)
        if name is not None and receiver.take(name.decode()) is not None:
            receiver.release(name.decode())
    closer.join()


def _close_with_parent(receiver: Receiver) -> None:
    sys.stdin.read()
    receiver.close()


def _tune(raw: socket.socket) -> None:
    """What the core does to its own data connections, so that the comparison is fair."""
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


def _serve_raw(server: socket.socket) -> None:
    """Receives into one small buffer over and over, the fastest that a socket can be drained."""
    buffer = memoryview(bytearray(b"\1" * RAW_CHUNK_BYTES))
    while True:
        peer, _ = server.accept()
        with peer:
            while _receive_exactly(peer, buffer[:8]):
                (left,) = struct.unpack_from("<Q", buffer)
                while left > 0 and _receive_exactly(peer, buffer[: min(left, len(buffer))]):
                    left -= min(left, len(buffer))
                peer.sendall(b"k")


def _receive_exactly(peer: socket.socket, target: memoryview) -> bool:
    while target:
        got = peer.recv_into(target)
        if got == 0:
            return False
        target = target[got:]
    return True


def _iperf3() -> float | None:
    """Bytes/s of one iperf3 stream over loopback; None when it is not installed."""
    program = shutil.which("iperf3")
    if program is None:
        return None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with subprocess.Popen(
        [program, "-s", "-1", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            time.sleep(0.3)
            client = [program, "-c", "127.0.0.1", "-p", port, "-t", "2", "-J"]
            done = subprocess.run(client, capture_output=True, text=True, timeout=20, check=True)
            report = json.loads(done.stdout)
            return float(report["end"]["sum_received"]["bits_per_second"]) / 8
        except (subprocess.SubprocessError, KeyError, ValueError):
            return None
        finally:
            server.terminate()


def _print(console: Console, rows: list[Row], iperf: float | None) -> None:
    size = f"{rows[0].total_bytes >> 20} MiB in pages of {NUM_LAYERS} layers"
    heads = ("page", "memcpy", "shm", "shm/memcpy", "raw socket", "tcp", "tcp/raw")
    nixl = ("NIXL shm", "NIXL tcp") if rows[0].nixl_shm is not None else ()
    throughput = Table(*heads, *nixl, title=f"Throughput, {size} (GB/s)")
    latency = Table("page", "shm", "tcp", "raw socket", *nixl, title="One block, open to done (us)")
    for row in rows:
        page = f"{row.page_bytes >> 10} KiB"
        memcpy, shm, raw, tcp = (f"{v / 1e9:.2f}" for v in (row.memcpy, row.shm, row.raw, row.tcp))
        against = (f"{row.shm / row.memcpy:.2f}x", f"{row.tcp / row.raw:.2f}x")
        rates = (f"{v / 1e9:.2f}" for v in (row.nixl_shm, row.nixl_tcp) if v is not None)
        throughput.add_row(page, memcpy, shm, against[0], raw, tcp, against[1], *rates)
        times = (row.shm_latency_s, row.tcp_latency_s, row.raw_latency_s)
        theirs = (row.nixl_shm_latency_s, row.nixl_tcp_latency_s)
        latency.add_row(page, *(f"{v * 1e6:.0f}" for v in (*times, *theirs) if v is not None))
    console.print(throughput, latency)
    if not nixl:
        console.print("nixl is not installed: no comparison with it")
    if iperf is None:
        console.print("iperf3 is not installed: the raw socket is the reference for tcp")
    else:
        best = max(row.tcp for row in rows)
        console.print(f"iperf3, one stream: {iperf / 1e9:.2f} GB/s (best tcp {best / iperf:.2f}x)")


if __name__ == "__main__":
    _receive(int(sys.argv[1]))
