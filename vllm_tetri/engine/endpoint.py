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
from random import Random
from typing import TYPE_CHECKING

import vllm_tetri
from vllm_tetri.config import TetriConfig
from vllm_tetri.control.agent import Agent
from vllm_tetri.engine.compat import Request
from vllm_tetri.engine.dispatcher import Dispatcher
from vllm_tetri.engine.load import LoadReader
from vllm_tetri.engine.prediction import (
    LengthsStore,
    Predictions,
    buckets_of,
    lengths_folder,
    make_predictor,
)
from vllm_tetri.engine.receive import ReceiveSide
from vllm_tetri.engine.roles import device_place
from vllm_tetri.engine.send import SendSide
from vllm_tetri.engine.step import WorkerShape
from vllm_tetri.handover import DecodeParams, PrefillParams
from vllm_tetri.security import kv_key_of, read_secret
from vllm_tetri.transport.native import open_receiver
from vllm_tetri.types import InstanceId, InstanceInfo, Role, TransferId

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


class Endpoint(LoadReader):
    """One member of a cluster. It can work after `start`, and routers know it after `join`."""

    info: InstanceInfo  # set by `start`

    def __init__(self, config: TetriConfig, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.config = config
        self._vllm_config = vllm_config
        model = vllm_config.model_config
        self._buckets = buckets_of(config, model.max_model_len)
        self.predictions = Predictions(
            make_predictor(config, vllm_config, self._buckets, config.role),
            is_sequential=config.predictor_mode == "sequential",
        )
        self.lengths_store = LengthsStore(lengths_folder(), model.model, self._buckets)
        self._has_started = False
        self.has_joined = False

    def start(self, shape: WorkerShape) -> None:
        """Open the arena, now that the KV layout is known, and join unless the scheduler has
        to find its chunk size first."""
        config, vllm_config = self.config, self._vllm_config
        self.receiver = open_receiver(
            arena_bytes=config.arena_bytes,
            host=config.host,
            identity=shape.identity,
            fill_timeout_s=config.transfer_timeout_s,
            hold_timeout_s=config.hold_timeout_s,
            key=kv_key_of(config.secret_file),
        )
        self.receives = ReceiveSide(self.receiver, shape.layout, config)
        self.info = self._describe(shape, self.receiver.endpoint)
        self.agent = Agent(
            config.control,
            self.info,
            self,
            period_s=config.report_period_s,
            secret=read_secret(config.secret_file),
        )
        self.dispatcher = Dispatcher(
            config,
            self.info,
            self.lengths_store.lengths,
            self.predictions,
            self.agent,
            rng=Random(),
        )
        self.sends = SendSide(
            config,
            shape.layout,
            vllm_config.model_config.max_model_len,
            self.scheduler.kv_cache_manager,
            self.dispatcher,
        )
        self._has_started = True
        if config.chunk_size != "auto":
            self.join()

    def join(self) -> None:
        """Join the cluster: peers and routers may send work from now on. Idempotent."""
        if self.has_joined:
            return
        self.has_joined = True
        self.agent.start()
        config, info = self.config, self.info
        logger.info(
            "%s (%s) joins its cluster via %s: KV port %s, arena %d MiB, chunk %s tokens, push by "
            "%s, link %s; KV layout %s",
            info.id, info.role.value, ",".join(config.control), info.kv_endpoint,
            config.arena_bytes >> 20, config.chunk_size, config.push, config.link, info.identity,
        )  # fmt: skip

    def _describe(self, shape: WorkerShape, endpoint: str) -> InstanceInfo:
        model = self._vllm_config.model_config
        names = model.served_model_name
        continuations = self.scheduler.continuations
        # Harmony's parser separates reasoning with any parser option.
        parser = self._vllm_config.structured_outputs_config.reasoning_parser
        return InstanceInfo(
            id=InstanceId(self.config.instance),
            url=self.config.url,
            role=self.config.role,
            models=(names,) if isinstance(names, str) else tuple(names),
            kv_endpoint=endpoint,
            identity=shape.identity,
            max_model_len=model.max_model_len,
            block_size=self._vllm_config.cache_config.block_size,
            pid=os.getpid(),
            version=vllm_tetri.__version__,
            continues=continuations.is_supported,
            continues_seeded=continuations.is_seeded_supported,
            reasons=bool(parser) or model.hf_config.model_type == "gpt_oss",
            num_routers=len(self.config.control),
            device=self.config.device or device_place(),
        )

    # -- requests ---------------------------------------------------------------

    def add(self, request: Request, params: PrefillParams | DecodeParams | None) -> None:
        """Add a new request to the side of KV transfer that its parameters name, if any."""
        match params:
            case PrefillParams():
                self.sends.add(request, params)
                self.predictions.begin(request)
            case DecodeParams():
                if params.transfer:
                    self.receives.add(request, params)
                if params.predicted is not None:
                    self.predictions.keep(request.request_id, params.predicted)
            case None:
                self.predictions.begin(request)

    # -- called by the agent's thread, as `read_load` is (`control.agent.EngineSide`) ----

    def cancel(self, transfer: TransferId) -> None:
        """Drop a transfer whose request was cancelled."""
        self.sends.cancel(transfer)
        self.receives.cancel(transfer)

    def lose(self, transfer: TransferId) -> None:
        """Record that the sender of a transfer is unresponsive."""
        self.receives.lose(transfer)

    def abandon(self, router: str) -> None:
        """Drop the transfers of a router that is gone."""
        self.sends.abandon(router)
        self.receives.abandon(router)

    def on_drained(self) -> None:
        """End `vllm serve` as an operator would, with SIGTERM and so with status 0. Its engine
        is a child of the API server, or of what started several of those; either stops both."""
        server = multiprocessing.parent_process()
        os.kill(os.getpid() if server is None or server.pid is None else server.pid, signal.SIGTERM)

    def is_idle(self) -> bool:
        """Whether the engine has no requests."""
        return not self.scheduler.requests

    # -- roles ------------------------------------------------------------------

    def take_role(self) -> Role | None:
        """Return the role to have from now on, if it is another one; between two steps."""
        role = self.agent.take_role() if self._has_started else None
        if role is None:
            return None
        if role is not Role.DECODE and self.predictions.predictor is None:
            predictor = make_predictor(self.config, self._vllm_config, self._buckets, role)
            self.predictions.predictor = predictor
        self.info = self.dispatcher.policy.me = replace(self.info, role=role)
        return role

    def close(self) -> None:
        """Leave the cluster and free the arena. Idempotent, and allowed before `start`."""
        self.predictions.close()
        self.lengths_store.close()
        if self._has_started:
            self.agent.close()
            self.receiver.close()
