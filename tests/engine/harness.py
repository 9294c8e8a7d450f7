"""Two real vLLM schedulers and our real connector, without a model.

Each `Engine` is vLLM's scheduler with our mixin and connector over host tensors
that stand for the KV cache. `step` does what EngineCore and a worker do in one
step, except for the forward pass: that writes a mark derived from the token
into the cache, and "samples" a token. KV bytes really travel. `Engine.cell` says for which
model runner the scheduler works, and whether it schedules ahead of results.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.llama import LLAMA
from tests.transport.fake_device import FakeDevice
from vllm_tetri.config import TetriConfig
from vllm_tetri.control.agent import Agent
from vllm_tetri.control.view import Snapshot
from vllm_tetri.engine import roles
from vllm_tetri.engine.compat import KVConnectorRole
from vllm_tetri.engine.connector import TetriConnector
from vllm_tetri.engine.identity import why_alone
from vllm_tetri.engine.load import SHARED_LEAKS
from vllm_tetri.engine.scheduler import make_scheduler
from vllm_tetri.engine.step import KVLayout, StepMeta, WorkerShape
from vllm_tetri.engine.worker import KVWorker
from vllm_tetri.messages import Served
from vllm_tetri.transport.blocks import BlockMover, DeviceMover, HostMover
from vllm_tetri.transport.shards import Shards, head_pages
from vllm_tetri.types import (
    ClusterView,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
)

BLOCK = 16
LAYERS = 2  # of each group of the KV cache
IDENTITY = {"model": "harness"}
PAGE = 64  # bytes that stand for one token of one layer
SHAPE: dict[str, Any] = {
    "block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32
}  # fmt: skip
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=32)
CHUNKS = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=48)


def vllm_config(
    folder: Path, role: Role, *, args: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A real VllmConfig for a model that exists only as a config.json.

    Args:
        args: For vLLM, instead of those here.
        options: For us. Chunks are of 512 tokens unless they say otherwise.
    """
    (folder / "config.json").write_text(json.dumps(LLAMA))
    usual = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "max_num_seqs": 64}
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        scheduler_cls=roles.SCHEDULER,
        distributed_executor_backend=roles.EXECUTOR,
        kv_transfer_config=transfer_config(role, **options),
        **usual | (args or {}),
    ).create_engine_config()


_configs: dict[tuple[Role, str], Any] = {}


def copied_config(folder: Path, role: Role, args: dict[str, Any] | None, **options: Any) -> Any:
    """Return what `vllm_config` would, as a copy of an earlier one: 0.6 ms instead of 13."""
    key = role, repr(args)
    if key not in _configs:
        _configs[key] = vllm_config(folder, role, args=args)
    made = copy.deepcopy(_configs[key])
    made.model_config.model = str(folder)  # the file of learnt lengths is named after it
    made.kv_transfer_config = transfer_config(role, **options)
    return made


def transfer_config(role: Role, **options: Any) -> Any:
    """Return our part of a config: nothing listens at its address, so no cluster sees it."""
    own = {
        "instance": f"{role}-x", "url": "http://127.0.0.1:1", "control": ("tcp://127.0.0.1:1",),
        "chunk_size": 512,
    }  # fmt: skip
    config = TetriConfig(role=role, **{**own, **options})
    return roles.kv_transfer_config(config, ["harness"], "org/harness")


@dataclass(frozen=True)
class Cell:
    """A cell of the matrix {V1, V2 model runner} × {synchronous, asynchronous scheduling}."""

    runner: str = "v1"
    scheduling: str = "sync"

    def __str__(self) -> str:
        return f"{self.runner}-{self.scheduling}"

    @property
    def is_async(self) -> bool:
        return self.scheduling == "async"


def run_until(condition: Any, *engines: Engine, max_steps: float = math.inf) -> None:
    """Step all engines until the condition holds; fails after so many steps, or 20 s."""
    deadline = time.monotonic() + 20
    for number in itertools.count():
        if condition():
            return
        is_due = number >= max_steps or time.monotonic() > deadline
        assert not is_due, f"not true in {number} steps"
        outputs = [each.step() for each in engines]
        if not any(each.total_num_scheduled_tokens for each in outputs):
            time.sleep(0.001)  # as EngineCore does between empty steps


