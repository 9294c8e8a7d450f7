"""Stage A: torch, the driver and this package's movers, without vLLM."""

from __future__ import annotations

import ctypes
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from tests.eventually import eventually
from tests.gpu.accelerator import Cuda, Host, accelerator, copies_of
from tests.gpu.reuse import transfers
from vllm_tetri.transport.blocks import DeviceMover, pieces
from vllm_tetri.transport.device import Copies, places_of
from vllm_tetri.transport.native import Arena, Receiver, Sender, TransferState
from vllm_tetri.transport.push import Push
from vllm_tetri.transport.wires import DmaWire

MIB = 1 << 20
TIMEOUT_S = 60.0
IDENTITY = {"gpu": "A"}
POISON = 0xA5
# Dimensions of [block, head, token, content] by stride, and whether a block has all layers.
LAYOUTS = {"LBNHC": ((0, 2, 1, 3), False), "LBHNC": ((0, 1, 2, 3), False),
           "BLHNC": ((0, 1, 2, 3), True)}  # fmt: skip
RING = 4
LEFT_OUT = ("out for compute", "compute for in")  # what must be noticed
VERY_LATE_S = 0.05  # so that it is
PIECES = (16 << 10, 64 << 10, 256 << 10, 2 << 20)


def caches(layout: str, num_layers: int, num_blocks: int, device: str) -> list[torch.Tensor]:
    """A model's KV cache as vLLM lays it out, [block, head, token, content] by layer."""
    heads, tokens, content = (8, 16, 512) if device == "cuda" else (2, 16, 16)
    order, is_interleaved = LAYOUTS[layout]
    shape = (num_blocks, heads, tokens, content)
    inner = [shape[at] for at in order]
    if is_interleaved:
        whole = torch.full(
            (num_blocks, num_layers, *inner[1:]), POISON, dtype=torch.uint8, device=device
        )
        layers = list(whole.unbind(1))
    else:
        layers = [
            torch.full(inner, POISON, dtype=torch.uint8, device=device) for _ in range(num_layers)
        ]
    return [each.permute(*np.argsort(order).tolist()) for each in layers]


def mover(device: str, folder: Path) -> dict[str, Any]:
    """Blocks of random content go through an arena into a poisoned cache, in every layout."""
    # 80 layers of 64 KiB pages: more than 4 GiB, so that 32-bit offsets show.
    sizes = {2: 256, 80: 860} if device == "cuda" else {2: 24, 80: 24}
    seconds = {}
    for layout, num_layers in product(LAYOUTS, sizes):
        began = time.perf_counter()
        gear = accelerator(device)
        hand_over(gear, layout, num_layers, sizes[num_layers])
        gear.close()
        seconds[f"{layout}, {num_layers} layers"] = round(time.perf_counter() - began, 3)
    return {"seconds": seconds, "summary": f"{len(seconds)} layouts and depths"}


