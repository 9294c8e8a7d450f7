"""Every vLLM name that the engine side touches, and what it relies on.

Public or documented: `KVConnectorBase_V1` and its metadata classes,
`SupportsHMA`, `KVTransferConfig`, the `vllm.general_plugins` group,
`--scheduler-cls`, `--middleware`. Private: everything else below. Contract
tests (`tests/engine/test_contract.py`) fix the signatures and attributes.
"""

from __future__ import annotations

import logging

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_input_batch import CachedRequestState

__all__ = [
    "AsyncScheduler",
    "CachedRequestState",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "LogprobsLists",
    "MLAAttentionSpec",
    "NewRequestData",
    "PauseState",
    "Request",
    "RequestQueue",
    "RequestStatus",
    "SamplingParams",
    "Scheduler",
    "SchedulerOutput",
    "SupportsHMA",
    "UniProcExecutor",
    "get_hash_fn_by_name",
    "get_kv_transfer_group",
    "get_request_block_hasher",
    "has_kv_transfer_group",
    "share_logging",
]


def share_logging() -> None:
    """Let this package's loggers write where vLLM's do. Idempotent."""
    ours, theirs = logging.getLogger("vllm_tetri"), logging.getLogger("vllm")
    ours.handlers = theirs.handlers
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate


# Attributes of `Scheduler` that we read (R) or set (W).
SCHEDULER_ATTRIBUTES = (
    "requests",  # R: dict of request id to Request
    "running",  # R, W: list of Request; decodes are moved before prompts
    "waiting",  # W: our RequestQueue, once, before the first request
    "finished_req_ids",  # R: ended since the last step
    "kv_holding_waiting",  # R: requests whose KV is loaded beside the steps
    "needs_kv_cache_zeroing",  # R
    "block_size",  # R
    "max_num_active_reqs",  # R
    "hash_block_size",  # R
    "connector",  # R
    "kv_cache_manager",  # R: .block_pool.num_gpu_blocks, .block_pool.get_num_free_blocks(),
    # .get_computed_blocks(request)
    "max_num_scheduled_tokens",  # R, W: per-step token budget
    "use_v2_model_runner",  # R
    "structured_output_manager",  # R: .accept_tokens(request, token_ids)
    "scheduler_config",  # R: .max_num_batched_tokens
    "vllm_config",  # R
)
# Attributes of `Request` that we read (R) or set (W).
REQUEST_ATTRIBUTES = (
    "request_id",  # R
    "kv_transfer_params",  # R
    "priority",  # R
    "is_prefill_chunk",  # R
    "max_tokens",  # W: 1 on the prefill side
    "num_prompt_tokens",  # R
    "prompt_token_ids",  # R
    "skip_reading_prefix_cache",  # W: False where our context counts as loaded
    "num_computed_tokens",  # R
    "num_output_tokens",  # R
    "num_output_placeholders",  # R: outputs of steps under way
    "num_tokens",  # R
    "all_token_ids",  # R
    "append_output_token_ids",  # R: given tokens, before the request is queued
    "sampling_params",  # R
    "structured_output_request",  # R: .grammar, None until it is compiled
    "skip_reading_prefix_cache",  # W
    "num_preemptions",  # R
    "status",  # R
)
