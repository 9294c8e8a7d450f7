"""The C++ core on one screen. Handles own what they name; only `Layout` holds raw addresses.
Attributes are read-only.

Calls marked (waits) release the GIL. C++ threads never call Python.
"""

from enum import Enum

import numpy as np
from numpy.typing import NDArray

class Status(Enum):
    OK = 0
    PENDING = 1
    FULL = 2  # no credit: the arena has no room now
    REFUSED = 3  # the handshake differs, or the receiver can never grant it
    TIMEOUT = 4
    PEER_LOST = 5
    CANCELLED = 6  # by either side
    STALE = 7  # generation number no longer valid
    INVALID = 8  # bad argument or bad frame
    CLOSED = 9

class Layout:
    """One rank's paged KV cache: where page (layer, block) lives in memory.

    Page (l, b) starts at bases[l] + b * block_strides[l] and is page_bytes[l] long. The wire
    order of a transfer is block-major: block 0 all layers, block 1 all layers, ... so any run of
    blocks is contiguous in a slot. The layout keeps `owner` (the tensors) alive. With `starts`,
    page l is at starts[l] of the slot's blocks of `wire_bytes`, of which the rest is skipped. With
    `is_device`, bases are addresses of a device: such a layout is only written, as orders.
    """
    def __init__(
        self,
        bases: NDArray[np.uint64],
        block_strides: NDArray[np.uint64],
        page_bytes: NDArray[np.uint64],
        num_blocks: int,
        owner: object,
        starts: NDArray[np.uint64] | None = None,
        wire_bytes: int = 0,
        is_device: bool = False,
    ) -> None: ...
    num_blocks: int
    block_bytes: int  # of a slot's block, with what is skipped
    is_device: bool
    bases: NDArray[np.uint64]  # this and the next three: one for each layer, copied on access
    block_strides: NDArray[np.uint64]
    page_bytes: NDArray[np.uint64]
    starts: NDArray[np.uint64]
    def part(self, first_page: int, num_pages: int) -> Layout:
        """These pages of every block alone, at the same places of the slot's blocks."""
    def copy_rows(
        self,
        block_ids: NDArray[np.int32],
        memory: NDArray[np.uint8],
        rows: NDArray[np.int32],
        to_blocks: bool,
    ) -> None:
        """(waits) Copy blocks to rows of other host memory, each as long as a block, or back.
        Raises ValueError when anything is out of range."""

class SlotState(Enum):
    FILLING = 0
    ARRIVED = 1
    TAKEN = 2  # pinned by `take`: never expires, never reused until released
    FAILED = 3  # `error` says why; nothing to load

class Slot:
    """A snapshot of a transfer's place in the arena; `Receiver.find` gives the newest state."""

    transfer: str
    state: SlotState
    offset: int  # bytes from `Arena.address`, or from the caller's memory; parts (ranks) follow
    num_blocks: int
    rank_bytes: int
    num_ranks: int
    generation: int
    error: str

class ReceiverStats:
    arena_total_bytes: int
    arena_used_bytes: int  # granted, arrived, taken and quarantined slots
    quarantined_bytes: int  # cancelled, but a writer may still be writing
    slots: int
    filling: int  # slots being written by a sender that is connected
    unclaimed: int  # slots that are ARRIVED and not taken
    quarantined: int  # slots that were cancelled, but a writer may still be writing
    connections: int
    arrived: int
    expired: int
    refused_full: int
    refused_identity: int
    refused_unauthenticated: int  # peers without proof of the key
    bad_frames: int
    bytes_received: int

class Receiver:
    """Owns the receive arena (one shared-memory segment, pre-touched, mode 0600, unguessable
    name, unlinked on close), the port that peers dial and a service thread. Thread-safe. With
    an arena of 0 bytes it has no segment and takes messages only. Without host memory the segment
    holds only control words, and slots are offsets into `arena_bytes` of the caller's memory, which
    an offer names; shm, tcp and dma do not reach it."""
    def __init__(
        self,
        *,
        arena_bytes: int,
        identity: dict[str, str],
        host: str = "127.0.0.1",
        port: int = 0,  # any free port
        fill_timeout_s: float = 30.0,  # no progress of a FILLING slot for this long: freed
        hold_timeout_s: float = 60.0,  # ARRIVED but not taken for this long: freed
        max_connections: int = 4096,
        key: bytes = b"",  # 32 bytes that senders must prove to hold; empty: no proof
        has_host_memory: bool = True,
    ) -> None: ...
    endpoint: str  # "host:port"
    segment: str  # path below /dev/shm
    def offer(self, kind: str, blob: bytes) -> None:
        """Tell senders that connect from now on what they need for this kind of link. At most 8
        kinds, 64 KiB each: ValueError."""
    def find(self, transfer: str) -> Slot | None: ...
    def wait(self, timeout_s: float) -> bool:
        """(waits) True when a slot became ARRIVED or FAILED since the last wait."""
    def take(self, transfer: str) -> Slot | None:
        """Pin an ARRIVED slot; None in any other state."""
    def release(self, transfer: str) -> None:
        """Give a TAKEN slot back. Idempotent."""
    def cancel(self, transfer: str) -> None:
        """Free a slot as soon as its writer is known to have stopped, and refuse a later open
        of the same name for fill_timeout_s."""
    def abandon(self, prefix: str, kept: list[str], reason: str) -> None:
        """Fail slots whose names begin with `prefix`, unless TAKEN or in `kept`."""
    def receive(self) -> bytes | None:
        """Oldest message from a `Sender.send`; the bounded queue drops the newest."""
    def stats(self) -> ReceiverStats: ...
    def close(self) -> None: ...  # idempotent