def hand_over(gear: Cuda | Host, layout: str, num_layers: int, num_blocks: int) -> None:
    """Send a third of the blocks from one cache to the next; the rest must stay as it is."""
    source, target = (caches(layout, num_layers, num_blocks, gear.kind) for _ in range(2))
    gear.own(*source, *target)
    for layer in source:
        layer.random_(0, 256)
    dice, count = np.random.default_rng(num_layers), min(num_blocks // 3, 64)
    out, into = (dice.permutation(num_blocks)[:count].astype(np.int32) for _ in range(2))
    out[0], into[-1] = num_blocks - 1, num_blocks - 1  # the far end of the cache
    out, into = np.unique(out), np.unique(into)
    count = min(len(out), len(into))
    out, into = dice.permutation(out[-count:]), dice.permutation(into[-count:])
    sends, loads = (DeviceMover(gear, each, num_blocks) for each in (source, target))
    block_bytes = sends.layout.block_bytes
    receiver = Receiver(arena_bytes=2 * count * block_bytes, identity=IDENTITY)
    sender = Sender(identity=IDENTITY, links=["dma"])
    push = Push(sender, {"dma": DmaWire(gear)}, TIMEOUT_S)
    try:
        transfer = sender.open(receiver.endpoint, "t", count, block_bytes)
        half = count // 2
        tag = push.mark(gear.mark())
        for first, ids in ((0, out[:half]), (half, out[half:])):
            for start, piece in pieces(ids, block_bytes):
                transfer.write(sends.layout, first + start, piece, tag)
        transfer.finish()
        under_way = (TransferState.OPENING, TransferState.SENDING)
        eventually(lambda: transfer.state not in under_way, TIMEOUT_S, "sent")
        assert transfer.state is TransferState.DONE, transfer.error
        eventually(
            lambda: (found := receiver.find("t")) is not None and found.state.name == "ARRIVED",
            TIMEOUT_S,
            "here",
        )
        slot = receiver.take("t")
        assert slot is not None
        arena = Arena(receiver.segment)
        loads.scatter(arena, [(slot.offset, None)], 0, into, gear.mark())
        loads.close()
        arena.close()
    finally:
        push.stop()
        sender.close()
        push.close()
        receiver.close()
    rest = torch.ones(num_blocks, dtype=torch.bool)
    rest[torch.from_numpy(into.astype(np.int64))] = False
    rows = [torch.from_numpy(ids.astype(np.int64)).to(gear.kind) for ids in (out, into)]
    for number, (mine, theirs) in enumerate(zip(source, target, strict=True)):
        assert torch.equal(mine[rows[0]], theirs[rows[1]]), f"{layout}: layer {number} differs"
        untouched = theirs[rest.to(gear.kind)]
        assert bool((untouched == POISON).all()), f"{layout}: layer {number} was overwritten"


class Segment:
    """A receiver's arena, mapped as senders map it and registered with the device."""

    def __init__(self, gear: Cuda | Host, num_bytes: int) -> None:
        self._gear = gear
        self._receiver = Receiver(arena_bytes=num_bytes, identity=IDENTITY)
        self._arena = Arena(self._receiver.segment)
        self.address = self._arena.address
        memory = (ctypes.c_char * num_bytes).from_address(self.address)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        gear.register(self.address, self._arena.num_bytes)

    def close(self) -> None:
        self._gear.unregister(self.address)
        self._arena.close()
        self._receiver.close()


def arena(device: str, folder: Path) -> dict[str, Any]:
    """Batched copies into our own registered shared memory and back, of pages in any order."""
    gear = accelerator(device)
    page, num = (32 << 10, 2048) if device == "cuda" else (3 << 10, 256)
    stream, dice = gear.make_stream(), np.random.default_rng(0)
    source, target = gear.allocate(page * num), gear.allocate(page * num)
    source.random_(0, 256)
    times = []
    for _ in range(2):  # a second arena at the same place is registered anew
        segment = Segment(gear, page * num)
        began = time.perf_counter()
        places, order = dice.permutation(num), dice.permutation(num)
        segment.bytes.fill_(POISON)
        at_source, at_place, at_target = (
            (base + page * each).tolist()
            for base, each in (
                (source.data_ptr(), order), (segment.address, places), (target.data_ptr(), order)
            )
        )  # fmt: skip
        sizes = [page] * num
        gear.copy(stream, copies_of(at_source, at_place, sizes), gear.mark())
        gear.copy(stream, copies_of(at_place, at_target, sizes), None).synchronize()
        times.append(round(time.perf_counter() - began, 4))
        assert torch.equal(source, target), "pages came back different"
        found = segment.bytes.view(num, page)[torch.from_numpy(places)]
        assert torch.equal(found, source.view(num, page)[torch.from_numpy(order).to(device)].cpu())
        target.fill_(0)
        segment.close()
    gear.close()
    is_batch = "one batched call" if gear.has_batches else "a call per page"
    return {
        "pages": num,
        "page_bytes": page,
        "seconds": times,
        "copies": is_batch,
        "summary": is_batch,
    }


def streams(device: str, folder: Path) -> dict[str, Any]:
    """A captured graph writes KV while two threads copy out and in; every byte is checked."""
    rounds = 1000 if device == "cuda" else 200
    seconds = Race(accelerator(device), rounds).run()
    for wait in LEFT_OUT if device == "cpu" else ():  # a GPU may pass by chance
        try:
            Race(Host(VERY_LATE_S), 4 * RING, without=wait).run()
        except AssertionError:
            continue
        raise RuntimeError(f"nothing was noticed without the wait of {wait}")
    return {"rounds": rounds, "seconds": round(seconds, 2), "summary": f"{rounds} rounds"}


class Race:
    """Three streams: the graph of round r writes r to row r % RING of `kv`, and copies that row of
    `inbox` to `seen`; one thread fills the row of `inbox` before, one copies both rows out after.

    Args:
        without: The wait between two streams that is left out, to see that it is needed.
    """

    def __init__(self, gear: Cuda | Host, rounds: int, without: str = "") -> None:
        self.gear, self.rounds, self.without = gear, rounds, without
        self.words = 1 << (16 if gear.kind == "cuda" else 8)
        shape = (RING, self.words)
        self.kv, self.inbox, self.seen = (
            gear.allocate(RING * self.words * 8).view(torch.int64).view(shape) for _ in range(3)
        )
        self.round = torch.full((1,), -1, dtype=torch.int64, device=gear.kind)
        self.host = {
            name: torch.zeros(shape, dtype=torch.int64) for name in ("kv", "seen", "inbox")
        }
        self.done: dict[str, queue.Queue[Any]] = {"out": queue.Queue(), "in": queue.Queue()}
        self.copied: dict[str, queue.Queue[Any]] = {"out": queue.Queue(), "in": queue.Queue()}
        self.errors: list[BaseException] = []

    def run(self) -> float:
        """Run all rounds; AssertionError if a byte was wrong."""
        gear, began = self.gear, time.perf_counter()
        for tensor in self.host.values():
            gear.register(tensor.data_ptr(), tensor.nbytes)
        replay = gear.captured(self._work)
        gear.synchronize()
        self.round.fill_(-1)
        gear.synchronize()
        threads = [threading.Thread(target=self._guarded, args=(each,), daemon=True)
                   for each in (self._copy_out, self._copy_in)]  # fmt: skip
        for thread in threads:
            thread.start()
        try:
            for number in range(self.rounds):
                came = self._next(self.copied["in"])
                if self.without != "compute for in":
                    gear.compute_after(came)
                if number >= RING:
                    gear.compute_after(self._next(self.copied["out"]))
                replay()
                for waiting in self.done.values():
                    waiting.put(gear.mark())
            for thread in threads:
                thread.join(TIMEOUT_S)
                assert not thread.is_alive(), "a copying thread does not end"
        finally:
            gear.synchronize()
            for tensor in self.host.values():
                gear.unregister(tensor.data_ptr())
            gear.close()
        assert not self.errors, self.errors[0]
        return time.perf_counter() - began

    def _work(self) -> None:
        """What the graph has; all of it happens on the device."""
        self.round.add_(1)
        row = self.round % RING
        self.kv.index_copy_(0, row, self.round.expand(1, self.words))
        self.seen.index_copy_(0, row, self.inbox.index_select(0, row))

    def _copy_out(self) -> None:
        stream = self.gear.make_stream()
        for number in range(self.rounds):
            done, row = self._next(self.done["out"]), number % RING
            both = [(each[row], self.host[name][row])
                    for name, each in (("kv", self.kv), ("seen", self.seen))]  # fmt: skip
            event = self._copy(stream, both, None if self.without == "out for compute" else done)
            event.synchronize()
            for name, expected in (("kv", number), ("seen", -number)):
                is_right = bool((self.host[name][row] == expected).all())
                assert is_right, f"round {number}: {name} is {self.host[name][row][0]}"
            self.copied["out"].put(event)

    def _copy_in(self) -> None:
        stream, read = self.gear.make_stream(), None
        for number in range(self.rounds):
            if number >= RING:  # the round before has read this row
                read = self._next(self.done["in"])
                read.synchronize()  # and so has the copy from the host's row
            row = number % RING
            self.host["inbox"][row].fill_(-number)
            both = [(self.host["inbox"][row], self.inbox[row])]
            self.copied["in"].put(self._copy(stream, both, read))

    def _copy(self, stream: Any, pairs: list[tuple[torch.Tensor, ...]], after: Any) -> Any:
        columns = zip(*((a.data_ptr(), b.data_ptr(), a.nbytes) for a, b in pairs), strict=True)
        return self.gear.copy(stream, copies_of(*map(list, columns)), after)

    def _next(self, events: queue.Queue[Any]) -> Any:
        while True:
            assert not self.errors, self.errors[0]
            with suppress(queue.Empty):
                return events.get(timeout=0.1)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)


