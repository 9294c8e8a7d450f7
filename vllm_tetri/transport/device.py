"""What the transport needs of a device (an accelerator) that has KV in its memory.

A device copies between addresses on streams: copies of one stream run one after another, those
of two streams at any time, and an event tells when a stream has passed a point. Host memory takes
part only while it is registered. `cuda.CudaDevice` is the real one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.errors import TransferError
from vllm_tetri.transport.native import Layout, Order

Addresses = NDArray[np.int64]
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


class Device(Protocol):
    """The device of a worker's KV. RuntimeError from any call: it failed, or refused the call.
    Threads may call `copy` with streams of their own; `mark` belongs to the engine's thread."""

    def mark(self) -> DeviceEvent:
        """Make an event behind all work that the calling thread's compute stream has by now."""
        ...

    def make_stream(self) -> Any: ...
    def copy(self, stream: Any, copies: Copies, after: DeviceEvent | None) -> DeviceEvent:
        """Queue copies behind `after` and all earlier ones of the stream (None: the calling
        thread's compute stream), without waiting. The event that is returned comes behind them."""
        ...

    def queue(self, stream: Any, work: Callable[[int], None]) -> DeviceEvent:
        """Call `work` with the stream's native handle and this device as the current one, and
        return an event behind what it has put on the stream."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """Allocate memory that lives as long as this object, and return its address."""
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Make a mapping of host memory reachable for copies."""
        ...

    def unregister(self, address: int) -> None: ...
    def share(self, num_bytes: int) -> tuple[int, bytes]:
        """Allocate memory that lives as long as this object: its address, and a handle by which
        other processes of this host open it."""
        ...

    def open_shared(self, handle: bytes, num_bytes: int) -> int:
        """Map memory that another process shares, and return its address. RuntimeError or
        ValueError if it is not in reach of this device, or the handle is none."""
        ...

    def close_shared(self, address: int) -> None: ...  # unmaps it; no copy may be under way
    def free_bytes(self) -> int: ...  # that nothing has allocated


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
