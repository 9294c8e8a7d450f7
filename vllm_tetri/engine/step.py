"""What the two halves of the connector tell each other in one engine step.

Scheduler half to worker half: `StepMeta`. Worker half to scheduler half:
`WorkerReport`. Both are pickled when the executor runs workers in processes
of their own, so they hold plain values and one NumPy array per entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.engine.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm_tetri.transport.native import Slot

BlockIds = NDArray[np.int32]


@dataclass(slots=True)
class Open:
    """Open a transfer of `num_blocks` blocks for a request."""

    request_id: str
    endpoint: str
    transfer: str
    num_blocks: int


@dataclass(slots=True)
class Write:
    """Push paged blocks `block_ids` to slot blocks from `first_block` on."""

    request_id: str
    first_block: int
    block_ids: BlockIds
    is_last: bool


@dataclass(slots=True)
class Load:
    """Copy slot blocks from `first_block` on into paged blocks `block_ids`.

    `offset` is rank 0's; rank r's part follows `r * rank_bytes` later. A
    background load does not hold the step that orders it. `swapped` names the slot
    of a preempted request that comes back; it is empty for KV that arrived.
    """

    request_id: str
    segment: str
    offset: int
    rank_bytes: int
    first_block: int
    block_ids: BlockIds
    is_background: bool
    swapped: str = ""

    @classmethod
    def of(
        cls,
        slot: Slot,
        segment: str,
        request_id: str,
        block_ids: list[int],
        *,
        first_block: int,
        is_background: bool = False,
        is_swapped: bool = False,
    ) -> Load:
        """The order to copy what a slot of `segment` holds into those of the request's
        blocks `block_ids` that `first_block` begins."""
        return cls(
            request_id=request_id,
            segment=segment,
            offset=slot.offset,
            rank_bytes=slot.rank_bytes,
            first_block=first_block,
            block_ids=np.asarray(block_ids[first_block : slot.num_blocks], dtype=np.int32),
            is_background=is_background,
            swapped=slot.transfer if is_swapped else "",
        )


@dataclass(slots=True)
class Save:
    """Copy paged blocks `block_ids` of a preempted request to the start of `slot`.

    `offset` and `rank_bytes` as in `Load`.
    """

    slot: str
    segment: str
    offset: int
    rank_bytes: int
    block_ids: BlockIds


@dataclass
class StepMeta(KVConnectorMetadata):
    """One step's orders to the workers, executed in the order of the fields.

    Attributes:
        stops: Requests whose transfer ends now; their blocks may be gone
            after this step, so the worker waits until nothing reads them.
        saves: Blocks to copy before this step's forward pass reuses them.
        opens: Transfers to open.
        writes: Blocks that earlier steps completed.
        tails: Blocks that this step completes, pushed behind its forward pass.
        notes: (endpoint, bytes) pairs that tell a receiver about a transfer.
        frees: Finished requests to report once nothing reads their blocks.
        loads: Blocks to fill before this step's forward pass.
        is_empty: Nothing is computed in this step.
    """

    stops: list[str] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    tails: list[Write] = field(default_factory=list)
    notes: list[tuple[str, bytes]] = field(default_factory=list)
    frees: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    is_empty: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What happened on the workers since the last report.

    Attributes:
        loaded: Ranks that have executed the load of a request.
        saved: Ranks that have filled a slot of a preempted request, by its name.
        unsaved: Ranks that could not.
        restored: Ranks that have executed the load from such a slot.
        failed: Why the transfer of a request failed: (status name, text).
        sent_bytes: KV bytes sent by transfers that completed.
        loaded_bytes: KV bytes copied from the arena into blocks.
        load_errors: Loads that could not be executed.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    unsaved: dict[str, int] = field(default_factory=dict)
    restored: dict[str, int] = field(default_factory=dict)
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)
    sent_bytes: int = 0
    loaded_bytes: int = 0
    load_errors: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Sum over ranks (vLLM's `KVOutputAggregator`)."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            loaded=_sum(self.loaded, other.loaded),
            saved=_sum(self.saved, other.saved),
            unsaved=_sum(self.unsaved, other.unsaved),
            restored=_sum(self.restored, other.restored),
            failed={**self.failed, **other.failed},
            sent_bytes=self.sent_bytes + other.sent_bytes,
            loaded_bytes=self.loaded_bytes + other.loaded_bytes,
            load_errors=self.load_errors + other.load_errors,
        )

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in _REPORTED)


def _sum(ranks: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: ranks.get(name, 0) + other.get(name, 0) for name in ranks.keys() | other.keys()}


_REPORTED = tuple(each.name for each in fields(WorkerReport))


@dataclass
class WorkerShape(KVConnectorHandshakeMetadata):
    """A worker's KV layout, told to the scheduler half after registration.

    Attributes:
        identity: What a peer must agree on, value by value.
        block_bytes: One block of one rank over all layers, in bytes.
        num_ranks: Tensor-parallel workers of this instance.
    """

    identity: dict[str, str]
    block_bytes: int
    num_ranks: int