def ipc(device: str, folder: Path) -> dict[str, Any]:
    """Another process opens memory that the device shares, and writes into it."""
    gear, num_bytes = accelerator(device), 8 * MIB
    stream, memory = gear.make_stream(), gear.allocate(num_bytes)
    memory.fill_(POISON)
    gear.synchronize()
    address, handle = gear.share(num_bytes)
    ends = [memory.data_ptr()], [address]
    gear.copy(stream, copies_of(*ends, [num_bytes]), None).synchronize()
    command = [sys.executable, "-m", "tests.gpu.memory", device, handle.hex()]
    done = subprocess.run(command, timeout=TIMEOUT_S, check=False, capture_output=True, text=True)
    memory.zero_()
    gear.synchronize()
    gear.copy(stream, copies_of(*ends[::-1], [num_bytes]), None).synchronize()
    gear.close()
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1:]
    half = num_bytes // 2
    assert bool((memory[:half] == POISON).all()), "bytes before the offset were overwritten"
    assert bool((memory[half:] == 7).all()), "what the other process wrote is not there"
    return {"bytes": half, "seconds": float(done.stdout), "summary": "written by another process"}


def write_from_outside(device: str, handle: bytes) -> None:
    """The other process of `ipc`: write sevens into the second half; print how long it took."""
    gear, half = accelerator(device), 4 * MIB
    own, stream = gear.allocate(half), gear.make_stream()
    own.fill_(7)
    gear.synchronize()
    address = gear.open_shared(handle, 2 * half)
    began = time.perf_counter()
    gear.copy(stream, copies_of([own.data_ptr()], [address + half], [half]), None).synchronize()
    print(time.perf_counter() - began)
    gear.close_shared(address)
    gear.close()


