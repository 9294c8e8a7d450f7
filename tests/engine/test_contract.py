"""What we rely on inside vLLM. A failure names the seam that moved."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from pathlib import Path

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_tetri.engine import compat

SIGNATURES = {
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": ["parser"],
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ["self", "throttle_prefills"],
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": [
        "self",
        "scheduler_output",
        "model_runner_output",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler.get_request_counts": ["self"],
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": ["self"],
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ["self", "request"],
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": [
        "self",
        "request_ids",
        "finished_status",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead": [
        "self",
        "request",
        "num_computed_tokens",
        "num_new_tokens",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request": ["self", "request"],
    "vllm.v1.structured_output:StructuredOutputManager.accept_tokens": [
        "self",
        "request",
        "new_token_ids",
    ],
    "vllm.v1.request:Request.append_output_token_ids": ["self", "token_ids"],
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": ["self", "request"],
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher": [
        "hash_block_size",
        "caching_hash_fn",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": [
        "self",
        "reset_running_requests",
        "reset_connector",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": [
        "self",
        "request",
        "timestamp",
        "drop_stale_output",
    ],
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": ["self", "request_id"],
    "vllm.v1.executor.uniproc_executor:UniProcExecutor._init_executor": ["self"],
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": ["self"],
}
CONNECTOR_METHODS = {
    "__init__": ["self", "vllm_config", "role", "kv_cache_config"],
    "register_kv_caches": ["self", "kv_caches"],
    "get_handshake_metadata": ["self"],
    "handle_preemptions": ["self", "kv_connector_metadata"],
    "bind_connector_metadata": ["self", "connector_metadata"],
    "start_load_kv": ["self", "forward_context", "kwargs"],
    "get_transfer_results": ["self", "finished_req_ids"],
    "get_block_ids_with_load_errors": ["self"],
    "build_connector_worker_meta": ["self"],
    "set_xfer_handshake_metadata_pp_aware": ["self", "metadata"],
    "on_new_request": ["self", "request"],
    "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
    "get_loaded_kv_cache_group_ids": ["self", "request"],
    "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
    "build_connector_meta": ["self", "scheduler_output"],
    "update_connector_output": ["self", "connector_output"],
    "request_finished": ["self", "request", "block_ids"],
    "shutdown": ["self"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    assert list(inspect.signature(found).parameters) == SIGNATURES[name], name


@pytest.mark.parametrize("name", CONNECTOR_METHODS)
def test_connector_method(name: str) -> None:
    method = getattr(compat.KVConnectorBase_V1, name)
    assert list(inspect.signature(method).parameters) == CONNECTOR_METHODS[name], name


@pytest.mark.parametrize("name", compat.SCHEDULER_ATTRIBUTES)
def test_scheduler_attribute(name: str) -> None:
    assert f"self.{name}" in inspect.getsource(Scheduler.__init__), name


@pytest.mark.parametrize("name", compat.REQUEST_ATTRIBUTES)
def test_request_attribute(name: str) -> None:
    assert hasattr(Request, name) or f"self.{name}" in inspect.getsource(Request.__init__), name


def test_runner_rewinds_a_generator_by_its_offset() -> None:
    """What `engine/seeds.py` answers to; gone when this fails."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "set_offset(gen.get_offset() - 4)" in inspect.getsource(GPUModelRunner)
    assert "generator" in inspect.signature(compat.CachedRequestState).parameters


def test_runner_makes_request_states_from_what_the_scheduler_says_is_new() -> None:
    """What `engine/injection.py` builds on: the prompt's list arrives as it is."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner._update_states)
    assert "prompt_token_ids=new_req_data.prompt_token_ids" in source
    assert "output_token_ids=[]" in source
    assert hasattr(compat.CachedRequestState, "__post_init__")
    names = inspect.signature(compat.NewRequestData).parameters
    assert {"req_id", "prompt_token_ids"} <= set(names)


def test_waiting_queue_has_no_new_duty() -> None:
    assert compat.RequestQueue.__abstractmethods__ == {
        "add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests",
        "remove_request", "remove_requests", "__bool__", "__len__", "__iter__",
    }  # fmt: skip


def test_every_request_passes_the_method_that_lowers_its_tokens() -> None:
    """Running and waiting ones: once each in `schedule` (docs/adr/0004)."""
    assert inspect.getsource(Scheduler.schedule).count("self._reserve_prefill_lookahead(") == 2


def test_blocks_of_preempted_requests_are_whole_when_the_connector_hears_of_them() -> None:
    """What `engine/swap.py` copies then: nothing was written, zeroed or copied yet."""
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    v1 = inspect.getsource(GPUModelRunner.execute_model)
    assert v1.index("handle_preemptions(") < v1.index("self._update_states(scheduler_output)")
    v2 = inspect.getsource(ActiveKVConnector.pre_forward)
    assert v2.index("handle_preemptions(") < v2.index("_start_load_kv()")
    # No copy on write in a step that preempts: nobody new is admitted, so nobody hits a prefix.
    schedule = inspect.getsource(Scheduler.schedule)
    assert "if not preempted_reqs and self._pause_state" in schedule


def test_the_connector_is_asked_about_every_request_that_enters() -> None:
    """Where requests are held back (`engine/admission.py`)."""
    source = inspect.getsource(Scheduler.schedule)
    assert source.count("self.connector.get_num_new_matched_tokens(") == 1
    asked = source.index("if ext_tokens is None:")
    assert asked < source.index("self.kv_cache_manager.allocate_slots(", asked)
    assert "skip_request(request_queue)" in source[asked : asked + 400]


def test_plugins_load_before_the_arguments_are_added() -> None:
    """`register` must come in time to wrap `EngineArgs.add_cli_args`."""
    from vllm.engine import arg_utils

    source = textwrap.dedent(inspect.getsource(arg_utils.AsyncEngineArgs.add_cli_args))
    calls = [
        ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
    ]
    assert calls.index("load_general_plugins") < calls.index("EngineArgs.add_cli_args")


def test_every_private_name_is_imported_in_compat() -> None:
    """Other modules take vLLM's scheduler and connector names from compat only."""
    engine = Path(compat.__file__).parent
    allowed = {
        "vllm",
        "vllm.config",
        "vllm.engine",
        "vllm.platforms",
        "vllm.forward_context",
        "vllm.distributed.parallel_state",
        "vllm.v1.core.kv_cache_manager",
        "vllm.v1.outputs",
    }
    for path in engine.glob("*.py"):
        if path.name == "compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                assert not name.startswith("vllm.") or name in allowed, f"{path.name}: {name}"
