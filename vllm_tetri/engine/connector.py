"""The KV connector that vLLM loads: thin, one half per process role.

The scheduler half lives in the engine process and owns an `Endpoint` (receive arena,
control agent, send and receive side). The worker half lives where the KV tensors are and
owns a `KVWorker`. With one worker in the engine process both halves exist there.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vllm_tetri.config import decode_config
from vllm_tetri.engine.chunk_size import fit_to_chunking
from vllm_tetri.engine.compat import (
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    SupportsHMA,
    copy_batch,
    get_kv_transfer_group,
    get_tp_group,
    has_kv_layout,
    has_kv_transfer_group,
)
from vllm_tetri.engine.continuation import teach_v1_runner
from vllm_tetri.engine.endpoint import Endpoint
from vllm_tetri.engine.identity import identity_of, shards_of, why_alone
from vllm_tetri.engine.pool import pool_places
from vllm_tetri.engine.prediction import HEAD
from vllm_tetri.engine.roles import CONFIG_KEY, config_of_rank, rank_of
from vllm_tetri.engine.states import StateReader, give_out_layer, watch_runners
from vllm_tetri.engine.step import KVLayout, StepMeta, WorkerReport, WorkerShape
from vllm_tetri.engine.worker import KVWorker
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import (
    DecodeParams,
    Fetch,
    Prefilled,
    PrefillParams,
    from_params,
    to_params,
)
from vllm_tetri.transport.blocks import mover_for
from vllm_tetri.transport.shards import Shards

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext

logger = logging.getLogger(__name__)

BLOCK_OUTERMOST = "BLHNC"  # vLLM's name of a KV cache layout


def prepare_model(runner: Any, vllm_config: VllmConfig) -> None:
    """Prepare the model that an instance's worker has just loaded for the length head, if any."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if decode_config(extra[CONFIG_KEY]).predictor == HEAD:
        give_out_layer(runner, vllm_config)


