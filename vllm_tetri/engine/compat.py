"""Every vLLM name that the engine side touches, and what it relies on.

Public or documented: `KVConnectorBase_V1` and its metadata classes,
`SupportsHMA`, `KVTransferConfig`, the `vllm.general_plugins` group,
`--scheduler-cls`, `--middleware`. Private: everything else below. Contract
tests (`tests/engine/test_contract.py`) fix the signatures and attributes.
"""

from __future__ import annotations

import logging

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec
from vllm.v1.request import Request, RequestStatus

__all__ = [
    "AsyncScheduler",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "MLAAttentionSpec",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerOutput",
    "SupportsHMA",
    "UniProcExecutor",
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
    "running",  # R: list of Request
    "waiting",  # R: len() only
    "connector",  # R
    "kv_cache_manager",  # R: .block_pool.num_gpu_blocks, .block_pool.get_num_free_blocks()
    "max_num_scheduled_tokens",  # R, W: per-step token budget = chunk size
    "scheduler_config",  # R: .max_num_batched_tokens
    "vllm_config",  # R
)
# Attributes of `Request` that we read (R) or set (W).
REQUEST_ATTRIBUTES = (
    "request_id",  # R
    "kv_transfer_params",  # R
    "max_tokens",  # W: 1 on the prefill side
    "num_prompt_tokens",  # R
    "prompt_token_ids",  # R
    "num_computed_tokens",  # R
    "num_output_tokens",  # R
    "num_tokens",  # R
    "num_preemptions",  # R
    "status",  # R
)