class Engine:
    """One instance without a model. `close` it."""

    cell: ClassVar[Cell] = Cell()  # what vLLM's CPU build runs
    on_device: ClassVar[bool] = False  # KV is in the memory of a fake device

    def __init__(
        self,
        folder: Path,
        role: Role,
        *,
        num_blocks: int = 64,
        page: int = PAGE,
        num_ranks: int = 1,
        num_heads: int | None = None,
        knows_heads: bool = True,
        specs: Sequence[Any] = (FULL,),
        identity: dict[str, str] = IDENTITY,
        args: dict[str, Any] | None = None,
        retention: int | None = None,
        **options: Any,
    ) -> None:
        self.identity = identity
        self.config = copied_config(folder, role, args, **options)
        self._ahead: deque[tuple[Any, KVConnectorOutput]] | None = None
        if self.cell.is_async:  # vLLM's platform of CPUs turns it off
            self.config.scheduler_config.async_scheduling = True
            self._ahead = deque()
        self._samples: dict[int, dict[str, int]] = {}  # step, by identity → tokens by request
        self._newest: dict[str, int] = {}  # request id → its newest token, known to the runner
        self.cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{group * LAYERS + i}" for i in range(LAYERS)], spec)
                for group, spec in enumerate(specs)
            ],
        )
        self.cache_config.prefix_cache_retention_interval = retention
        heads = num_heads or num_ranks
        parts = min(num_ranks, heads)
        shape = num_blocks, heads // parts, BLOCK, page
        self.device = FakeDevice(seed=num_blocks) if self.on_device else None
        zeros = self.device.zeros if self.device else partial(torch.zeros, dtype=torch.uint8)
        self.caches = [  # by rank and layer
            [zeros(*shape) for _ in range(LAYERS)] for _ in range(num_ranks)
        ]
        pages = head_pages(self.caches[0], num_blocks, shape[1])
        self.shards = Shards(num_ranks, parts, heads * knows_heads, pages)
        self.config.cache_config.num_gpu_blocks = num_blocks
        with set_current_vllm_config(self.config), pytest.MonkeyPatch.context() as monkeypatch:
            # Not before: the config of V2 wants Triton.
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "01"[self.cell.runner == "v2"])
            self.scheduler = make_scheduler(
                vllm_config=self.config,
                kv_cache_config=self.cache_config,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=BLOCK,
                log_stats=True,
            )
        assert isinstance(self.scheduler.connector, TetriConnector)
        self.connector = self.scheduler.connector
        self.workers = []
        for rank in range(num_ranks):
            worker = TetriConnector(self.config, KVConnectorRole.WORKER, self.cache_config)
            worker.worker = self.make_worker(rank)
            self.workers.append(worker)
        self.aggregator = KVOutputAggregator(num_ranks)
        self.drafts = False  # by a model
        self.before_rank: Callable[[int], object] = lambda rank: None  # executes a step
        is_device = self.device is not None
        layout = KVLayout(self.mover.layout.block_bytes * parts, self.shards, is_device)
        shape = WorkerShape(identity, layout, why_alone(self.config, self.cache_config))
        for worker in self.workers:
            worker.shape = replace(shape)
        metadata, *_ = [worker.get_handshake_metadata() for worker in self.workers]
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        init_none_hash(get_hash_fn_by_name("sha256"))
        self.hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
        self.finished: dict[str, Any] = {}  # request id → kv_transfer_params
        self.outputs: dict[str, list[int]] = {}
        self.computed = Counter[str]()  # request id → tokens of all steps
        self.counted: dict[str, Any] = {}  # request id → vLLM's PrefillStats
        self.media: dict[str, list[MultiModalFeatureSpec]] = {}  # as the runner was sent them
        self.encoded: list[str] = []  # names of media

    def make_worker(self, rank: int) -> KVWorker:
        """The part of a worker that is ours."""
        caches, tetri = self.caches[rank], self.endpoint.config
        mover: BlockMover = HostMover(caches, len(caches[0]))
        if self.device is not None:
            mover = DeviceMover(self.device, caches, len(caches[0]))
        if rank == 0:
            self.mover = mover
        worker = KVWorker(
            config=tetri, identity=self.identity, mover=mover, rank=rank, shards=self.shards
        )
        worker.track_layers({f"layer{i}": each for i, each in enumerate(caches)})
        return worker

    @property
    def kv_worker(self) -> KVWorker:
        """That of rank 0."""
        worker = self.workers[0].worker
        assert worker is not None
        return worker

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
        agent.snapshot = lambda: snapshot

    def add(
        self,
        name: str,
        tokens: list[int],
        *,
        max_tokens: int = 4,
        params: Any = None,
        priority: int = 0,
        media: Sequence[Any] = (),
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": params} if params else None
        request = Request(
            name,
            tokens,
            sampling,
            None,
            mm_features=list(media),
            priority=priority,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def load(self) -> InstanceLoad:
        return self.endpoint.read_load()

    def step(self) -> Any:
        """One engine step; returns the scheduler output. With asynchronous scheduling, a step with
        tokens is known to the scheduler when the next one is scheduled."""
        output, kv_output = self.begin()
        if self._ahead is None:
            self.update(output, kv_output)
            return output
        if self._ahead:
            self.update(*self._ahead.popleft())
        self._ahead.append((output, kv_output))
        if not output.total_num_scheduled_tokens:
            self.finish_steps()
        return output

    def finish_steps(self) -> None:
        """Tell the scheduler the results of steps under way, as before vLLM pauses."""
        while self._ahead:
            self.update(*self._ahead.popleft())

    @property
    def is_ahead(self) -> bool:
        """Whether a step is under way, whose results the scheduler does not know."""
        return bool(self._ahead)

    def begin(self) -> tuple[Any, KVConnectorOutput]:
        """A step until its results are there, of which the scheduler does not know yet."""
        output = self.scheduler.schedule()
        self.computed.update(output.num_scheduled_tokens)
        self.media |= {each.req_id: each.mm_features for each in output.scheduled_new_reqs}
        meta = output.kv_connector_metadata
        assert isinstance(meta, StepMeta)
        for rank, worker in enumerate(self.workers):
            self.before_rank(rank)
            worker.handle_preemptions(meta)
            worker.bind_connector_metadata(meta)
            if output.has_sync_kv_loads:
                worker.start_load_kv(None)
        if not self.drafts:
            self._forward(output)
        outputs = []
        for worker in self.workers:
            if not output.has_sync_kv_loads:
                worker.start_load_kv(None)
            if not self.drafts:
                worker.wait_for_save()
            results = worker.get_transfer_results(output.finished_req_ids)
            kv_output = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=kv_output))
        if self.drafts:  # V1 computes their layers (here all) after it took the results
            sending = self.kv_worker.sending
            assert not any(
                sending[each].is_last for each in output.num_scheduled_tokens if each in sending
            )
            self._forward(output)
            for worker in self.workers:
                worker.wait_for_save()
        due = (self.scheduler.requests[each] for each in output.num_scheduled_tokens)
        self._samples[id(output)] = sampled = {
            each.request_id: self.sample(each) for each in due if not each.is_prefill_chunk
        }
        self._newest |= sampled
        together = self.aggregator.aggregate(outputs)
        assert together is not None
        assert together.kv_connector_output is not None
        return output, together.kv_connector_output

    def _forward(self, output: Any) -> None:
        """Write a mark for every token computed in this step, and encode its media."""
        for request_id, numbers in output.scheduled_encoder_inputs.items():
            media = self.media[request_id]
            assert all(media[number].data is not None for number in numbers)
            self.encoded += [media[number].identifier for number in numbers]
        for layer in range(LAYERS):
            for request_id, num_tokens in output.num_scheduled_tokens.items():
                request = self.scheduler.requests[request_id]
                end = request.num_computed_tokens
                self.write(request, end - num_tokens, end, layer)
            for worker in self.workers:
                worker.save_kv_layer(f"layer{layer}", None, None)

    def write(self, request: Request, start: int, end: int, layer: int) -> None:
        caches = [each for each in self.layers() if each[0] % LAYERS == layer]
        groups = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        marks: list[tuple[torch.Tensor, int]] = []  # a token's place, what it holds
        for position in range(start, end):
            # With asynchronous scheduling, only the runner knows the last one.
            is_known = position < request.num_tokens
            name = request.request_id
            token = request.all_token_ids[position] if is_known else self._newest[name]
            for group, block_ids in enumerate(groups):
                for number, cache in caches:
                    place = cache[block_ids[position // BLOCK], position % BLOCK]
                    marks.append((place, mark(token, position, number, group)))
        if self.device is None:
            fill(marks)
        else:
            self.device.run(partial(fill, marks))

    def layers(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The cache of every head of every layer of every rank, numbered by layer and head."""
        for rank, caches in enumerate(self.caches):
            first = self.shards.part_of(rank) * caches[0].shape[1]
            for layer, cache in enumerate(caches):
                for head in range(cache.shape[1]):
                    yield (first + head) * LAYERS + layer, cache[:, head]

    def holds(self, request: Request, num_tokens: int) -> bool:
        """Whether the cache of a running request is right for its first tokens."""
        if self.device is not None:
            self.device.synchronize()
            assert not self.device.faults
        groups = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        spans = self.scheduler.blocks.spans(request.num_computed_tokens)
        return all(
            bool(
                (
                    cache[block_ids[position // BLOCK], position % BLOCK]
                    == mark(request.all_token_ids[position], position, layer, group)
                ).all()
            )
            for group, block_ids in enumerate(groups)
            for position in range(spans[group].start * BLOCK, num_tokens)
            for layer, cache in self.layers()
        )

    def sample(self, request: Request) -> int:
        """The token that a step which computes all known ones of a request samples."""
        return 7

    def update(self, output: Any, kv_output: KVConnectorOutput) -> None:
        """Tell the scheduler the results of a step."""
        ids = list(output.num_scheduled_tokens)
        samples = self._samples.pop(id(output))
        runner_output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[samples[each]] if each in samples else [] for each in ids],
            kv_connector_output=None if kv_output.is_empty() else kv_output,
        )
        for outputs in self.scheduler.update_from_output(output, runner_output).values():
            for item in outputs.outputs:
                self.outputs.setdefault(item.request_id, []).extend(item.new_token_ids)
                if item.prefill_stats is not None:
                    self.counted[item.request_id] = item.prefill_stats
                if item.finish_reason is not None:
                    self.finished[item.request_id] = item.kv_transfer_params

    def run_until(self, condition: Any, *, max_steps: float = math.inf) -> None:
        run_until(condition, self, max_steps=max_steps)

    @property
    def is_at_rest(self) -> bool:
        load = self.endpoint.read_load()
        return not (
            load.blocks_used
            or load.arena_used_bytes
            or load.running
            or load.waiting
            or self.scheduler.requests
            or self.scheduler.has_requests()  # or a last step, with notes
            or len(self.endpoint.receives)
            or len(self.endpoint.sends)
            or any(what not in SHARED_LEAKS for what in self.endpoint.leaks())
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()
        if self.device is not None:
            self.device.close()
            assert not self.device.faults


def told_by(*engines: Engine) -> list[Any]:
    """What engines tell routers from now on, but for the times of requests that ended."""
    told: list[Any] = []

    def publish(message: Any, *, is_urgent: bool = True) -> None:
        if not isinstance(message, Served):
            told.append(message)

    for engine in engines:
        engine.endpoint.agent.publish = publish
    return told


def fill(marks: list[tuple[torch.Tensor, int]]) -> None:
    for place, value in marks:
        place.fill_(value)


def mark(token: int, position: int, layer: int, group: int = 0) -> int:
    return (token * 31 + position * 7 + layer * 101 + group * 53 + 1) % 251
