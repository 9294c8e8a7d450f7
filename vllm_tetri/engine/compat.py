"""Every vLLM name that the engine side uses, and the contract that it relies on.

Public or documented: `KVConnectorBase_V1` and its metadata classes, `SupportsHMA`,
`KVTransferConfig`, the `vllm.general_plugins` group, `--scheduler-cls`, `--middleware`.
Everything else is private. `require_contract` compares the tables below with the vLLM that
is installed when an engine starts; `tests/engine/test_contract.py` also reads vLLM's source.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

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
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
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
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_tetri.errors import UnsupportedError

# How a request ends by itself.
COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def is_cpu() -> bool:
    """Whether vLLM computes on the CPU."""
    return bool(current_platform.is_cpu())


# Parameters of functions and methods that are called or overridden, beside `self`; those that the
# connector overrides must have its parameters.
SIGNATURES: dict[Any, str] = {
    EngineArgs.add_cli_args: "parser",
    Scheduler.schedule: "throttle_prefills",
    Scheduler.update_from_output: "scheduler_output model_runner_output",
    Scheduler.get_request_counts: "",
    Scheduler.has_requests: "",
    Scheduler.add_request: "request",
    Scheduler.finish_requests: "request_ids finished_status",
    Scheduler.set_pause_state: "pause_state",
    Scheduler._reserve_prefill_lookahead: "request num_computed_tokens num_new_tokens",
    Scheduler._handle_blocked_waiting_request: "request",
    StructuredOutputManager.accept_tokens: "request new_token_ids",
    Request.append_output_token_ids: "token_ids",
    Request.is_finished: "",
    KVCacheManager.get_computed_blocks: "request",
    KVCacheManager.get_block_ids: "request_id",
    BlockPool.get_num_free_blocks: "",
    get_request_block_hasher: "hash_block_size caching_hash_fn",
    UniProcExecutor._init_executor: "",
    KVConnectorBase_V1.__init__: "vllm_config role kv_cache_config",
}
# Attributes of `Scheduler` that we read (R) or set (W).
SCHEDULER_ATTRIBUTES = (
    "requests",  # R: dict of request id to Request
    "running",  # R, W: list of Request; decodes are moved before prompts
    "waiting",  # W: our RequestQueue, once, before the first request
    "finished_req_ids",  # R: ended since the last step
    "kv_holding_waiting",  # R: requests whose KV is loaded in the background
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
    "num_computed_tokens",  # R
    "num_output_tokens",  # R
    "num_output_placeholders",  # R: outputs of steps under way
    "num_tokens",  # R
    "all_token_ids",  # R
    "append_output_token_ids",  # R: prior output, before the request is queued
    "sampling_params",  # R
    "structured_output_request",  # R: .grammar, None until it is compiled
    "skip_reading_prefix_cache",  # R, W: True where prior output follows the prompt
    "status",  # R
)


def require_contract(scheduler: Scheduler) -> None:
    """Compare the tables above with the vLLM that is installed.

    Raises:
        UnsupportedError: Something that this package relies on is missing or has other
            parameters; the message names all of it.
    """
    connector = type(getattr(scheduler, "connector", None))
    broken = [*_broken_signatures(connector), *_missing_attributes(scheduler)]
    if broken:
        raise UnsupportedError(
            f"--role does not fit this build of vLLM: {'; '.join(broken)}. Install the vLLM "
            "release that this version of vllm-tetri supports, or leave --role out."
        )


def _broken_signatures(connector: type) -> Iterator[str]:
    expected = {function: names.split() for function, names in SIGNATURES.items()}
    for name, own in vars(connector).items():  # whose public methods are all called by vLLM
        if inspect.isfunction(own) and not name.startswith("_"):
            if (base := getattr(super(connector, connector), name, None)) is None:
                yield f"KVConnectorBase_V1.{name} is gone"
            else:
                expected[base] = _parameters(own)
    for function, names in expected.items():
        if (found := _parameters(function)) != names:
            yield f"{function.__qualname__} takes ({', '.join(found)})"


def _parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _missing_attributes(scheduler: Scheduler) -> Iterator[str]:
    for name in SCHEDULER_ATTRIBUTES:
        if not hasattr(scheduler, name):
            yield f"Scheduler.{name} is missing"
    for name in REQUEST_ATTRIBUTES:
        if not hasattr(Request, name) and name not in Request.__init__.__code__.co_names:
            yield f"Request.{name} is missing"