def bandwidth(device: str, folder: Path) -> dict[str, Any]:
    """GB/s of every path beside that of one large copy the same way; links between processes."""
    gear, total = accelerator(device), (512 if device == "cuda" else 16) * MIB
    segment, stream = Segment(gear, total), gear.make_stream()
    memory, other = gear.allocate(total), gear.allocate(total)
    ends = {"device to arena": (memory.data_ptr(), segment.address),
            "arena to device": (segment.address, memory.data_ptr()),
            "device to device": (memory.data_ptr(), other.data_ptr())}  # fmt: skip
    rows: dict[str, dict[str, float]] = {}
    for name, (source, target) in ends.items():
        rows[name] = {"one copy": rate(gear, stream, source, target, total, total)}
        for piece in PIECES:
            label = f"{piece >> 10} KiB pieces"
            rows[name][label] = rate(gear, stream, source, target, piece, total)
    rows["mover"] = {"gather": gather_rate(gear, segment, stream)}
    segment.close()
    gear.close()
    found = {"GB/s": rows, "between processes": transfers(folder, is_small=device == "cpu")}
    for name in ends if device == "cuda" and gear.has_batches else ():
        share = rows[name]["2048 KiB pieces"] / rows[name]["one copy"]
        assert share > 0.3, f"{name}: batched copies of 2 MiB reach {share:.0%} of one large copy"
    best = {name: f"{row['one copy']:.1f}" for name, row in rows.items() if "one copy" in row}
    return {
        **found,
        "summary": "GB/s " + ", ".join(f"{name} {value}" for name, value in best.items()),
    }


def rate(gear: Cuda | Host, stream: Any, source: int, target: int, piece: int, total: int) -> float:
    """GB/s of copies in pieces."""
    offsets = range(0, total, piece)
    sources, targets = [source + at for at in offsets], [target + at for at in offsets]
    copies = copies_of(sources, targets, [piece] * len(offsets))
    return timed(lambda: gear.copy(stream, copies, gear.mark()).synchronize(), total)


def gather_rate(gear: Cuda | Host, segment: Segment, stream: Any) -> float:
    """GB/s of a model's blocks from the KV cache to a slot, finding their places included."""
    num_blocks, count = (256, 64) if gear.kind == "cuda" else (32, 8)
    tensors = caches("BLHNC", 32, num_blocks, gear.kind)
    gear.own(*tensors)
    layout, ids = DeviceMover(gear, tensors, num_blocks).layout, np.arange(count, dtype=np.int32)

    def gather() -> None:
        copies = Copies(*places_of(layout, ids, segment.address))
        gear.copy(stream, copies, gear.mark()).synchronize()

    return timed(gather, count * layout.block_bytes)


def timed(work: Callable[[], None], num_bytes: int) -> float:
    """GB/s, the median of five; the first one warms up."""
    times = []
    for _ in range(6):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return round(num_bytes / median(times[1:]) / 1e9, 2)


if __name__ == "__main__":
    write_from_outside(sys.argv[1], bytes.fromhex(sys.argv[2]))
