"""The KV connector that vLLM loads: thin, one half per process role.

The scheduler half lives in the engine process and owns an `Instance` (receive
arena, control agent, outbox, inbox). The worker half lives where the KV tensors
are and owns a `KVWorker`. With one worker in the engine process both halves
exist side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_tetri.config import decode_config
from vllm_tetri.engine.compat import (
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    SupportsHMA,
    get_kv_transfer_group,
    has_kv_transfer_group,
    share_logging,
)
from vllm_tetri.engine.identity import identity_of, require_carriable
from vllm_tetri.engine.injection import make_runner_inject
from vllm_tetri.engine.instance import Instance
from vllm_tetri.engine.roles import CONFIG_KEY
from vllm_tetri.engine.step import StepMeta, WorkerReport, WorkerShape
from vllm_tetri.engine.worker import KVWorker
from vllm_tetri.handover import to_params
from vllm_tetri.kv.mover import mover_for

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput


class TetriConnector(KVConnectorBase_V1, SupportsHMA):
    """Pushes prefilled KV to a decode instance and loads what was pushed here."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        share_logging()
        require_carriable(vllm_config, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._tetri = decode_config(extra[CONFIG_KEY])
        self._cache_config = kv_cache_config
        self._worker: KVWorker | None = None
        self._shape: WorkerShape | None = None
        self._instance: Instance | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._instance = Instance(self._tetri, vllm_config)

    # -- worker half --------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        make_runner_inject()
        tensors = list(kv_caches.values())
        group = get_tp_group()
        mover = mover_for(tensors, self._cache_config.num_blocks)
        identity = identity_of(self._vllm_config, self._cache_config, tensors)
        self._shape = WorkerShape(identity, mover.block_bytes, group.world_size)
        self._worker = KVWorker(
            config=self._tetri,
            identity=identity,
            mover=mover,
            rank=group.rank_in_group,
            num_ranks=group.world_size,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._shape

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMeta)
        if self._worker is not None:
            self._worker.stop_preempted(kv_connector_metadata)
            self._worker.save(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMeta)
        if self._worker is not None:
            self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMeta)
        if self._worker is not None:
            self._worker.load(meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete, or ordered by an event, before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks leave by chunk, not by layer."""

    def wait_for_save(self) -> None:
        """A block is pushed in the step after the one that completed it."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMeta)
        self._worker.push_tails(meta)
        if meta.is_empty:
            self._worker.wait_for_sent()
        loaded, failed = self._worker.take_background_loads()
        return KVConnectorTransferResults(
            finished_sending=self._worker.take_sent(),
            finished_recving=loaded | failed,
            failed_recving=failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report() if self._worker is not None else None

    # -- scheduler half -----------------------------------------------------

    @property
    def instance(self) -> Instance:
        """The scheduler half's state; only there."""
        assert self._instance is not None
        return self._instance

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        shape = next(iter(metadata.values()))
        assert isinstance(shape, WorkerShape)
        self.instance.start(shape)
        if self.instance.profiling is None:
            self.instance.join()

    def on_new_request(self, request: Request) -> None:
        self.instance.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.instance.profiling is not None:
            loaded_tokens = self.instance.profiling.loaded_tokens(request.request_id)
            if loaded_tokens is not None:
                return loaded_tokens, False
        return self.instance.match(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._cache_config.transfer_group_ids

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        block_ids = blocks.get_block_ids()[0]
        self.instance.inbox.admitted(request, block_ids, num_external_tokens)
        self.instance.swap.admitted(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        inbox, swap = self.instance.inbox, self.instance.swap
        meta = StepMeta(loads=inbox.take_loads() + swap.take_loads(), saves=swap.take_saves())
        self.instance.outbox.fill(meta, scheduler_output)
        meta.is_empty = not scheduler_output.total_num_scheduled_tokens
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self.instance.inbox.report(report)
            self.instance.outbox.report(report)
            self.instance.swap.report(report)
        if connector_output.finished_sending:
            # vLLM asserts on an id that it does not hold; never hand it one.
            outbox = self.instance.outbox
            connector_output.finished_sending &= outbox.freeable(connector_output.finished_sending)
            for request_id in connector_output.finished_sending:
                self.instance.outbox.sent(request_id)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.instance.inbox.finished(request)
        self.instance.swap.forget(request)
        must_stay, prefilled = self.instance.outbox.finished(request, block_ids)
        self._tell_at_once()
        if prefilled is None:
            self.instance.count_finished(request)
        self.instance.ended(request)
        return must_stay, to_params(prefilled) if prefilled is not None else None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def _tell_at_once(self) -> None:
        """Notes need not wait for the next step if the worker is in this process."""
        if has_kv_transfer_group():
            other = get_kv_transfer_group()
            if isinstance(other, TetriConnector) and other._worker is not None:
                for endpoint, note in self.instance.outbox.take_notes():
                    other._worker.tell(endpoint, note)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._instance is not None:
            self._instance.close()
