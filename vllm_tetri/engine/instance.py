"""What an instance owns beside its engine: arena, agent, outbox, inbox.

Lives in the engine process. The engine thread owns outbox and inbox; the agent
thread reads counters (under the GIL, never mutating) and forwards cancels.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import vllm_tetri
from vllm_tetri.config import TetriConfig
from vllm_tetri.control.agent import Agent
from vllm_tetri.control.role_switch import RoleSwitch
from vllm_tetri.control.views import Picture
from vllm_tetri.engine.admission import Answers, DecodeGate
from vllm_tetri.engine.audit import Audit
from vllm_tetri.engine.cache import cache_folder
from vllm_tetri.engine.compat import Request, Scheduler
from vllm_tetri.engine.conditions import device_place
from vllm_tetri.engine.departure import end_server, unfinished
from vllm_tetri.engine.dispatcher import Dispatcher
from vllm_tetri.engine.inbox import Inbox
from vllm_tetri.engine.injection import Injections
from vllm_tetri.engine.lengths_store import LengthsStore, Subject, tells_length
from vllm_tetri.engine.load import CpuClock, count, read_load
from vllm_tetri.engine.outbox import Outbox
from vllm_tetri.engine.own import is_own
from vllm_tetri.engine.prediction import Predictions, buckets_of, make_predictor
from vllm_tetri.engine.step import WorkerShape
from vllm_tetri.engine.swap import Swap
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import DecodeLeg, PrefillLeg, from_params
from vllm_tetri.messages import Dispatched, Opening
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.lengths import Lengths
from vllm_tetri.policy.step_fit import StepFit
from vllm_tetri.secret import kv_key_of, read_secret
from vllm_tetri.transport.native import Receiver, open_receiver
from vllm_tetri.types import (
    InstanceId,
    InstanceInfo,
    InstanceLoad,
    Prediction,
    Role,
    TransferId,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_tetri.engine.profiling import Profiling

logger = logging.getLogger(__name__)


class Instance:
    """One member of the cluster. Works from `start` on, is known from `join` on;
    `close` is idempotent and right in any state."""

    outbox: Outbox
    inbox: Inbox
    swap: Swap
    answers: Answers  # the scheduler's
    gate: DecodeGate | None  # the scheduler's

    def __init__(self, config: TetriConfig, vllm_config: VllmConfig) -> None:
        self.config = config
        self._vllm_config = vllm_config
        self._scheduler: Scheduler | None = None
        self.injections: Injections | None = None  # the scheduler's, for the load report
        self._receiver: Receiver | None = None
        self._agent: Agent | None = None
        self._dispatcher: Dispatcher | None = None
        self._switch = RoleSwitch(self._is_engine_idle, self._on_role_taken)
        self.steps = StepFit()
        self._cpu = CpuClock()
        self._audit = Audit()  # the agent thread's
        self._info: InstanceInfo | None = None
        model = vllm_config.model_config
        buckets = self._buckets = buckets_of(config, model.max_model_len)
        self.predictions = Predictions(
            make_predictor(config, vllm_config, buckets, config.role),
            is_sequential=config.predictor_mode == "sequential",
        )
        self._lengths_store = LengthsStore(
            cache_folder("lengths"),
            Subject(model.model, buckets),
        )
        self._shape: WorkerShape | None = None
        self._has_joined = False
        self.profiling: Profiling | None = None  # while the engine measures itself
        self.decodes_done = 0
        self.preemptions = 0
        self.bad_legs = 0
        self.step_s = 0.0
        self.chunk_tokens = 0  # of prompts in a step, at most

    def bind_scheduler(self, scheduler: Scheduler) -> None:
        """The scheduler whose counters are reported; call before `start`."""
        self._scheduler = scheduler

    def start(self, shape: WorkerShape) -> None:
        """Open the arena; the KV layout is known now. Nobody knows of it before `join`."""
        config, block_size = self.config, self._vllm_config.cache_config.block_size
        self._receiver = open_receiver(
            arena_bytes=config.arena_bytes,
            host=config.host,
            identity=shape.identity,
            fill_timeout_s=config.transfer_timeout_s,
            hold_timeout_s=config.hold_timeout_s,
            key=kv_key_of(config.secret_file),
        )
        self.inbox = Inbox(
            receiver=self._receiver,
            block_size=block_size,
            bytes_per_block=shape.block_bytes * shape.num_ranks,
            num_ranks=shape.num_ranks,
            timeout_s=config.transfer_timeout_s,
            load_budget_bytes=config.load_budget_bytes,
        )
        self.swap = Swap(
            receiver=self._receiver,
            block_size=block_size,
            block_bytes=shape.block_bytes,
            num_ranks=shape.num_ranks,
            arena_bytes=config.arena_bytes,
            budget_bytes=config.load_budget_bytes,
        )
        self.outbox = Outbox(
            config=config,
            block_size=block_size,
            bytes_per_block=shape.block_bytes * shape.num_ranks,
            max_model_len=self._vllm_config.model_config.max_model_len,
            block_ids_of=self._block_ids_of,
            dispatch=self._dispatch,
            announce=self._announce,
            prediction_of=self.prediction_of,
            note_sent=self._note_sent,
        )
        self._info = self._describe(shape, self._receiver.endpoint)
        self._agent = Agent(
            routers=config.control,
            info=self._info,
            read_load=self._read_load,
            on_cancel=self._cancel,
            on_lost=self.inbox.lose,
            period_s=config.report_period_s,
            unfinished=self._unfinished,
            on_left=end_server,
            on_router_gone=self._abandon,
            switch=self._switch,
            secret=read_secret(config.secret_file),
        )
        self._dispatcher = Dispatcher(
            config=config,
            look=self._look,
            me=self._info,
            lengths=self.lengths,
            predict=self._due_prediction,
            rng=Random(),
        )
        self._shape = shape

    def join(self) -> None:
        """Join the cluster: peers and routers may send work from now on. Idempotent."""
        if self._has_joined:
            return
        assert self._agent is not None
        assert self._receiver is not None
        assert self._shape is not None
        self._has_joined = True
        self._agent.start()
        config = self.config
        logger.info(
            "%s (%s) joins via %s: KV port %s, arena %d MiB, chunk %s tokens, push by %s, "
            "link %s; %s",
            config.instance, config.role.value, ",".join(config.control), self._receiver.endpoint,
            config.arena_bytes >> 20, config.chunk_size, config.push, config.link,
            self._shape.identity,
        )  # fmt: skip

    def _describe(self, shape: WorkerShape, endpoint: str) -> InstanceInfo:
        model = self._vllm_config.model_config
        names = model.served_model_name
        injections = self.injections
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
            injects=injections is not None and injections.is_supported,
            injects_seeded=injections is not None and injections.is_seeded_supported,
            reasons=self._takes_reasoning_out(),
            num_routers=len(self.config.control),
            device=self.config.device or device_place(),
        )

    def _takes_reasoning_out(self) -> bool:
        # Harmony's parser does so with any parser option.
        parser = self._vllm_config.structured_outputs_config.reasoning_parser
        return bool(parser) or self._vllm_config.model_config.hf_config.model_type == "gpt_oss"

    @property
    def is_busy(self) -> bool:
        """Whether requests are running, so that a long step would hold them up."""
        assert self._scheduler is not None
        return bool(self._scheduler.running)

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """As `Inbox.match`, also for KV of preempted requests; None as well for a request
        that may not enter the batch yet."""
        is_background = False
        if request.request_id in self.swap:
            num_tokens = self.swap.match(request, num_local_tokens)
        else:
            num_tokens, is_background = self.inbox.match(
                request, num_local_tokens, is_busy=self.is_busy
            )
        if num_tokens is None or self.gate is None or is_own(request.request_id):
            return num_tokens, is_background
        missing_tokens = request.num_tokens - 1 - num_local_tokens - num_tokens
        return (num_tokens if self.gate.lets_in(request, missing_tokens) else None), is_background

    def add(self, request: Request) -> None:
        """Sort a new request by the leg that it carries, if any."""
        try:
            leg = from_params(request.kv_transfer_params)
        except ProtocolError as error:
            self.bad_legs += 1
            request.kv_transfer_params = None
            logger.warning("request %s is served whole: %s", request.request_id, error)
            return
        match leg:
            case PrefillLeg():
                self.outbox.add(request, leg)
                self.predictions.begin(request)
            case DecodeLeg(transfer=transfer) if transfer:
                self.inbox.add(request, leg)
            case None:
                self.predictions.begin(request)
            case _:
                pass

    def decode_leg(self, request: Request) -> DecodeLeg | None:
        """The leg of a request that began on another instance."""
        try:
            leg = from_params(request.kv_transfer_params)
        except ProtocolError:
            return None  # `add` says so
        return leg if isinstance(leg, DecodeLeg) else None

    def is_arriving(self, request: Request) -> bool:
        """Whether a request's KV comes from another instance."""
        leg = self.decode_leg(request)
        return leg is not None and bool(leg.transfer)

    def is_ready(self, request: Request) -> bool:
        """Whether a waiting request's KV is here, so that it needs one token of a step."""
        return self.inbox.is_here(request.request_id) or self.swap.is_here(request)

    def count_finished(self, request: Request) -> None:
        """A request that this instance decoded has ended."""
        if request.num_output_tokens > 0 and not is_own(request.request_id):
            self.decodes_done += 1
            if self.gate is not None:
                self.gate.ended(request)  # judged by what was known before it ended
            self._learn_length(request)

    def ended(self, request: Request) -> None:
        """A request ended, on whatever side and in whatever way."""
        self.predictions.end(request.request_id)
        if self._dispatcher is not None:
            self._dispatcher.forget(request.request_id)

    @property
    def num_undecided(self) -> int:
        """Prompts whose decode instance is being chosen (any thread)."""
        return self._dispatcher.num_held if self._dispatcher is not None else 0

    @property
    def lengths(self) -> Lengths:
        """What answers that ended here turned out to be."""
        return self._lengths_store.lengths

    def bucket_tokens(self) -> tuple[int, ...]:
        """Agent thread. Tokens of an answer by bucket, then without a prediction, as far as
        answers ended here; empty before."""
        return self._lengths_store.bucket_tokens()

    def _learn_length(self, request: Request) -> None:
        prediction = self.prediction_of(request)
        if tells_length(request, self.lengths, prediction):
            self.lengths.observe(prediction, request.num_output_tokens)
            self._lengths_store.changed(time.monotonic())

    def prediction_of(self, request: Request) -> Prediction | None:
        """How long the answer to a request will be, as far as is known."""
        leg = self.decode_leg(request)
        return leg.predicted if leg is not None else self.predictions.get(request.request_id)

    def _dispatch(
        self,
        request: Request,
        leg: PrefillLeg,
        num_bytes: int,
        refused: frozenset[InstanceId],
        may_wait: bool,
    ) -> Dispatch | None:
        assert self._dispatcher is not None
        if leg.anywhere:
            return self._dispatcher.choose_anywhere(request, num_bytes, refused, may_wait)
        return self._dispatcher.choose(request, num_bytes, refused, may_wait)

    def _note_sent(self, endpoint: str, was_reached: bool) -> None:
        if self._dispatcher is not None:
            self._dispatcher.note_sent(endpoint, was_reached=was_reached)

    def _due_prediction(self, request: Request) -> Prediction | None:
        return self.predictions.get(request.request_id, is_due=True)

    def _look(self) -> Picture:
        assert self._agent is not None
        return self._agent.picture()

    def _announce(
        self, request: Request, leg: PrefillLeg, dispatch: Dispatch, opening: Opening | None
    ) -> None:
        assert self._agent is not None
        self._agent.publish(
            Dispatched(
                leg.request,
                leg.transfer,
                dispatch.instance,
                dispatch.reason,
                self.prediction_of(request),
                opening,
            )
        )

    def _block_ids_of(self, request_id: str) -> list[int]:
        assert self._scheduler is not None
        return self._scheduler.kv_cache_manager.get_block_ids(request_id)[0]

    def _cancel(self, transfer: TransferId) -> None:
        """Agent thread."""
        self.outbox.cancel(transfer)
        self.inbox.cancel(transfer)

    def _abandon(self, router: str) -> None:
        """Agent thread. A router is gone."""
        self.outbox.abandon(router)
        self.inbox.abandon(router)

    def _read_load(self) -> InstanceLoad:
        """Agent thread."""
        assert self._scheduler is not None
        assert self._receiver is not None
        assert self._agent is not None
        return read_load(
            self._scheduler,
            self,
            arena=self._receiver.stats(),
            dropped_messages=self._agent.dropped_messages,
            cpu_s=self._cpu.read_s(),
            leftovers=self._look_for_leftovers(),
        )

    def _look_for_leftovers(self) -> tuple[str, ...]:
        """Agent thread. What is here although no request is; logged when it changes."""
        assert self._scheduler is not None
        assert self._receiver is not None
        if self.profiling is not None:
            return ()
        if not self._scheduler.requests:
            self.inbox.tidy()
        counts = count(self._scheduler, self, self._receiver.stats())
        before, found = self._audit.found, self._audit.look(counts, time.monotonic())
        if found != before:
            if found:
                logger.warning("left although no request is here: %s", ", ".join(found))
            else:
                logger.info("nothing is left any more")
        return found

    def _unfinished(self, role: Role) -> str:
        """Agent thread."""
        assert self._scheduler is not None
        assert self._receiver is not None
        return unfinished(self._scheduler, self.outbox, self._receiver.stats(), role)

    # -- flips ----------------------------------------------------------------------

    def take_role(self) -> Role | None:
        """The role to have from now on, if that is another one; between two steps."""
        role = self._switch.take()
        if role is None:
            return None
        if role is not Role.DECODE and self.predictions.predictor is None:
            self.predictions.predictor = make_predictor(
                self.config, self._vllm_config, self._buckets, role
            )
        if self._dispatcher is not None and self._info is not None:
            self._info = replace(self._info, role=role)
            self._dispatcher.act_as(self._info)
        return role

    def _is_engine_idle(self) -> bool:
        """Agent thread."""
        assert self._scheduler is not None
        return not self._scheduler.requests

    def _on_role_taken(self) -> None:
        if self._agent is not None:
            self._agent.wake_up()

    @property
    def num_flips(self) -> int:
        """Roles taken since the start."""
        return self._agent.num_flips if self._agent is not None else 0

    def close(self) -> None:
        """Leave the cluster and free the arena."""
        self.predictions.close()
        self._lengths_store.close()
        if self._agent is not None:
            self._agent.close()
        if self._receiver is not None:
            self._receiver.close()
