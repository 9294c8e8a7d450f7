"""A device (an accelerator) that has KV in its memory, and what the transport needs of it.

A device copies between addresses on streams: copies of one stream run one after another, those
of two streams at any time, and an event tells when a stream has passed a point. Host memory takes
part only while it is registered.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_tetri.errors import TransferError
from vllm_tetri.transport.native import Layout, Order

Addresses = NDArray[np.int64]
# Source addresses, target addresses, sizes: int64 tensors on the CPU; copies on the current stream.
CopyBatch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]

# Of one call: with driver 580 cuMemcpyBatchAsync has crashed at 51,828 (vLLM's issue 49276).
_MOST_COPIES = 4096
_OFFSET = struct.Struct("<Q")  # in the allocation that the rest of a handle names
_HANDLE_BYTES = 64  # of CUDA's handles; torch's begin with some more
_NO_COUNTER = b"/tetri-no-counter", 0  # in place of torch's count of readers; there is none
_OFFER = struct.Struct("<QH")  # bytes of the arena and of the path; path and handle follow


class DeviceEvent(Protocol):
    """A point of a stream. Both calls raise RuntimeError if the device failed."""

    def query(self) -> bool: ...  # whether all work before it is done
    def synchronize(self) -> None: ...  # waits for it, GIL released


def has_passed(event: DeviceEvent) -> bool:
    """Whether what is before it has ended in any way: on a device that failed nothing runs."""
    try:
        return event.query()
    except RuntimeError:
        return True


@dataclass(frozen=True, slots=True)
class Copies:
    """``sizes[i]`` bytes go from address ``sources[i]`` to ``targets[i]``."""

    sources: Addresses
    targets: Addresses
    sizes: Addresses


@dataclass(frozen=True, slots=True)
class DeviceArena:
    """A receive arena in a device's memory, which other processes reach by its handle over one kind
    of link. The address is that of the process that allocated it."""

    address: int
    num_bytes: int
    handle: bytes
    kind: str = "ipc"

    def offer(self, segment: str) -> bytes:
        """Describe it to senders; the receiver's segment is there as long as the receiver."""
        path = segment.encode()
        return _OFFER.pack(self.num_bytes, len(path)) + path + self.handle


def read_offer(offer: bytes) -> tuple[str, int, bytes]:
    """Return segment, bytes and handle of `DeviceArena.offer`; TransferError if it is none."""
    try:
        num_bytes, length = _OFFER.unpack_from(offer)
        path = offer[_OFFER.size : _OFFER.size + length].decode()
    except (struct.error, UnicodeDecodeError):
        raise TransferError("the receiver's offer is of another version") from None
    return path, num_bytes, offer[_OFFER.size + length :]


def span_of(order: Order, num_bytes: int) -> int:
    """Return how many bytes of the receiver's memory, which has `num_bytes`, an order fills.
    ValueError if they are not all there."""
    span = len(order.block_ids) * order.layout.block_bytes
    if order.offset + span > num_bytes:
        raise ValueError("the receiver's slot is not in its arena")
    return span


def places_of(
    layout: Layout, block_ids: NDArray[np.int32], base: int, rows: NDArray[np.int32] | None = None
) -> tuple[Addresses, ...]:
    """Return where blocks are in paged memory and where in dense memory from address `base` on,
    there in these rows (None: 0, 1, ...), and sizes. Runs that follow one another on both sides are
    one."""
    numbers = np.arange(len(block_ids)) if rows is None else rows
    ids, numbers = (each.astype(np.int64)[:, None] for each in (block_ids, numbers))
    bases, strides, sizes, starts = (
        each.astype(np.int64)
        for each in (layout.bases, layout.block_strides, layout.page_bytes, layout.starts)
    )
    pages = (bases + ids * strides).ravel()
    places = (base + numbers * layout.block_bytes + starts).ravel()
    sizes = np.tile(sizes, len(block_ids))
    ends_run = np.ones(len(sizes), dtype=np.bool_)
    ends_run[:-1] = pages[:-1] + sizes[:-1] != pages[1:]
    ends_run[:-1] |= places[:-1] + sizes[:-1] != places[1:]
    last = np.flatnonzero(ends_run)
    first = np.concatenate([[0], last[:-1] + 1]) if len(last) else last
    return pages[first], places[first], places[last] + sizes[last] - places[first]


