"""Two real vLLM schedulers and our real connector, without a model.

Each `Engine` is vLLM's scheduler with our mixin and connector over host tensors
that stand for the KV cache. `step` does what EngineCore and a worker do in one
step, except for the forward pass: that writes a mark derived from the token
into the cache, and "samples" a token. KV bytes really travel.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.llama import LLAMA
from vllm_tetri.config import TetriConfig
from vllm_tetri.control.agent import Agent
from vllm_tetri.control.view import Snapshot
from vllm_tetri.engine import roles
from vllm_tetri.engine.compat import KVConnectorRole
from vllm_tetri.engine.connector import TetriConnector
from vllm_tetri.engine.load import SHARED_LEAKS
from vllm_tetri.engine.scheduler import make_scheduler
from vllm_tetri.engine.step import KVLayout, StepMeta, WorkerShape
from vllm_tetri.engine.worker import KVWorker
from vllm_tetri.transport.blocks import HostMover
from vllm_tetri.types import ClusterView, InstanceInfo, InstanceState, InstanceView, Role

BLOCK = 16
LAYERS = 2
PAGE = 64  # bytes that stand for one token of one layer


def vllm_config(
    folder: Path, role: Role, *, args: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A real VllmConfig for a model that exists only as a config.json.

    Args:
        args: For vLLM, instead of those here.
        options: For us.
    """
    (folder / "config.json").write_text(json.dumps(LLAMA))
    # Nothing listens at that address: no cluster on this machine shall see it.
    own = {"instance": f"{role}-x", "url": "http://127.0.0.1:1", "control": ("tcp://127.0.0.1:1",)}
    tetri = TetriConfig(role=role, **{**own, **options})
    usual = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "max_num_seqs": 64}
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        scheduler_cls=roles.SCHEDULER,
        distributed_executor_backend=roles.EXECUTOR,
        kv_transfer_config=roles.kv_transfer_config(tetri),
        **usual | (args or {}),
    ).create_engine_config()


class Engine:
    """One instance without a model. `close` it."""

    def __init__(
        self,
        folder: Path,
        role: Role,
        *,
        num_blocks: int = 64,
        page: int = PAGE,
        args: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.config = vllm_config(folder, role, args=args, **options)
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        self.cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer{i}" for i in range(LAYERS)], spec)],
        )
        self.caches = [
            torch.zeros((num_blocks, BLOCK, page), dtype=torch.uint8) for _ in range(LAYERS)
        ]
        self.config.cache_config.num_gpu_blocks = num_blocks
        with set_current_vllm_config(self.config):
            self.scheduler = make_scheduler(
                vllm_config=self.config,
                kv_cache_config=self.cache_config,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=BLOCK,
                log_stats=True,
            )
        assert isinstance(self.scheduler.connector, TetriConnector)
        self.connector = self.scheduler.connector
        identity = {"model": "harness"}
        mover = self.mover = HostMover(self.caches, num_blocks)
        tetri = self.endpoint.config
        self.worker = TetriConnector(self.config, KVConnectorRole.WORKER, self.cache_config)
        self.kv_worker = KVWorker(config=tetri, identity=identity, mover=mover, rank=0, num_ranks=1)
        self.worker.worker = self.kv_worker
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): WorkerShape(identity, KVLayout(BLOCK, mover.block_bytes, 1))}
        )
        init_none_hash(get_hash_fn_by_name("sha256"))
        self.hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
        self.finished: dict[str, Any] = {}  # request id → kv_transfer_params
        self.outputs: dict[str, list[int]] = {}

    @property
    def endpoint(self) -> Any:
        return self.connector.endpoint

    @property
    def info(self) -> InstanceInfo:
        info = self.endpoint.info
        assert info is not None
        return info

    def sees(self, *peers: Engine) -> None:
        """Give this instance a cluster view without a router."""
        view = ClusterView(
            "test",
            1,
            tuple(
                InstanceView(peer.info, InstanceState.READY, peer.endpoint.read_load(), 0.0)
                for peer in peers
            ),
        )
        agent = self.endpoint.agent
        assert isinstance(agent, Agent)
        snapshot = Snapshot(view, time.monotonic())
        agent.snapshot = lambda: snapshot  # type: ignore[method-assign]

    def add(
        self,
        name: str,
        tokens: list[int],
        *,
        max_tokens: int = 4,
        params: Any = None,
        priority: int = 0,
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": params} if params else None
        request = Request(name, tokens, sampling, None, priority=priority, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """One engine step; returns the scheduler output."""
        output, kv_output = self.begin()
        self.update(output, kv_output)
        return output

    def begin(self) -> tuple[Any, KVConnectorOutput]:
        """A step until its results are there, of which the scheduler does not know yet."""
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        assert isinstance(meta, StepMeta)
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        if output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        self._forward(output)
        if not output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        results = self.worker.get_transfer_results(output.finished_req_ids)
        kv_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        return output, kv_output

    def _forward(self, output: Any) -> None:
        """Write a mark for every token computed in this step."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            self.write(request, end - num_tokens, end)

    def write(self, request: Request, start: int, end: int) -> None:
        block_ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        for position in range(start, end):
            token = request.all_token_ids[position]
            for layer, cache in enumerate(self.caches):
                cache[block_ids[position // BLOCK], position % BLOCK] = mark(token, position, layer)

    def holds(self, request: Request, num_tokens: int) -> bool:
        """Whether the cache of a running request is right for its first tokens."""
        block_ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        return all(
            bool(
                (
                    cache[block_ids[position // BLOCK], position % BLOCK]
                    == mark(request.all_token_ids[position], position, layer)
                ).all()
            )
            for position in range(num_tokens)
            for layer, cache in enumerate(self.caches)
        )

    def sample(self, request: Request) -> int:
        """The next token of a request."""
        return 7

    def update(self, output: Any, kv_output: KVConnectorOutput) -> None:
        """Tell the scheduler the results of a step."""
        sampled = []
        ids = list(output.num_scheduled_tokens)
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            is_complete = request.num_computed_tokens >= request.num_tokens
            sampled.append([self.sample(request)] if is_complete else [])
        runner_output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=None if kv_output.is_empty() else kv_output,
        )
        for outputs in self.scheduler.update_from_output(output, runner_output).values():
            for item in outputs.outputs:
                self.outputs.setdefault(item.request_id, []).extend(item.new_token_ids)
                if item.finish_reason is not None:
                    self.finished[item.request_id] = item.kv_transfer_params

    def run_until(self, condition: Any, *, max_steps: int = 3000) -> None:
        """Step until the condition holds; fails after `max_steps`."""
        for _ in range(max_steps):
            if condition():
                return
            output = self.step()
            if not output.total_num_scheduled_tokens:
                time.sleep(0.001)  # as EngineCore does between empty steps
        raise AssertionError(f"still not true after {max_steps} steps")

    @property
    def is_at_rest(self) -> bool:
        load = self.endpoint.read_load()
        return not (
            load.blocks_used
            or load.arena_used_bytes
            or load.running
            or load.waiting
            or self.scheduler.requests
            or len(self.endpoint.receives)
            or len(self.endpoint.sends)
            or any(what not in SHARED_LEAKS for what in self.endpoint.leaks())
        )

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def mark(token: int, position: int, layer: int) -> int:
    return (token * 31 + position * 7 + layer * 101 + 1) % 251