class Arena:
    """A mapping of a receiver's segment, also in another process of this user. A thread touches
    its pages after it was made."""

    address: int  # of the mapping; offsets of slots add to it; 0 when closed
    num_bytes: int
    def __init__(self, segment: str) -> None: ...
    def load(
        self, slot_offset: int, first_block: int, layout: Layout, block_ids: NDArray[np.int32]
    ) -> None:
        """(waits) Copy blocks [first_block, first_block + len(block_ids)) of a slot (offset
        includes the part) to block_ids of `layout`. Raises ValueError when out of range."""
    def hold(self, control: int, generation: int) -> bool:
        """Keep the memory of an order's slot from being another transfer's until `let_go`. False
        if it is not this generation's any more; ValueError if there is no such control word."""
    def let_go(self, control: int) -> None:
        """Undo one `hold`. Not allowed after `close`."""
    def close(self) -> None: ...

class TransferState(Enum):
    OPENING = 0
    SENDING = 1
    DONE = 2  # the receiver confirmed that all bytes arrived
    FAILED = 3
    CANCELLED = 4

class Transfer:
    """One request's KV on its way to one receiver. Thread-safe."""

    name: str
    state: TransferState
    status: Status
    error: str
    bytes_sent: int
    link: str  # kind of link, or "" before the handshake
    @property
    def quiesced(self) -> bool:
        """Whether no thread reads source blocks now or later, so that they may be freed: in
        DONE; in FAILED and CANCELLED as soon as the copy under way has stopped and all orders
        that were begun have ended."""
    def write(
        self, layout: Layout, first_block: int, block_ids: NDArray[np.int32], tag: int = 0
    ) -> Status:
        """Queue blocks for sending; slot blocks start at first_block. Never blocks. The source
        must not change until `quiesced` (or DONE). A layout that skips bytes fills only part of
        each block; all parts must have been written before `finish`. What this library cannot
        move becomes an order with this tag."""
    def finish(self) -> None:
        """Announce the last write; DONE follows when the receiver has everything."""
    def cancel(self) -> None:
        """Stop; the receiver frees the slot. Idempotent, never blocks."""

class Order:
    """A write that the sender's caller moves: from a device's memory, or over a link of a kind
    other than shm and tcp. Thread-safe. Dropping it before an end fails the transfer.

    From `begin` to an end the transfer is not `quiesced`, and the receiver learns of no cancel and
    of no end of the session, after which it would give the slot to another transfer.
    """

    transfer: str
    endpoint: str
    kind: str  # of the link; "dma" also for a device's memory on a link of kind shm
    offer: bytes  # the receiver's for this kind; for dma the path of its segment
    offset: int  # of the first byte, from the segment's start (dma) or the caller's memory there;
    # what the receiver said, which only for dma was checked to be inside
    layout: Layout
    block_ids: NDArray[np.int32]
    tag: int
    generation: int  # this and `control`: by which the receiver's side holds the slot
    control: int
    num_bytes: int  # without what the layout skips
    def begin(self) -> bool:
        """False when the transfer is over: nothing may be read or written any more."""
    def live(self) -> bool:
        """Whether the slot is still this transfer's; True where that cannot be seen from here."""
    def placed(self) -> None:
        """End: the bytes are in the receiver's memory."""
    def failed(self, text: str) -> None:
        """End: the transfer fails with this text; also allowed before `begin`."""
    def staged(self, layout: Layout) -> None:
        """End, for kind tcp: rows 0, 1, ... of this layout of host memory are sent instead. Its
        pages cover the same bytes of each block; it must not change until `is_done`."""
    def is_done(self) -> bool:
        """Ended, and no thread reads staged memory."""

class Sender:
    """Dials receivers and pushes blocks. Owns its threads and connections; a connection is
    opened on first use and closed when unused for a while. Thread-safe."""
    def __init__(
        self,
        *,
        identity: dict[str, str],
        rank: int = 0,  # the part of slots that it fills, of `num_ranks`
        num_ranks: int = 1,
        links: list[str] = ["shm", "tcp"],  # kinds, the best first; all others: by orders
        streams: int = 2,
        open_timeout_s: float = 5.0,
        io_timeout_s: float = 30.0,
        max_queued_blocks: int = 1 << 20,
        key: bytes = b"",  # 32 bytes that receivers must prove to hold; empty: no proof
        emulate: tuple[float, float] | None = None,  # bytes/s and s of latency of each link
    ) -> None: ...
    def open(self, endpoint: str, transfer: str, num_blocks: int, block_bytes: int) -> Transfer:
        """Ask for a slot of exactly this size. Never blocks: the result (FULL, REFUSED with the
        difference spelled out, ...) shows in the transfer."""
    def send(self, endpoint: str, message: bytes, timeout_s: float) -> Status:
        """(waits) Deliver a small message (at most 64 KiB) to `Receiver.receive`."""
    def wait(self, timeout_s: float) -> bool:
        """(waits) True when a transfer became terminal since the last wait."""
    def take_order(self, timeout_s: float) -> Order | None:
        """(waits) The oldest order; None after the timeout, or when closed."""
    def exclude(self, endpoint: str, kind: str) -> None:
        """Use this kind of link to the endpoint no more. The session that does ends, and its
        transfers fail with PEER_LOST."""
    def close(self) -> None:
        """(waits) Cancel everything. Waits 5 s for orders that were begun; connections whose orders
        have not ended by then stay open. Idempotent."""
