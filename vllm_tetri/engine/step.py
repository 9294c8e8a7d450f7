"""What the two halves of the connector tell each other in one engine step.

Scheduler half to worker half: `StepMeta`. Worker half to scheduler half: `WorkerReport`.
Both are pickled when the executor runs workers in processes of their own, so they hold
plain values and a few NumPy arrays per entry. A `Note` goes from a prefill instance's worker
to a decode instance as a message of the KV transport: it concerns one transfer and is
wanted as early as the last block of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_tetri.engine.blocks import Run
from vllm_tetri.engine.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    is_cpu,
)
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import PriorOutput
from vllm_tetri.transport.blocks import BlockIds
from vllm_tetri.transport.device import DeviceArena
from vllm_tetri.transport.shards import Shards


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The transfer will not be completed; a request that waits for it may stop waiting."""

    transfer: str


class FirstTokens(msgspec.Struct, frozen=True, tag="first"):
    """Output tokens after the prompt whose KV the transfer carries, up to the first one without."""

    transfer: str
    prior_output: PriorOutput


Note = Lost | FirstTokens

MAX_NOTE_BYTES = 64 << 10  # what the transport carries as a message
# What may be loaded in a step, for each distinct shard of the KV: that takes 6 ms on a CPU, by one
# thread at 10 GB/s, and 1 ms on a GPU, by DMA at the 25 GB/s of PCIe 4, which was not timed.
CPU_LOAD_BYTES, LOAD_BYTES = 64 << 20, 32 << 20

_decoder: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)

encode_note: Callable[[Note], bytes] = msgspec.msgpack.encode


def decode_note(message: bytes) -> Note:
    """Return the note in a message; ProtocolError if it holds something else, or is too long."""
    if len(message) > MAX_NOTE_BYTES:
        raise ProtocolError(f"a note of {len(message)} bytes; at most {MAX_NOTE_BYTES} are allowed")
    try:
        return _decoder.decode(message)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a note: {error}") from error


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a block of KV is, and how the instance's workers share it."""

    block_bytes: int  # one block of all distinct shards over all layers
    shards: Shards
    is_device: bool = False  # blocks are in a device's memory


class LoadBudget:
    """Which loads are done in the step that admits their request, and which in the background.
    `given` are the bytes of `--tetri-load-budget-bytes`, None for the usual ones; `is_uniform` is
    that of `PromptBlocks`."""

    def __init__(self, given: int | None, layout: KVLayout, *, is_uniform: bool) -> None:
        usual_bytes = (CPU_LOAD_BYTES if is_cpu() else LOAD_BYTES) * layout.shards.num_parts
        self._num_blocks = (given or usual_bytes) // layout.block_bytes
        self._is_free = is_uniform and not layout.is_device

    def is_background(self, num_blocks: int, *, is_busy: bool) -> bool:
        """Whether a load is done in the background: a large one while other requests decode; any
        that vLLM could not compute again from where it failed in a step; and any of a device, whose
        copies no step is to wait for."""
        return (is_busy and num_blocks > self._num_blocks) or not self._is_free


# Places of the pool, and the paged block that belongs to each (`engine.pool`).
Pooled = tuple[BlockIds, BlockIds]
States = dict[str, NDArray[np.float32]]  # hidden states that were read, by request
FREED = 0  # in place of a round: the transfers of a request were to be stopped


@dataclass(slots=True)
class Open:
    """Open a transfer of `num_blocks` blocks for a request; `round` counts its attempts. A rank
    whose transfer of that name is under way goes on with it."""

    request_id: str
    round: int
    endpoint: str
    transfer: str
    num_blocks: int


@dataclass(slots=True)
class Write:
    """Push paged blocks to slot blocks; of a tail `by_layer`, each layer once it is computed."""

    request_id: str
    runs: list[Run]
    is_last: bool
    by_layer: bool = False


@dataclass(slots=True)
class Load:
    """Copy slot blocks into paged blocks, and what the pool has for others.

    The slot has `num_parts` parts of `part_bytes` from `offset` on. A background load does not
    delay the step that orders it.
    """

    request_id: str
    segment: str
    offset: int
    part_bytes: int
    num_parts: int
    runs: list[Run]
    is_background: bool
    pool: Pooled | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of one rank that the slot has."""
        return sum(len(block_ids) for _, block_ids in self.runs)

    @property
    def block_ids(self) -> set[int]:
        """All paged blocks that it fills."""
        pooled = [self.pool] if self.pool is not None else []
        return {each for _, ids in (*self.runs, *pooled) for each in ids.tolist()}


@dataclass
class StepMeta(KVConnectorMetadata):
    """One step's orders to the workers, executed in the order of the fields. Blocks of `stops`
    may be gone after the step, so the worker waits until nothing reads them."""

    saves: Pooled | None = None  # blocks that get other tokens in this step
    early_loads: list[Load] = field(default_factory=list)  # of the pool; writes may read them
    stops: list[str] = field(default_factory=list)  # requests whose transfer ends now
    opens: list[Open] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)  # blocks that earlier steps completed
    tails: list[Write] = field(default_factory=list)  # to be pushed after the forward pass
    notes: list[tuple[str, bytes]] = field(default_factory=list)  # by endpoint, encoded
    frees: list[str] = field(default_factory=list)  # to report once nothing reads their blocks
    loads: list[Load] = field(default_factory=list)  # before the forward pass
    reads: list[str] = field(default_factory=list)  # requests whose last state is wanted
    is_empty: bool = False  # nothing is computed in this step


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Events on the workers since the last report.

    Attributes:
        loaded: Number of ranks that executed the load of a request.
        ended: Number of shards of which nothing reads the blocks of a request any more, by the
            request and the round that was sent (`FREED`: which was to be stopped). vLLM's own
            count of ranks does not know of rounds, nor that replicas send nothing.
        failed: Why the transfer of a request failed: (round, status name, text).
        sent_bytes: KV bytes sent by transfers that completed.
        loaded_bytes: KV bytes copied from the arena into blocks.
        failed_loads: Requests whose load could not be executed.
        states: Hidden states that were read, of the first rank.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    ended: dict[tuple[str, int], int] = field(default_factory=dict)
    failed: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    sent_bytes: int = 0
    loaded_bytes: int = 0
    failed_loads: set[str] = field(default_factory=set)
    states: States = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Sum over ranks (vLLM's `KVOutputAggregator`)."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            loaded=dict(Counter(self.loaded) + Counter(other.loaded)),
            ended=dict(Counter(self.ended) + Counter(other.ended)),
            failed=self.failed | other.failed,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            loaded_bytes=self.loaded_bytes + other.loaded_bytes,
            failed_loads=self.failed_loads | other.failed_loads,
            states=self.states | other.states,
        )

    def __bool__(self) -> bool:
        return self != WorkerReport()


@dataclass
class WorkerShape(KVConnectorHandshakeMetadata):
    """A worker's KV layout, reported to the scheduler half after registration."""

    identity: dict[str, str]  # properties that a peer must share, by name
    layout: KVLayout
    alone: str = ""  # why its KV cannot be handed over, if so
    arena: DeviceArena | None = None  # where KV arrives, if not in host memory
    pool: tuple[int, str] = (0, "")  # blocks of the pool, and why it has none
