"""An instance as its cluster sees it: arena, agent, and both sides of KV transfer.

Lives in the engine process. The engine thread owns both sides of KV transfer; the agent's
thread calls only the methods that say so.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from dataclasses import replace
from functools import partial
from random import Random
from secrets import token_hex
from typing import TYPE_CHECKING

import psutil
from msgspec.structs import replace as replace_struct

from vllm_tetri.config import TetriConfig
from vllm_tetri.control.agent import Agent
from vllm_tetri.engine.compat import Request, is_cpu
from vllm_tetri.engine.dispatcher import Dispatcher
from vllm_tetri.engine.identity import checkpoint_name, served_names
from vllm_tetri.engine.load import LoadReader, release_port
from vllm_tetri.engine.moves import MoveSide
from vllm_tetri.engine.pacing import tile_tokens
from vllm_tetri.engine.pool import Pool
from vllm_tetri.engine.prediction import (
    LengthsStore,
    Predictions,
    make_predictor,
    name_of,
    state_path,
)
from vllm_tetri.engine.receive import ReceiveSide
from vllm_tetri.engine.roles import ROOT_KEY, device_place, first_gpu, near_device, rank_of
from vllm_tetri.engine.send import SendSide
from vllm_tetri.engine.step import KVLayout, WorkerShape
from vllm_tetri.engine.times import RequestTimes
from vllm_tetri.handover import RANK_DRAINED, DecodeParams, Fetch, PrefillParams
from vllm_tetri.messages import (
    CacheReport,
    CancelTransfer,
    LengthMap,
    Move,
    OutputEnded,
    ToEngine,
    TransferLost,
)
from vllm_tetri.security import kv_key_of, read_secret
from vllm_tetri.transport.native import Receiver
from vllm_tetri.transport.nixl import offer_nixl
from vllm_tetri.transport.segments import (
    LEAST_BYTES,
    LEAST_CUDA_BYTES,
    ArenaSize,
    abandoned_segments,
    arena_bounds,
    arena_size,
)
from vllm_tetri.types import InstanceId, InstanceInfo, Role

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


class Endpoint(LoadReader):
    """One member of a cluster. It can work after `start`, and routers know it after `join`."""

    info: InstanceInfo  # set by `start`, as is
    alone: str  # why it exchanges no KV; empty if it may

    def __init__(self, config: TetriConfig, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.config = config
        self._vllm_config = vllm_config
        model = vllm_config.model_config
        self.predictions = Predictions(
            make_predictor(config, vllm_config, config.role),
            is_sequential=config.predictor_mode == "sequential",
        )
        self.lengths_store = LengthsStore(
            state_path(model.model, name_of(config)), self.predictions.get, model.max_model_len
        )
        self.times = RequestTimes()
        self._has_started = False

    def start(self, shape: WorkerShape) -> None:
        """Open the arena, now that the KV layout is known, and join the cluster: peers and routers
        may send work from now on."""
        config, layout, timeout_s = self.config, shape.layout, self.config.transfer_timeout_s
        self.alone = shape.alone
        with near_device(first_gpu(self._vllm_config)):
            self.receiver = self._open_receiver(shape)
        has_arena = self.receiver.stats().arena_total_bytes > 0
        self._nixl = offer_nixl(self.receiver, config.link, config.host) if has_arena else None
        blocks, pins = self.scheduler.blocks, self.scheduler.pins
        self.pool = self._make_pool(shape)
        self.receives = ReceiveSide(self.receiver, layout, blocks, pins, self.pool, config)
        info = self.info = self._describe(shape, self.receiver.endpoint)
        secret = read_secret(config.secret_file)
        self.agent = Agent(
            config.control, info, self, period_s=config.report_period_s, secret=secret
        )
        self.dispatcher = Dispatcher(
            config, info, self.lengths_store.lengths, self.predictions, self.agent, rng=Random()
        )
        self.sends = SendSide(config, layout, self.scheduler, self.dispatcher)
        self.moves = MoveSide(
            layout, self.scheduler, self.predictions, self.sends.handovers, self.agent, timeout_s
        )
        self._has_started = True
        self.agent.start()
        if multiprocessing.parent_process() is not None:  # an engine process, in its main thread
            signal.signal(signal.SIGUSR1, lambda *_: self.agent.leave(config.drain_s))
            release_port(config.url)
        logger.info(
            "%s (%s) announces itself to %s: KV port %s, chunk size %s, push by %s, link %s; "
            "identity %s",
            info.id, info.role.value, ",".join(config.control), info.kv_endpoint,
            config.chunk_size, config.push, config.link, info.identity,
        )  # fmt: skip

    def _open_receiver(self, shape: WorkerShape) -> Receiver:
        """Open the receive arena: as large as configured, else as large as there is room for. An
        instance that has no room for one block, or exchanges none, serves all the same."""
        abandoned_segments(remove=True)
        config, layout = self.config, shape.layout
        open_with = partial(
            Receiver,
            host=config.host,
            port=config.kv_port,
            identity=shape.identity,
            fill_timeout_s=config.transfer_timeout_s,
            hold_timeout_s=config.hold_timeout_s,
            key=kv_key_of(config.secret_file),
        )
        if self.alone:
            logger.warning(
                "%s serves every request alone, as stock vLLM does: its KV cannot be handed over "
                "yet, since %s.",
                config.instance, self.alone,
            )  # fmt: skip
            return open_with(arena_bytes=0)
        size, arena = self._arena_size(shape), shape.arena
        while True:
            try:
                receiver = open_with(arena_bytes=size.num_bytes, has_host_memory=arena is None)
                break
            except RuntimeError as error:
                is_full = "/dev/shm" in str(error)  # else the address cannot be bound
                if arena or config.arena_bytes is not None or not (size.num_bytes and is_full):
                    raise
                # Instances that start at the same time have taken it.
                num_blocks = size.num_bytes // 2 // layout.block_bytes
                size = ArenaSize(num_blocks * layout.block_bytes, "room in /dev/shm")
        if arena is not None:
            receiver.offer(arena.kind, arena.offer(receiver.segment))
        mib, tokens = size.num_bytes / (1 << 20), self._arena_tokens(layout, size.num_bytes)
        limit = f"; limited by {size.limit}" if size.limit else ""
        if tokens:
            logger.info("receive arena: %.0f MiB = %d tokens%s", mib, tokens, limit)
        else:
            logger.warning(
                "receive arena: none%s. A KV block has %d bytes and does not fit, so nothing is "
                "handed over to this instance; it serves requests alone. Give it more room "
                "(containers: --shm-size 16g).",
                limit, layout.block_bytes,
            )  # fmt: skip
        if 0 < tokens < (longest := self._vllm_config.model_config.max_model_len):
            logger.warning(
                "longer prompts than the receive arena's %d tokens are not handed over to this "
                "instance; --max-model-len %d would need %.0f MiB",
                tokens, longest, mib * longest / tokens,
            )  # fmt: skip
        return receiver

    def _make_pool(self, shape: WorkerShape) -> Pool:
        scheduler, config, layout = self.scheduler, self.config, shape.layout
        size, why = shape.pool
        if scheduler.hash_block_size != scheduler.blocks.block_tokens or self.alone:
            size, why = 0, self.alone or "it looks for prefixes of less than a block"
        if size:
            tokens = scheduler.blocks.block_tokens
            logger.info("--tetri-kv-pool %s: %d blocks of %d tokens", config.kv_pool, size, tokens)
        elif config.kv_pool:
            logger.warning("--tetri-kv-pool %s is not used, since %s", config.kv_pool, why)
        block_pool = scheduler.kv_cache_manager.block_pool
        return Pool(size, config, layout, scheduler.blocks, block_pool, self.cache)

    def _arena_size(self, shape: WorkerShape) -> ArenaSize:
        layout = shape.layout
        if shape.arena is not None:
            return ArenaSize(shape.arena.num_bytes)
        if self.config.arena_bytes is not None:
            return ArenaSize(self.config.arena_bytes, "--tetri-arena-bytes")
        num_blocks = self.scheduler.blocks.count(self._vllm_config.model_config.max_model_len)
        cache_blocks = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        bounds = arena_bounds(psutil.virtual_memory().available)
        bounds["the size of the KV cache"] = cache_blocks * layout.block_bytes
        least_bytes = LEAST_BYTES if is_cpu() else LEAST_CUDA_BYTES
        return arena_size(layout.block_bytes, num_blocks, least_bytes, bounds)

    def _arena_tokens(self, layout: KVLayout, num_bytes: int) -> int:
        return self.scheduler.blocks.most_tokens(num_bytes // layout.block_bytes)

    def _describe(self, shape: WorkerShape, endpoint: str) -> InstanceInfo:
        model, limits = self._vllm_config.model_config, self._vllm_config.scheduler_config
        continuations, blocks = self.scheduler.continuations, self.scheduler.blocks
        arena_bytes = self.receiver.stats().arena_total_bytes
        # Harmony's parser separates reasoning with any parser option.
        parser = self._vllm_config.structured_outputs_config.reasoning_parser
        transfer = self._vllm_config.kv_transfer_config
        return InstanceInfo(
            id=InstanceId(self.config.instance),
            url=self.config.url,
            role=self.config.role,
            models=served_names(self._vllm_config),
            kv_endpoint=endpoint,
            identity=shape.identity,
            max_model_len=model.max_model_len,
            block_size=max(1, blocks.block_tokens // max(1, len(blocks.growing))),
            pid=os.getpid(),
            root=transfer.kv_connector_extra_config[ROOT_KEY],
            continues=continuations.is_supported,
            continues_seeded=continuations.is_seeded_supported,
            reasons=bool(parser) or model.hf_config.model_type == "gpt_oss",
            arena_tokens=self._arena_tokens(shape.layout, arena_bytes),
            sizes_chunks=self.config.chunk_size == "auto",
            step_limits=(limits.max_num_batched_tokens, limits.max_num_seqs, tile_tokens()),
            device=self.config.device or device_place(first_gpu(self._vllm_config)),
            checkpoint=checkpoint_name(self._vllm_config),
            alone=self.alone,
            rank=rank_of(self._vllm_config),
        )

    # -- requests ---------------------------------------------------------------

    def add(self, request: Request, params: PrefillParams | DecodeParams | Fetch | None) -> None:
        """Add a new request to the side of KV transfer that its parameters name, if any."""
        fetch = params.fetch if isinstance(params, PrefillParams) else params
        if isinstance(fetch, Fetch):
            # A recurrent state is that of one prefix alone, and hashes have an adapter's name only.
            has_more = self.scheduler.blocks.has_state or request.mm_features
            is_unable = has_more or request.lora_request or self.alone or self.receives.is_closed
            tokens = 0 if is_unable else self.cache.shared_tokens(request, fetch)
            believed = fetch.held_tokens
            held_tokens = self.scheduler.blocks.hit_tokens(tokens, believed)
            fetch = replace_struct(fetch, held_tokens=held_tokens)
            if fetch.target != self.info.id:
                if tokens:
                    self.cache.cut(request, tokens)
                self.sends.add_fetch(request, fetch, is_known=tokens > 0)
                return
            self.receives.add(request, fetch, tokens if tokens > believed else 0)
        match params:
            case PrefillParams() if not self.alone:
                if params.marks:
                    known = self.cache.known_tokens(request, params.marks)
                    held = {name: min(each, known) for name, each in params.held.items()}
                    params = replace_struct(params, held=held)
                self.sends.add(request, params)
                self.predictions.begin(request)
            case DecodeParams():
                params = self.moves.expect(request, params)
                if params.transfer and not self.alone:
                    num_tokens = next(iter(params.kv_tokens), request.num_prompt_tokens)
                    self.receives.add(request, params, num_tokens)
                self.predictions.keep(request.request_id, params)
            case _:
                self.predictions.begin(request)

    def learn(self, request: Request) -> None:
        """Learn from an output that ended here, and let the instance learn that has its prompt."""
        if (ended := self.predictions.learn(request)) is not None:
            self.agent.publish(ended, is_urgent=False)
        self.lengths_store.learn(request)
        self._share_lengths()

    def _share_lengths(self) -> None:
        if (message := self.predictions.share()) is not None:
            self.agent.publish(message, is_urgent=False)

    def goes_first(self, request: Request) -> bool:
        """Whether a waiting request has next to nothing to compute: it goes before all prompts."""
        return self.receives.knows(request.request_id) or self.sends.fetch_tokens(request) > 0

    def must_wait(self, request_id: str) -> bool:
        """Whether a prompt has to wait for its prediction, or for the prefix that it fetches."""
        return self.predictions.holds(request_id) or self.receives.is_fetching(request_id)

    # -- called by the agent's thread, as `read_load` is (`control.agent.EngineSide`) ----

    def take(self, message: ToEngine) -> None:
        """Do what a message of a router asks for."""
        match message:
            case CancelTransfer(transfer=transfer):
                for side in (self.sends, self.moves, self.receives):
                    side.cancel(transfer)
            case TransferLost(transfer=transfer):
                self.receives.lose(transfer)
            case Move():
                self.moves.order(message)
            case OutputEnded():
                self.predictions.tell(message)
                self._share_lengths()
            case LengthMap():
                self.predictions.adopt(message)

    def read_cache(self, seq: int, *, is_all: bool) -> CacheReport | None:
        """Return what changed in the prefix cache since the last call, or all that it holds; None
        if that is nothing."""
        return self.cache.report(self.info.id, seq, is_all=is_all)

    def abandon(self, router: str) -> None:
        """Drop the transfers of a router that is gone."""
        self.sends.abandon(router)
        self.receives.abandon(router)

    def on_drained(self) -> None:
        """End `vllm serve` as an operator would, with SIGINT and so with status 0. Its engine
        is a child of the API server, or of what started several of those; either stops both. A
        data-parallel rank only tells: the API server ends with its last rank."""
        server = multiprocessing.parent_process()
        pid = os.getpid() if server is None or server.pid is None else server.pid
        os.kill(pid, signal.SIGINT if self.info.rank is None else RANK_DRAINED)

    def is_idle(self) -> bool:
        """Whether the engine has no requests."""
        return not self.scheduler.requests

    # -- roles ------------------------------------------------------------------

    def take_role(self) -> None:
        """Have another role from now on if one is ordered; between two steps."""
        role = self.agent.take_role() if self._has_started else None
        if role is None:
            return
        if role is not Role.DECODE and self.predictions.predictor is None:
            try:
                self.predictions.predictor = make_predictor(self.config, self._vllm_config, role)
            except Exception:  # whatever its code does: lengths are not worth an engine
                logger.exception("%s predicts no lengths in its new role", self.info.id)
        self.info = self.dispatcher.policy.me = replace(self.info, role=role)

    def leave_exchange(self) -> None:
        """Drop all KV of other instances and exchange none until the next start, since this
        instance's weights may be replaced: its identity equals no other from now on. Idempotent."""
        if not self._has_started or self.receives.is_closed:
            return
        identity = {**self.info.identity, "weights": f"replaced at run time, {token_hex(4)}"}
        self.info = self.dispatcher.policy.me = replace(self.info, identity=identity)
        self.agent.describe(self.info)
        self.sends.stop_unfinished()
        self.moves.stop("its KV may become invalid")
        self.receives.close()
        logger.warning(
            "%s exchanges no KV until it is started again and serves requests alone: vLLM cleared "
            "its KV, as it does before weights are replaced (pause, sleep).",
            self.info.id,
        )

    def close(self) -> None:
        """Leave the cluster and free the arena. Idempotent, and allowed before `start`."""
        self.predictions.close()
        self.lengths_store.close()
        if self._has_started:
            self.agent.close()
            if self._nixl is not None:
                self._nixl.close()
            self.receiver.close()
