"""The scheduler that `--role` installs: vLLM's own, with a thin mixin.

Nothing of vLLM's `schedule` is copied. Before every step the mixin sets how many
tokens the step may take, puts decodes before prompts, and shares the step out
among started prompts; the order of waiting prompts is its queue's. It keeps an
engine that only waits for KV from spinning, and counts.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm_tetri.engine.admission import Answers, DecodeGate
from vllm_tetri.engine.budget import StepBudget
from vllm_tetri.engine.compat import (
    AsyncScheduler,
    PauseState,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from vllm_tetri.engine.connector import TetriConnector
from vllm_tetri.engine.injection import Injections, pass_on_logprobs
from vllm_tetri.engine.own import OwnRequests, is_own, take_own_outputs
from vllm_tetri.engine.profile import Profile
from vllm_tetri.engine.profiling import Profiling, needs_profile
from vllm_tetri.engine.queue import PrefillQueue
from vllm_tetri.engine.step_clock import StepClock
from vllm_tetri.engine.strategy import strategy_of
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.types import Role

logger = logging.getLogger(__name__)

# How long a step sleeps when its only work is KV that has not arrived. Bounds
# the delay of a new request; the arrival itself wakes it at once.
ARRIVAL_WAIT_S = 0.005
# KV that arrived expires after --tetri-hold-timeout unless its request is known to wait,
# which is looked after so often in that time.
_PINS_PER_HOLD = 8


class TetriScheduler(Scheduler):
    """Synchronous variant; `make_scheduler` picks."""

    max_num_scheduled_tokens: int
    running: list[Request]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert isinstance(self.connector, TetriConnector)
        self._instance = self.connector.instance
        self._instance.bind_scheduler(self)
        config = self._instance.config
        self._most_tokens = self.max_num_scheduled_tokens  # vLLM's own budget
        self._injections = Injections(
            is_v2_runner=self.use_v2_model_runner,
            is_async=self.scheduler_config.async_scheduling,
            is_cpu=self.vllm_config.device_config.device_type == "cpu",
            vocabulary=self.vllm_config.model_config.get_vocab_size(),
            window=self.max_model_len,
        )
        self._instance.injections = self._injections
        self._instance.answers = self._answers = Answers(
            self._instance.lengths, self._instance.predictions.get, self.max_model_len
        )
        self._gate = self._make_gate()
        self._keeps_preempted = not self.needs_kv_cache_zeroing
        self._shares: dict[str, int] = {}  # tokens of this step per started prompt
        self._num_ready = 0  # that this step may let in beside prompts under way
        self._own = OwnRequests(self)
        self._padding: Request | None = None
        self._has_padded = False
        self._is_stuck = False
        self._pin_period_s = config.hold_timeout_s / _PINS_PER_HOLD
        self._pinned_s = 0.0
        self._clock = StepClock(self._instance.steps)
        self._chunk_tokens = self._most_tokens
        self._pace: StepBudget | None = None  # of decodes, in any role
        self.order_by(config.prefill_policy, config.sched_batch)
        if config.chunk_size != "auto":
            self._chunk_tokens = self._chunk_budget(config.chunk_size)
        self._act_as(config.role)
        if needs_profile(config):
            self._instance.profiling = Profiling(self, self._instance)
            self._queue.is_open = False

    def order_by(self, policy: PrefillPolicy, sched_batch: int, *, pads: bool = False) -> None:
        """Order waiting prompts so from now on, and fill up chunks if `pads`; nothing
        may be waiting or started."""
        assert not self.requests
        self._pads = pads
        self.waiting = self._queue = PrefillQueue(
            policy,
            sched_batch,
            remaining_of=self._remaining_tokens,
            blocks_of=self._num_blocks,
            is_arriving=self._instance.is_arriving,
            is_shut=self._is_gate_shut,
        )
        self._queue.awaits_predictions = self._instance.predictions.is_sequential

    def _act_as(self, role: Role) -> None:
        """Work as a role does from the next step on; between two steps."""
        strategy = strategy_of(role, self._instance.config)
        self._queue.prompts.use(strategy.order)
        self._queue.room_blocks, self._shares = None, {}
        self._queue.awaits_predictions = self._instance.predictions.is_sequential
        self._pads, self._is_chunked = strategy.pads, strategy.is_chunked
        self._instance.gate = self._gate
        self._instance.chunk_tokens = self.max_num_scheduled_tokens = self._chunk_tokens

    def _take_role(self) -> None:
        role = self._instance.take_role()
        if role is not None:
            self._act_as(role)

    def _make_gate(self) -> DecodeGate | None:
        config = self._instance.config
        if config.decode_policy is DecodePolicy.GREEDY:
            return None
        return DecodeGate(
            config.decode_policy,
            config.reserve_end,
            answers=self._answers,
            block_size=self.block_size,
            total_blocks=self.kv_cache_manager.block_pool.num_gpu_blocks - 1,
        )

    def _chunk_budget(self, chunk_size: int) -> int:
        limit, window = self.scheduler_config.max_num_batched_tokens, self.max_model_len
        if self._instance.config.role is not Role.PREFILL:  # it may become one
            return min(chunk_size, limit, window)
        if chunk_size > window:
            raise ConfigError(
                f"--tetri-chunk-size {chunk_size}: must be between 1 and {window}, "
                "the model's window"
            )
        if chunk_size > limit:
            raise ConfigError(
                f"--tetri-chunk-size {chunk_size} exceeds --max-num-batched-tokens {limit}; "
                "raise the latter or lower the former"
            )
        return chunk_size

    def _remaining_tokens(self, request: Request) -> int:
        """What is left to compute of a waiting request."""
        return request.num_tokens - self.kv_cache_manager.get_computed_blocks(request)[1]

    def add_request(self, request: Request) -> None:
        self._take_role()  # what it begins with depends on it
        leg = self._instance.decode_leg(request)
        self._injections.forget(request.request_id)
        if leg is not None and leg.given is not None:
            self._injections.begin(request, leg.given)
        if leg is not None and leg.predicted is not None:
            self._answers.add(request.request_id, leg.predicted)
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        is_new_to_grammar = request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        is_ready = super()._handle_blocked_waiting_request(request)
        if is_ready and is_new_to_grammar:
            # The grammar goes on behind what was given; that was sampled under it.
            given = self._injections.tokens(request.request_id)
            if given and not self.structured_output_manager.accept_tokens(request, given):
                logger.error("request %s: its grammar refuses given tokens", request.request_id)
        return is_ready

    # -- a step -----------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._take_role()
        if self._instance.profiling is not None and self._instance.profiling.is_over:
            self._use(self._instance.profiling.profile)
        if self._instance.profiling is not None:
            self._instance.profiling.before_step()
        else:
            self._prepare_step()
        goes_on = bool(self.running)
        output = super().schedule(throttle_prefills)
        self._injections.prepare(output.scheduled_new_reqs, self.requests)
        self._after_schedule(output)
        if output.total_num_scheduled_tokens:
            self._clock.begin(output, time.monotonic(), goes_on=goes_on)
        else:
            self._clock.interrupt()
        return output

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._clock.interrupt()
        super().set_pause_state(pause_state)

    def _prepare_step(self) -> None:
        self._let_predicted_in()
        self._look_for_arrivals()
        for request_id in self.finished_req_ids:
            known = self.requests.get(request_id)
            if known is None or known.is_finished():  # else another one has its name now
                self._queue.forget(request_id)
                self._injections.forget(request_id)
                self._answers.forget(request_id)
                if self._gate is not None:
                    self._gate.forget(request_id)
        self._put_decodes_first()
        self._set_budget()
        if self._instance.gate is not None:
            self._open_gate(self._instance.gate)
        if self._queue.prompts.policy is PrefillPolicy.SRTF:
            self._share_out()
        else:
            self._leave_room()
        if self._pads:
            self._pad()

    def _set_budget(self) -> None:
        """One chunk of prompts and all decodes; beside decodes whose pace was promised,
        what that leaves. A token on top for everyone whose KV is here: vLLM lets requests
        in only while a step has tokens left, and prompts under way would take them all."""
        num_decodes = self._num_decodes()
        tokens = self._chunk_tokens + num_decodes
        if self._pace is not None:
            paced_tokens = self._pace.tokens(self.running, time.monotonic())
            tokens = tokens if self._is_chunked and not num_decodes else paced_tokens
        self._num_ready = self._count_ready()
        self.max_num_scheduled_tokens = min(tokens + self._num_ready, self._most_tokens)
        num_decodes += self._num_ready
        self._instance.chunk_tokens = max(1, self.max_num_scheduled_tokens - num_decodes)

    def _count_ready(self) -> int:
        """Requests that wait for nothing but a step to write their next token in, or for a
        load under way besides."""
        num_loading = len(self.kv_holding_waiting)
        if not self._queue.num_first:
            return num_loading
        self._instance.inbox.pin_arrived(self.requests)
        return num_loading + self._queue.count_first(self._instance.is_ready)

    def _look_for_arrivals(self) -> None:
        """KV and first tokens that other instances sent."""
        inbox, now = self._instance.inbox, time.monotonic()
        num_busy = len(self.running) + len(self.kv_holding_waiting)
        if not num_busy and 0 < len(self.waiting) <= inbox.num_waiting:
            inbox.wait(ARRIVAL_WAIT_S)
        elif inbox.num_waiting and now - self._pinned_s >= self._pin_period_s:
            self._pinned_s = now
            inbox.pin_arrived(self.requests)
        for request_id, given in inbox.take_given():
            request = self.requests[request_id]
            is_new = request.status is RequestStatus.WAITING and not request.num_computed_tokens
            # A grammar that is on already would not see the token.
            if is_new and request.structured_output_request is None:
                self._injections.begin(request, given)

    def _let_predicted_in(self) -> None:
        predictions, queue = self._instance.predictions, self._queue
        predictions.exchange()
        queue.let_in(predictions.holds)
        if 0 < queue.num_unpredicted == len(queue) and not self.running:
            predictions.wait(ARRIVAL_WAIT_S)
            predictions.exchange()
            queue.let_in(predictions.holds)

    def _open_gate(self, gate: DecodeGate) -> None:
        gate.begin_step(
            time.monotonic(),
            running=lambda: [*self.running, *self.kv_holding_waiting],
            free_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks(),
            tokens_per_step=self.max_num_scheduled_tokens,
        )

    def _is_gate_shut(self) -> bool:
        gate = self._instance.gate
        return gate is not None and gate.is_shut

    def _put_decodes_first(self) -> None:
        """Decodes, then started prompts; new ones follow (Sarathi-Serve, algorithm 3)."""
        prompts = [request for request in self.running if request.is_prefill_chunk]
        if prompts and len(prompts) < len(self.running):
            decodes = [request for request in self.running if not request.is_prefill_chunk]
            self.running = decodes + prompts

    def _num_decodes(self) -> int:
        # With asynchronous scheduling prompts whose end is being computed are none of either.
        outbox = self._instance.outbox
        return sum(
            not request.is_prefill_chunk and request.request_id not in outbox
            for request in self.running
        )

    def _leave_room(self) -> None:
        """Started prompts get a chunk, and leave what is on top of it to who is ready."""
        self._shares = {}
        if not self._num_ready:
            return
        left_tokens = self._instance.chunk_tokens
        for request in self.running:
            if request.is_prefill_chunk:
                missing_tokens = request.num_tokens - request.num_computed_tokens
                self._shares[request.request_id] = tokens = min(missing_tokens, left_tokens)
                left_tokens -= tokens

    def _share_out(self) -> None:
        """Decide what started prompts get of this step; the rest is for the queue."""
        queue, prompts = self._queue, self._queue.prompts
        if self._is_stuck:
            queue.room_blocks, self._shares = 0, {}  # started prompts go on as in vLLM
            return
        # Interrupted prompts keep their blocks, so those that start beside them must
        # leave them room to be finished.
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        started_blocks = sum(-(-tokens // self.block_size) for tokens in prompts.started_tokens())
        queue.room_blocks = max(0, free_blocks - started_blocks)
        if len(self.running) >= self.max_num_active_reqs:
            queue.room_blocks = 0
        queue.order_again()
        chunk_tokens = self.max_num_scheduled_tokens - self._num_ready
        if len(self.running) > prompts.num_started:
            chunk_tokens -= sum(not request.is_prefill_chunk for request in self.running)
        self._shares = prompts.plan(chunk_tokens, unable=queue.unable())
        # Who was refused in the last step most likely is again.
        was_refused = self._instance.gate is not None and self._instance.gate.was_shut
        if len(prompts) and (was_refused or not queue.may_start()):
            self._shares = prompts.plan(chunk_tokens, only_started=True)

    def _num_blocks(self, request: Request) -> int:
        return -(-request.num_tokens // self.block_size)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        # vLLM lets this method lower what a request gets of a step.
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        return min(num_new_tokens, self._shares.get(request.request_id, num_new_tokens))

    def _pad(self) -> None:
        missing_tokens = self._chunk_tokens - self._queue.prompts.unfinished_tokens
        if 0 < missing_tokens < self._chunk_tokens:
            self._padding, self._has_padded = self._own.pad(missing_tokens), True
            super().add_request(self._padding)  # ours takes a role, if there is one to take

    # -- preempted requests --------------------------------------------------------

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        # A prompt for another instance is sent anew from its first block.
        is_worth_it = self._keeps_preempted and request.request_id not in self._instance.outbox
        if is_worth_it and not is_own(request.request_id):
            block_ids = self.kv_cache_manager.get_block_ids(request.request_id)[0]
            self._instance.swap.keep(request, block_ids)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        # Whoever asks for it has changed what blocks mean: weights, most often.
        keeps_preempted, self._keeps_preempted = self._keeps_preempted, False
        try:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        finally:
            self._keeps_preempted = keeps_preempted
            self._instance.swap.forget_all()

    def _after_schedule(self, output: SchedulerOutput) -> None:
        prompts = self._queue.prompts
        if self._pace is not None:
            self._pace.scheduled(output.total_num_scheduled_tokens)
        is_idle = True
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if request_id in prompts:
                is_idle = False
                request = self.requests[request_id]
                remaining_tokens = request.num_tokens - request.num_computed_tokens
                prompts.computed(request_id, num_tokens, remaining_tokens)
        # Whatever kept the head of the queue back, started prompts must go on.
        self._is_stuck = is_idle and prompts.num_started > 0
        self._instance.preemptions += len(output.preempted_req_ids or ())
        padding, self._padding = self._padding, None
        if padding is not None and padding.request_id not in output.num_scheduled_tokens:
            self.finish_requests(padding.request_id, RequestStatus.FINISHED_ABORTED)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            is_own = self._instance.profiling is not None
            self._instance.step_s = self._clock.end(time.monotonic(), learns=not is_own)
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        for answer in outputs.values():
            self._injections.show(answer.outputs)
            pass_on_logprobs(answer.outputs)
        if self._instance.profiling is not None:
            self._instance.profiling.after_step(outputs)
        elif self._has_padded:
            take_own_outputs(outputs)
        return outputs

    # -- measuring at start ------------------------------------------------------

    def has_requests(self) -> bool:
        # The engine steps at once after its start, and so measures itself.
        return self._instance.profiling is not None or super().has_requests()

    def _use(self, profile: Profile) -> None:
        """Measuring is over: put what was found to use, and take requests."""
        config = self._instance.config
        self._instance.profiling = None
        self._queue.is_open = True
        if config.chunk_size == "auto":
            self._chunk_tokens = profile.chunk_tokens
        if config.tbt_slo_s is not None:
            self._pace = StepBudget(
                profile.cost,
                config.tbt_slo_s,
                self._most_tokens,
                profile.tile_tokens,
                lag_steps=int(self.scheduler_config.async_scheduling),
            )
        self._act_as(config.role)
        self._instance.join()


class TetriAsyncScheduler(TetriScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduler."""


def make_scheduler(**kwargs: Any) -> Scheduler:
    """Factory that `--scheduler-cls` names (vLLM: `SchedulerConfig.get_scheduler_cls`)."""
    is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
    return TetriAsyncScheduler(**kwargs) if is_async else TetriScheduler(**kwargs)
