"""Worker half of the connector: executes the orders of one step.

Owner: the worker's main thread. The native sender owns its own threads; they never call
Python. One copier thread, started on first use, executes background copies; it touches only
the mover and the arena. Where the C++ core cannot move the KV, the push thread does.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_tetri.config import TetriConfig
from vllm_tetri.engine.compat import load_nccl
from vllm_tetri.engine.pool import open_rows
from vllm_tetri.engine.step import FREED, Load, Open, StepMeta, WorkerReport, Write
from vllm_tetri.errors import ConfigError, TransferError
from vllm_tetri.security import kv_key_of
from vllm_tetri.transport.blocks import BlockMover, Cut, HostMover, LayerProgress, Rows, pieces
from vllm_tetri.transport.device import DeviceArena, DeviceEvent
from vllm_tetri.transport.links import ARENA_KINDS, link_kinds, parse_link
from vllm_tetri.transport.native import Arena, Sender, Transfer, TransferState
from vllm_tetri.transport.nccl import NcclReceiver
from vllm_tetri.transport.push import Push, failure
from vllm_tetri.transport.segments import LEAST_CUDA_BYTES, arena_size
from vllm_tetri.transport.shards import Shards
from vllm_tetri.transport.wires import make_wires

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
    is_last: bool = False  # the request is finished: report it when DONE
    is_finished: bool = False  # the transfer was told that nothing follows
    free: bool = False  # report it as soon as nothing reads its blocks


class KVWorker:
    """Pushes blocks of this rank's shard to other instances, loads blocks from the arena."""

    def __init__(
        self,
        config: TetriConfig,
        identity: dict[str, str],
        mover: BlockMover,
        rank: int,
        shards: Shards,
    ) -> None:
        self._config, self._mover = config, mover
        self._rank, self._shards = rank, shards
        self._sources: dict[int, list[tuple[int, Cut | None]]] = {}  # by the parts of a slot
        links = link_kinds(config.link, is_device=mover.device is not None)
        if links[0] in ARENA_KINDS and shards.num_ranks > 1:
            raise ConfigError(
                f"--tetri-link {config.link}: KV arrives on one GPU, and this instance has "
                f"{shards.num_ranks} workers; use auto"
            )
        self._sender = Sender(
            identity=identity,
            rank=shards.part_of(rank),
            num_ranks=shards.num_parts,
            links=links,
            streams=config.streams,
            io_timeout_s=config.transfer_timeout_s,
            emulate=parse_link(config.link).emulated,
            key=kv_key_of(config.secret_file),
        )
        timeout_s = config.transfer_timeout_s
        wires = make_wires(mover, links, timeout_s, load_nccl)
        self._nccl: NcclReceiver | None = None
        self._push = Push(self._sender, wires, timeout_s) if wires else None
        self.sending: dict[str, _Sending] = {}
        self._progress: LayerProgress | None = None
        self._by_layer: list[Write] = []
        self._has_told = False
        self._arenas: dict[str, Arena] = {}
        self._device_arena: DeviceArena | None = None  # in place of those
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="tetri-copy")
        self._loading: dict[str, tuple[Load, Future[None]]] = {}
        self._report = WorkerReport()
        self._failed_blocks: set[int] = set()
        self.pool: Rows | None = None  # memory of blocks that left the prefix cache

    def track_layers(self, layers: dict[str, torch.Tensor]) -> None:
        """Let layers of KV in host memory, by name, leave by themselves if `--tetri-push` may ask
        for it."""
        if self._config.push in ("layer", "auto") and isinstance(self._mover, HostMover):
            self._progress = self._mover.progress(layers)

    def open_arena(self, prompt_blocks: int) -> DeviceArena | None:
        """Allocate the receive arena in the device's memory if KV comes by CUDA IPC or NCCL: as
        large as configured, else for prompts of up to so many blocks. Idempotent. TransferError if
        the device has no room for it, or does not share it."""
        device, config, layout = self._mover.device, self._config, self._mover.layout
        kind = parse_link(config.link).kind
        if device is None or kind not in ARENA_KINDS or self._device_arena is not None:
            return self._device_arena
        try:
            half_bytes = device.free_bytes() // 2
            bounds = {"free": half_bytes, "cache": layout.num_blocks * layout.block_bytes}
            size = arena_size(layout.block_bytes, prompt_blocks, LEAST_CUDA_BYTES, bounds)
            num_bytes = config.arena_bytes or size.num_bytes
            if num_bytes < layout.block_bytes:
                raise RuntimeError(f"half of what is free are {half_bytes} bytes")
            if kind == "ipc":
                address, handle = device.share(num_bytes)
            else:
                memory = address, _ = device.reserve(num_bytes), num_bytes
                library, timeout_s = load_nccl(), config.transfer_timeout_s / 2
                self._nccl = NcclReceiver(device, library, memory, config.host, timeout_s)
                handle = self._nccl.handle
        except (RuntimeError, OSError) as error:
            raise TransferError(
                "the device has no room for a receive arena or does not share it "
                f"(--tetri-link {config.link}): {error}. Lower --gpu-memory-utilization or "
                "--tetri-arena-bytes, or use --tetri-link auto"
            ) from error
        self._device_arena = DeviceArena(address, num_bytes, handle, kind)
        return self._device_arena

    def open_pool(self, num_places: int) -> None:
        """Get memory for blocks that leave the prefix cache, once. ConfigError if there is none."""
        if num_places and self.pool is None:
            self.pool = open_rows(self._mover, num_places, self._config.kv_pool)

    # -- before the forward pass -------------------------------------------

    def stop_preempted(self, meta: StepMeta) -> None:
        """Stop transfers that read blocks of preempted requests, which are about to be reused. What
        the pool is to keep of reused blocks is copied first."""
        if meta.saves is not None:
            assert self.pool is not None
            self._mover.save_rows(self.pool, *meta.saves)
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
        for order in meta.early_loads:
            self._load_now(order)
        if self._rank == 0:
            for endpoint, note in meta.notes:
                self.send_note(endpoint, note)
        if not self._shards.sends(self._rank):
            return  # another rank has the same KV and sends it
        for opening in meta.opens:
            self._open(opening)
        self._write_all(meta.writes)
        if self._progress is not None:
            self._progress.begin()
            tails = (each for each in meta.tails if each.request_id in self.sending)
            self._by_layer = [each for each in tails if each.by_layer]
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
                try:
                    after = self._mark()
                except RuntimeError as error:
                    future = Future[None]()
                    future.set_exception(error)
                else:
                    future = self._copier.submit(self._scatter, order, after)
                self._loading[order.request_id] = order, future
            else:
                self._load_now(order)

    def send_note(self, endpoint: str, note: bytes) -> None:
        """Queue a note for another instance, without waiting: it may not be listening."""
        try:
            self._sender.send(endpoint, note, 0.0)
        except (ValueError, RuntimeError):
            logger.exception(
                "cannot send a message to %s; the request there waits for its timeout", endpoint
            )

    def _open(self, order: Open) -> None:
        if (old := self.sending.get(order.request_id)) is not None:
            names = (old.endpoint, old.transfer.name, len(old.given))
            is_same = names == (order.endpoint, order.transfer, order.num_blocks)
            if is_same and old.transfer.state in (TransferState.OPENING, TransferState.SENDING):
                old.round = order.round  # another rank has to try again
                return
            del self.sending[order.request_id]
            old.transfer.cancel()
        try:
            transfer = self._sender.open(
                order.endpoint, order.transfer, order.num_blocks, self._mover.layout.block_bytes
            )
        except (ValueError, RuntimeError) as error:  # or there is no thread for it
            self._report.failed[order.request_id] = (order.round, "INVALID", str(error))
        else:
            given = np.zeros(order.num_blocks, dtype=np.bool_)
            self.sending[order.request_id] = _Sending(transfer, order.endpoint, order.round, given)

    def _mark(self) -> DeviceEvent | None:
        """Make an event behind the work that was submitted so far. RuntimeError: no device."""
        return self._mover.device.mark() if self._mover.device is not None else None

    def _write_all(self, orders: list[Write]) -> None:
        """Push blocks that are complete behind all work that was submitted so far."""
        due = [each for each in orders if each.request_id in self.sending]
        if not due:
            return
        try:
            tag = self._push.mark(self._mark()) if self._push is not None else 0
        except RuntimeError as error:
            for order in due:
                sending = self.sending[order.request_id]
                sending.transfer.cancel()
                failed = sending.round, "INVALID", failure(error)
                self._report.failed[order.request_id] = failed
            logger.exception(
                "no KV is sent any more, since the device failed: restart this instance"
            )
            return
        for order in due:
            self._write(order, self.sending[order.request_id], tag)

    def _write(self, order: Write, sending: _Sending, tag: int) -> None:
        layout, transfer = self._mover.layout, sending.transfer
        for first, block_ids in order.runs:
            given = sending.given[first : first + len(block_ids)]
            skipped = int(given.sum())  # it has the first ones from an earlier round
            given[:] = True
            for start, piece in pieces(block_ids[skipped:], layout.block_bytes):
                transfer.write(layout, first + skipped + start, piece, tag)
        sending.is_last |= order.is_last
        if sending.is_last and not sending.is_finished:
            transfer.finish()
            sending.is_finished = True

    def _load_now(self, order: Load) -> None:
        error: Exception | None = None
        try:
            self._scatter(order, None)
        except (ValueError, OSError, RuntimeError, TransferError) as caught:
            error = caught
            self._failed_blocks |= order.block_ids
        self._record_load(order, error)

    def _scatter(self, order: Load, after: DeviceEvent | None) -> None:
        """Copy from arena and pool, behind an event of the device if there is one."""
        if order.pool is not None:
            assert self.pool is not None
            self._mover.load_rows(self.pool, *order.pool, after)
        if not order.runs:
            return
        if self._device_arena is None and order.segment not in self._arenas:
            self._arenas[order.segment] = Arena(order.segment)
        arena, count = self._device_arena or self._arenas[order.segment], order.num_parts
        if count not in self._sources:
            self._sources[count] = self._shards.sources(self._rank, count)
        parts = self._sources[count]
        sources = [(order.offset + part * order.part_bytes, cut) for part, cut in parts]
        for first_block, block_ids in order.runs:
            self._mover.scatter(arena, sources, first_block, block_ids, after)

    def _record_load(self, order: Load, error: BaseException | None) -> None:
        """Record the end of a load. If it failed, vLLM computes the blocks again
        (kv_load_failure_policy=recompute)."""
        self._report.loaded[order.request_id] = 1
        if error is None:
            self._report.loaded_bytes += order.num_blocks * self._mover.layout.block_bytes
        else:
            self._report.failed_loads.add(order.request_id)
            logger.error(
                "loading KV of request %s failed; vLLM recomputes it", order.request_id,
                exc_info=error,
            )  # fmt: skip

    # -- after the forward pass ---------------------------------------------

    def record_layer(self, layer: str | None) -> None:
        """Push a layer of blocks that this step's forward pass completes (None: what is left)."""
        if self._by_layer and self._progress is not None and (part := self._progress.record(layer)):
            for order in self._by_layer:
                if (sending := self.sending.get(order.request_id)) is None:
                    continue  # it failed, and vLLM asks for results before it computes drafts
                for first, block_ids in order.runs:
                    sending.transfer.write(part, first, block_ids)
                    sending.given[first : first + len(block_ids)] = True

    def push_tails(self, meta: StepMeta) -> None:
        """Push blocks that this step's forward pass completes; it is done or ordered by now."""
        if self._by_layer and self._progress is not None and not self._has_told:
            self._has_told = True
            logger.info(
                "%d of %d pages of KV left while a last chunk was computed (--tetri-push)",
                self._progress.num_given, self._progress.num_pages,
            )  # fmt: skip
        self.record_layer(None)
        self._write_all(meta.tails)

    def wait_for_sent(self) -> None:
        """Wait a moment for the last transfer under way (GIL released)."""
        if any(sending.is_finished or sending.free for sending in self.sending.values()):
            self._sender.wait(SENT_WAIT_S)

    def collect_sent(self) -> None:
        """Report requests whose blocks nothing reads any more, and transfers that failed."""
        report = self._report
        for request_id, sending in list(self.sending.items()):
            transfer, state = sending.transfer, sending.transfer.state
            is_done = state is TransferState.DONE
            if is_done and (sending.is_last or sending.free):
                report.sent_bytes += transfer.bytes_sent
            if sending.free and (is_done or transfer.quiesced):
                report.ended[request_id, FREED] = 1
            elif is_done and sending.is_last:
                report.ended[request_id, sending.round] = 1
            elif state in (TransferState.FAILED, TransferState.CANCELLED) and transfer.quiesced:
                why = "STALE" if state is TransferState.CANCELLED else transfer.status.name
                report.failed.setdefault(request_id, (sending.round, why, transfer.error))
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

    def settle(self) -> None:
        """Stop all transfers and wait until no copy reads or writes KV, at most a while: vLLM is
        about to unmap a device's. No load or write may be ordered meanwhile."""
        if isinstance(self._mover, HostMover):
            return
        for sending in self.sending.values():
            sending.transfer.cancel()
        self._mover.settle()
        deadline = time.monotonic() + STOP_DEADLINE_S
        for sending in self.sending.values():
            while not sending.transfer.quiesced and time.monotonic() < deadline:
                self._sender.wait(0.001)
        wait([future for _, future in self._loading.values()], deadline - time.monotonic())

    def close(self) -> None:
        """Stop all transfers. Idempotent."""
        self._copier.shutdown(cancel_futures=True)
        if self._push is not None:
            self._push.stop()
        self._sender.close()
        if self._push is not None:
            self._push.close()
        if self._nccl is not None:
            self._nccl.close()
        self._mover.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self.sending.clear()