class CudaDevice:
    """The device of a worker's KV, through torch. vLLM's ``swap_blocks_batch`` submits all copies
    of a call at once (cuMemcpyBatchAsync); without it each run is one asynchronous copy by torch.

    RuntimeError from any call: it failed, or refused the call. Threads may call `copy` with streams
    of their own; `mark` belongs to the engine's thread.
    """

    def __init__(self, device: torch.device, copy_batch: CopyBatch | None) -> None:
        self._device, self.index = device, device.index or 0
        self._copy_batch = copy_batch or self._copy_each
        self._host: dict[int, int] = {}  # registered: sizes by address
        self._own: list[torch.Tensor] = []
        self._opened: dict[int, torch.Tensor] = {}  # by address

    def mark(self) -> DeviceEvent:
        """Make an event behind all work that the calling thread's compute stream has by now."""
        return torch.cuda.current_stream(self._device).record_event()

    def make_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(device=self._device)

    def copy(
        self, stream: torch.cuda.Stream | None, copies: Copies, after: DeviceEvent | None
    ) -> DeviceEvent:
        """Queue copies behind `after` and all earlier ones of the stream (None: the calling
        thread's compute stream), without waiting. The event that is returned comes behind them."""
        columns = copies.sources, copies.targets, copies.sizes
        stream = stream or torch.cuda.current_stream(self._device)
        if after is not None:
            assert isinstance(after, torch.cuda.Event)
            stream.wait_event(after)
        every = [torch.from_numpy(each).split(_MOST_COPIES) for each in columns]

        def copy_all(_: int) -> None:
            for part in zip(*every, strict=True):
                self._copy_batch(*part)

        return self.queue(stream, copy_all)

    def queue(self, stream: torch.cuda.Stream, work: Callable[[int], None]) -> DeviceEvent:
        """Call `work` with the stream's native handle and this device as the current one, and
        return an event behind what it has put on the stream."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.query()  # a thread's first call of the runtime gives it the driver's context
            try:
                work(stream.cuda_stream)
            except BaseException:
                with suppress(RuntimeError):  # what it has put there has no event
                    stream.synchronize()
                raise
            return stream.record_event()

    def reserve(self, num_bytes: int) -> int:
        """Allocate memory that lives as long as this object, and return its address."""
        self._own.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        return self._own[-1].data_ptr()

    def register(self, address: int, num_bytes: int) -> None:
        """Make a mapping of host memory reachable for copies."""
        with torch.cuda.device(self._device):
            _check(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        self._host[address] = num_bytes

    def unregister(self, address: int) -> None:
        self._host.pop(address, None)
        with torch.cuda.device(self._device):
            _check(torch.cuda.cudart().cudaHostUnregister(address))

    def share(self, num_bytes: int) -> tuple[int, bytes]:
        """Allocate memory that lives as long as this object: its address, and a handle by which
        other processes of this host open it."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        _, handle, _, offset, *counter, _, _ = memory.untyped_storage()._share_cuda_()
        # Else torch keeps the memory until a reader counts down, once for all of them.
        torch.UntypedStorage._release_ipc_counter(*counter)
        self._own.append(memory)
        return memory.data_ptr(), _OFFSET.pack(offset) + handle

    def open_shared(self, handle: bytes, num_bytes: int) -> int:
        """Map memory that another process shares, and return its address. RuntimeError or
        ValueError if it is not in reach of this device, or the handle is none."""
        if len(handle) < _OFFSET.size + _HANDLE_BYTES:
            raise ValueError(f"a handle of {len(handle)} bytes")
        (offset,) = _OFFSET.unpack_from(handle)
        name, no_event = handle[_OFFSET.size :], (bytes(_HANDLE_BYTES), False)
        with torch.cuda.device(self._device):
            # Peer access is enabled between the current device and that of the memory.
            index = torch.cuda.current_device()
            storage = torch.UntypedStorage._new_shared_cuda(
                index, name, num_bytes, offset, *_NO_COUNTER, *no_event
            )
        memory = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        self._opened[memory.data_ptr()] = memory
        return memory.data_ptr()

    def close_shared(self, address: int) -> None:
        """Unmap it; no copy may be under way."""
        del self._opened[address]

    def free_bytes(self) -> int:
        """Return how many bytes nothing has allocated."""
        return torch.cuda.mem_get_info(self._device)[0]

    def _copy_each(self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        columns = sources.tolist(), targets.tolist(), sizes.tolist()
        for source, target, size in zip(*columns, strict=True):
            self._bytes(target, size).copy_(self._bytes(source, size), non_blocking=True)

    def _bytes(self, address: int, size: int) -> torch.Tensor:
        """View registered memory of the host, or memory of the device, as bytes."""
        if any(begin <= address < begin + length for begin, length in list(self._host.items())):
            memory = (ctypes.c_char * size).from_address(address)
            return torch.frombuffer(memory, dtype=torch.uint8)
        for begin, memory in list(self._opened.items()):  # torch takes it for its own device's
            if begin <= address < begin + memory.nbytes:
                return memory[address - begin : address - begin + size]
        return torch.as_tensor(_Bytes(address, size), device=self._device)


class _Bytes:
    """Memory of a device for torch, by the CUDA array interface (version 2)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


def _check(error: Any) -> None:
    if int(error) != 0:
        words = torch.cuda.cudart().cudaGetErrorString(error)
        raise RuntimeError(f"CUDA error {int(error)}: {words}")
