"""Worker half of the connector: executes the orders of one step.

Owner: the worker's main thread. The native sender owns its own threads; they never call
Python. One copier thread, started on first use, executes background copies; it touches only
the mover and the arena.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.config import TetriConfig
from vllm_tetri.engine.step import FREED, Load, Open, StepMeta, WorkerReport, Write
from vllm_tetri.errors import TransferError
from vllm_tetri.security import kv_key_of
from vllm_tetri.transport.blocks import BlockMover, Cut, Gathered, pieces
from vllm_tetri.transport.native import Arena, Sender, Transfer, TransferState
from vllm_tetri.transport.shards import Shards

logger = logging.getLogger(__name__)

# Copies check the cancel flag every few microseconds: a slower writer waits for a dead machine.
STOP_DEADLINE_S = 5.0
# How long a step without tokens waits for a transfer and leaves the core to the API server.
SENT_WAIT_S = 0.002


@dataclass(slots=True)
class _Sending:
    transfer: Transfer
    endpoint: str
    round: int
    given: NDArray[np.bool_]  # the blocks of the slot that it was given
    gathered: list[tuple[int, Gathered]] = field(default_factory=list)  # (first block, source)
    num_written: int = 0  # entries of `gathered` that the transfer has
    is_last: bool = False  # the request is finished: report it when DONE
    is_finished: bool = False  # the transfer was told that nothing follows
    free: bool = False  # report it as soon as nothing reads its blocks


class KVWorker:
    """Pushes blocks of this rank's shard to other instances, loads blocks from the arena."""

    def __init__(
        self,
        *,
        config: TetriConfig,
        identity: dict[str, str],
        mover: BlockMover,
        rank: int,
        shards: Shards,
    ) -> None:
        self._mover = mover
        self._rank, self._shards = rank, shards
        self._sources: dict[int, list[tuple[int, Cut | None]]] = {}  # by the parts of a slot
        self._sender = Sender(
            identity=identity,
            rank=shards.part_of(rank),
            num_ranks=shards.num_parts,
            link=config.link,
            streams=config.streams,
            io_timeout_s=config.transfer_timeout_s,
            key=kv_key_of(config.secret_file),
        )
        self.sending: dict[str, _Sending] = {}
        self._arenas: dict[str, Arena] = {}
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="tetri-copy")
        self._loading: dict[str, tuple[Load, Future[None]]] = {}
        self._report = WorkerReport()
        self._failed_blocks: set[int] = set()

    # -- before the forward pass -------------------------------------------

    def stop_preempted(self, meta: StepMeta) -> None:
        """Stop transfers that read blocks of preempted requests, which are about to be reused."""
        stopped = {name for name in meta.stops if name in self.sending}
        for request_id in stopped:
            self.sending[request_id].transfer.cancel()
        deadline = time.monotonic() + STOP_DEADLINE_S
        for request_id in stopped:
            if request_id not in meta.frees:
                transfer = self.sending.pop(request_id).transfer
                while not transfer.quiesced and time.monotonic() < deadline:
                    self._sender.wait(0.001)

    def begin_step(self, meta: StepMeta) -> None:
        """Open and feed transfers; blocks named here are complete."""
        if self._rank == 0:
            for endpoint, note in meta.notes:
                self.send_note(endpoint, note)
        if not self._shards.sends(self._rank):
            return  # another rank has the same KV and sends it
        for opening in meta.opens:
            self._open(opening)
        for write in meta.writes:
            self._write(write)
        for request_id in meta.frees:
            if (sending := self.sending.get(request_id)) is not None:
                sending.transfer.cancel()
                sending.free = True
            else:
                self._report.ended[request_id, FREED] = 1

    def load(self, meta: StepMeta) -> None:
        """Fill blocks from the arena; this step's forward pass reads those that are not
        loaded in the background."""
        for order in meta.loads:
            if order.is_background:
                future = self._copier.submit(self._scatter, order)
                self._loading[order.request_id] = order, future
            else:
                self._load_now(order)

    def send_note(self, endpoint: str, note: bytes) -> None:
        """Queue a note for another instance, without waiting: it may not be listening."""
        try:
            self._sender.send(endpoint, note, 0.0)
        except ValueError:
            logger.exception(
                "cannot send a message to %s; the request there waits for its timeout", endpoint
            )

    def _open(self, order: Open) -> None:
        if (old := self.sending.get(order.request_id)) is not None:
            is_same = (old.endpoint, old.transfer.name) == (order.endpoint, order.transfer)
            if is_same and old.transfer.state in (TransferState.OPENING, TransferState.SENDING):
                old.round = order.round  # another rank has to try again
                return
            del self.sending[order.request_id]
            old.transfer.cancel()
        try:
            transfer = self._sender.open(
                order.endpoint, order.transfer, order.num_blocks, self._mover.block_bytes
            )
        except ValueError as error:
            self._report.failed[order.request_id] = (order.round, "INVALID", str(error))
        else:
            given = np.zeros(order.num_blocks, dtype=np.bool_)
            self.sending[order.request_id] = _Sending(transfer, order.endpoint, order.round, given)

    def _write(self, order: Write) -> None:
        sending = self.sending.get(order.request_id)
        if sending is None:
            return
        try:
            for first, block_ids in order.runs:
                given = sending.given[first : first + len(block_ids)]
                skipped = int(given.sum())  # it has the first ones from an earlier round
                given[:] = True
                for start, piece in pieces(block_ids[skipped:], self._mover.block_bytes):
                    gathered = self._mover.gather(piece)
                    sending.gathered.append((first + skipped + start, gathered))
        except (ValueError, RuntimeError) as error:
            logger.exception(
                "reading KV of request %s failed; its transfer is cancelled", order.request_id
            )
            sending.transfer.cancel()
            self._report.failed[order.request_id] = (sending.round, "INVALID", str(error))
            return
        sending.is_last |= order.is_last
        _advance(sending)

    def _load_now(self, order: Load) -> None:
        error: Exception | None = None
        try:
            self._scatter(order)
        except (ValueError, OSError, RuntimeError, TransferError) as caught:
            error = caught
            self._failed_blocks.update(chain.from_iterable(ids.tolist() for _, ids in order.runs))
        self._record_load(order, error)

    def _scatter(self, order: Load) -> None:
        """Copy from the arena; in the background (copier thread) until the copy is done."""
        if order.segment not in self._arenas:
            self._arenas[order.segment] = Arena(order.segment)
        arena, count = self._arenas[order.segment], order.num_parts
        if count not in self._sources:
            self._sources[count] = self._shards.sources(self._rank, count)
        parts = self._sources[count]
        sources = [(order.offset + part * order.part_bytes, cut) for part, cut in parts]
        for first_block, block_ids in order.runs:
            self._mover.scatter(arena, sources, first_block, block_ids)
        if order.is_background:
            self._mover.settle()

    def _record_load(self, order: Load, error: BaseException | None) -> None:
        """Record the end of a load. If it failed, vLLM computes the blocks again
        (kv_load_failure_policy=recompute)."""
        self._report.loaded_bytes += order.num_blocks * self._mover.block_bytes
        self._report.loaded[order.request_id] = 1
        if error is not None:
            self._report.load_errors += 1
            logger.error(
                "loading KV of request %s failed; vLLM recomputes it", order.request_id,
                exc_info=error,
            )  # fmt: skip

    # -- after the forward pass ---------------------------------------------

    def push_tails(self, meta: StepMeta) -> None:
        """Push blocks that this step's forward pass completes; it is done or ordered by now."""
        for write in meta.tails:
            self._write(write)

    def wait_for_sent(self) -> None:
        """Wait a moment for the last transfer under way (GIL released)."""
        if any(sending.is_finished or sending.free for sending in self.sending.values()):
            self._sender.wait(SENT_WAIT_S)

    def collect_sent(self) -> None:
        """Report requests whose blocks nothing reads any more, and transfers that failed."""
        report = self._report
        for request_id, sending in list(self.sending.items()):
            _advance(sending)
            transfer = sending.transfer
            is_done = transfer.state is TransferState.DONE
            if is_done and (sending.is_last or sending.free):
                report.sent_bytes += transfer.bytes_sent
            if sending.free and (is_done or transfer.quiesced):
                report.ended[request_id, FREED] = 1
            elif is_done and sending.is_last:
                report.ended[request_id, sending.round] = 1
            elif transfer.state is TransferState.FAILED and transfer.quiesced:
                # The scheduler opens another one, or frees.
                report.failed[request_id] = sending.round, transfer.status.name, transfer.error
            else:
                continue
            del self.sending[request_id]

    def take_background_loads(self) -> tuple[set[str], set[str]]:
        """Return requests whose background load (succeeded, failed) since the last call."""
        loaded, failed = set[str](), set[str]()
        for request_id, (order, future) in list(self._loading.items()):
            if not future.done():
                continue
            del self._loading[request_id]
            error = future.exception()
            self._record_load(order, error)
            (loaded if error is None else failed).add(request_id)
        return loaded, failed

    def take_failed_blocks(self) -> set[int]:
        """Return blocks whose load failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """Return the events since the last call; None when there were none."""
        report, self._report = self._report, WorkerReport()
        return report or None

    def close(self) -> None:
        """Stop all transfers. Idempotent."""
        self._copier.shutdown(cancel_futures=True)
        self._sender.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self.sending.clear()


def _advance(sending: _Sending) -> None:
    """Write, in order, the blocks that are staged; staging of others may be under way."""
    if sending.num_written == len(sending.gathered) and not sending.is_last:
        return
    while sending.num_written < len(sending.gathered):
        first_block, gathered = sending.gathered[sending.num_written]
        if not gathered.is_ready():
            return
        sending.transfer.write(gathered.layout, first_block, gathered.block_ids)
        sending.num_written += 1
    if sending.is_last and not sending.is_finished:
        sending.transfer.finish()
        sending.is_finished = True