class TetriConnector(KVConnectorBase_V1, SupportsHMA):
    """Pushes prefilled KV to decode instances and loads KV that was pushed here."""

    endpoint: Endpoint  # the state of the scheduler half

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._alone = why_alone(vllm_config, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._tetri = config_of_rank(decode_config(extra[CONFIG_KEY]), rank_of(vllm_config))
        self._cache_config = kv_cache_config
        self.worker: KVWorker | None = None  # executes the orders of steps
        self._states: StateReader | None = None  # on the first rank, for the length head
        self.shape: WorkerShape | None = None  # of the worker, once it has KV
        if role is KVConnectorRole.SCHEDULER:
            self.endpoint = Endpoint(fit_to_chunking(self._tetri, vllm_config), vllm_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for blocks that have all layers in one run of bytes, so that a GPU copies each at
        once. vLLM 0.32 takes it as a wish and warns where the attention backend has no such layout;
        the user's VLLM_KV_CACHE_LAYOUT goes first."""
        return BLOCK_OUTERMOST if has_kv_layout(BLOCK_OUTERMOST) else None

    # -- worker half --------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        teach_v1_runner()
        tensors, alone = list(kv_caches.values()), self._alone
        if self._vllm_config.device_config.device_type == "cpu":
            # vLLM's attention in bfloat16 uses AMX, for which the kernel has to be asked. A matrix
            # product of many tokens does; without one before, the process ends (patches/0004).
            torch.cpu._init_amx()
        group = get_tp_group()
        if self._tetri.predictor == HEAD and group.rank_in_group == 0:
            self._states = StateReader()
            watch_runners(self._states)
        try:
            mover = (
                None if alone else mover_for(tensors, self._cache_config.num_blocks, copy_batch())
            )
        except ValueError as error:
            mover, alone = None, str(error)
        if mover is None:
            identity = {"instance": self._tetri.instance}  # it equals no other's
            self.shape = WorkerShape(identity, KVLayout(1, Shards()), alone)
            return
        shards = shards_of(self._vllm_config, self._cache_config, tensors)
        identity = identity_of(self._vllm_config, self._cache_config, tensors, shards)
        block_bytes = mover.layout.block_bytes * shards.num_parts
        layout = KVLayout(block_bytes, shards, mover.device is not None)
        self.shape = WorkerShape(identity, layout)
        self.worker = KVWorker(self._tetri, identity, mover, group.rank_in_group, shards)
        self.worker.track_layers(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Let no copy touch KV any more: vLLM 0.33 calls this before it unmaps KV (sleep mode)."""
        if self.worker is not None:
            self.worker.settle()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Describe the worker, whose graphs are captured and whose device has its memory: what is
        free now stays free. No pool of sleep mode takes what is allocated here."""
        if self.worker is not None and self.shape is not None:
            max_len = self._vllm_config.model_config.max_model_len
            sizes = [each.kv_cache_spec.block_size for each in self._cache_config.kv_cache_groups]
            self.shape.arena = self.worker.open_arena(sum(-(-max_len // each) for each in sizes))
            layout, config = self.shape.layout, self._tetri
            # Once for both halves: the scheduler's configuration has one layer of each group.
            self.shape.pool = pool_places(config, self._vllm_config, self._cache_config, layout)
            self.worker.open_pool(self.shape.pool[0])
        return self.shape

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self.worker is not None:
            self.worker.stop_preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._states is not None:
            self._states.begin_step(connector_metadata.reads)
        if self.worker is not None:
            self.worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are complete, or ordered by an event, before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Push a layer of what leaves layer by layer (`--tetri-push`)."""
        if self.worker is not None:
            self.worker.record_layer(layer_name)

    def wait_for_save(self) -> None:
        """Push the ends of prompts: the forward pass is over, and so is that of a draft model. Any
        other block is pushed in the step after the one that completed it."""
        if self.worker is not None:
            self.worker.push_tails(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker is None:
            return KVConnectorTransferResults()
        if self._get_connector_metadata().is_empty:
            self.worker.wait_for_sent()
        self.worker.collect_sent()
        loaded, failed = self.worker.take_background_loads()
        return KVConnectorTransferResults(finished_recving=loaded | failed, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks() if self.worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self.worker.take_report() if self.worker is not None else None
        if self._states is not None and (states := self._states.take()):
            report = report or WorkerReport()
            report.states = states
        return report

    # -- scheduler half -----------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.endpoint.start(next(iter(metadata.values())))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        endpoint, receives, pool = self.endpoint, self.endpoint.receives, self.endpoint.pool
        is_busy = bool(endpoint.scheduler.running)
        num_tokens, is_background = receives.match(request, num_computed_tokens, is_busy=is_busy)
        if num_tokens == 0:
            num_tokens, is_background = pool.match(request, num_computed_tokens, is_busy=is_busy)
        if num_tokens is None:
            return None, is_background
        pool.ask(request.request_id)
        if endpoint.sends.refuses(request.request_id, num_computed_tokens + num_tokens):
            return None, False
        endpoint.scheduler.pins.ask(request.request_id)
        missing_tokens = request.num_tokens - 1 - num_computed_tokens - num_tokens
        scheduler = endpoint.scheduler
        count_shared = partial(scheduler.pins.num_shared, request) if num_computed_tokens else int
        is_admitted = scheduler.gate.admit(request, missing_tokens, count_shared)
        return (num_tokens if is_admitted else None), is_background

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._cache_config.transfer_group_ids

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        block_ids = blocks.get_block_ids() if num_external_tokens else ()  # else not looked at
        self.endpoint.receives.admitted(request, block_ids, num_external_tokens)
        self.endpoint.pool.admitted(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.endpoint.scheduler.pins.end_step()
        self.endpoint.times.begin(scheduler_output.scheduled_new_reqs)
        meta = StepMeta(loads=self.endpoint.receives.take_loads())
        self.endpoint.pool.fill(meta)
        self.endpoint.sends.fill(meta, scheduler_output)
        self.endpoint.moves.fill(meta, scheduler_output)
        meta.is_empty = not scheduler_output.total_num_scheduled_tokens
        scheduler, scheduled = self.endpoint.scheduler, scheduler_output.num_scheduled_tokens
        started = scheduler.waiting.lane.started  # of no other a state is wanted
        if prompts := {each: scheduled[each] for each in started if each in scheduled}:
            meta.reads = self.endpoint.predictions.reads(prompts, scheduler.requests)
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        endpoint, report = self.endpoint, connector_output.kv_connector_worker_meta
        endpoint.pool.distrust(connector_output.invalid_block_ids)
        endpoint.sends.distrust(connector_output.invalid_block_ids)
        if isinstance(report, WorkerReport):
            endpoint.receives.report(report)
            endpoint.pool.report(report)
            endpoint.sends.report(report)
            # vLLM asserts on an id that it does not hold; never return one.
            freeable = endpoint.sends.take_freeable(report) | endpoint.moves.report(report)
            connector_output.finished_sending = freeable

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        endpoint = self.endpoint
        endpoint.receives.finish(request)
        endpoint.pool.release(request.request_id)
        endpoint.cache.record_request(request)
        if (served := endpoint.times.take(request)) is not None:
            endpoint.agent.publish(served, is_urgent=False)
        moved_by = endpoint.moves.moved_by(request)
        must_stay, prefilled = endpoint.moves.finish(request), None
        if must_stay is None:
            must_stay, prefilled = endpoint.sends.finish(request, block_ids)
        self._send_notes()
        if prefilled is None and not moved_by:
            endpoint.scheduler.record_decoded(request)
        # Its length is told by the instance that decodes it, if there is one.
        told_by = prefilled.transfer if prefilled is not None and prefilled.decode else moved_by
        endpoint.predictions.end(request, told_by)
        endpoint.dispatcher.policy.forget(request.request_id)
        return must_stay, to_params(prefilled) if prefilled is not None else None

    def reset_cache(self) -> bool:
        """Exchange no KV any more. vLLM calls this when KV becomes invalid because weights are
        about to be replaced (pause, sleep), and does not tell what they are replaced by."""
        self.endpoint.leave_exchange()
        if (worker := self._worker_here()) is not None:
            worker.settle()
        return True

    def _worker_here(self) -> KVWorker | None:
        """Return the worker if it is in this process."""
        other = get_kv_transfer_group() if has_kv_transfer_group() else None
        return other.worker if isinstance(other, TetriConnector) else None

    def _send_notes(self) -> None:
        """Send notes before the next step if the worker is in this process."""
        if (worker := self._worker_here()) is not None:
            for endpoint, note in self.endpoint.sends.take_notes():
                worker.send_note(endpoint, note)

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()
        if self.role is KVConnectorRole.SCHEDULER:
            self.endpoint.close()


def params_of(request: Request) -> PrefillParams | DecodeParams | Fetch | None:
    """Return the transfer parameters of a new request; without valid ones it is aggregated."""
    try:
        params = from_params(request.kv_transfer_params)
    except ProtocolError as error:
        params, request.kv_transfer_params = None, None
        logger.warning(
            "request %s is served by this instance alone, since its transfer parameters are "
            "invalid: %s. Check that routers and instances run the same version of vllm-tetri.",
            request.request_id, error,
        )  # fmt: skip
    return None if isinstance(params, Prefilled) else params
