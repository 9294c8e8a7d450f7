"""The scheduler that `--role` installs: vLLM's own, with a thin mixin.

Nothing of vLLM's `schedule` is copied. Before every step the mixin sets its tokens, puts
decodes first, and shares it out among started prompts; its queue orders waiting prompts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container
from contextlib import nullcontext
from copy import copy
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import vllm

from vllm_tetri.engine.blocks import Pins, PromptBlocks
from vllm_tetri.engine.chunk_size import cuts_freely
from vllm_tetri.engine.compat import (
    AsyncScheduler,
    KVConnectorRole,
    PauseState,
    PrefixCacheStats,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
    diffusion_scheduler,
    require_contract,
)
from vllm_tetri.engine.connector import TetriConnector, params_of
from vllm_tetri.engine.continuation import Continuations, pad_no_drafts, pass_on_logprobs
from vllm_tetri.engine.executor import CalmExecutor
from vllm_tetri.engine.identity import prompt_digest
from vllm_tetri.engine.middleware import CountsOnce
from vllm_tetri.engine.pacing import (
    StepBudget,
    StepClock,
    decodes_first,
    due_tokens,
    share_in_order,
)
from vllm_tetri.engine.prediction import has_length
from vllm_tetri.engine.queue import AdapterSlots, PrefillQueue, may_run
from vllm_tetri.engine.residency import CacheLog
from vllm_tetri.engine.transfers import compute_again, end_requests, unfenced
from vllm_tetri.handover import DecodeParams
from vllm_tetri.plugins import load_policy
from vllm_tetri.policy.admission import ENTRY_ORDERS, DecodeGate
from vllm_tetri.policy.queue import PromptQueue
from vllm_tetri.policy.step_cost import StepFit

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

# Longest sleep of a step that only waits for KV, whose arrival ends it; delays new requests.
ARRIVAL_WAIT_S = 0.005
_ANY_BLOCKS, _LOADS = 1 << 40, RequestStatus.WAITING_FOR_REMOTE_KVS
# Of those that held KV and waited: they run by now, or are sessions, which may never go on.
_ASIDE = RequestStatus.RUNNING, RequestStatus.WAITING_FOR_STREAMING_REQ


def _keeps(request: Request) -> bool:
    """Whether a request that waited with KV at the step's begin, if its load did not fail, still
    does."""
    return request.num_computed_tokens > 0 and request.status not in _ASIDE


class TetriScheduler(Scheduler):
    """Synchronous variant; `make_scheduler` picks. `engine.load.SchedulerState` describes its
    public attributes."""

    connector: Any  # a `TetriConnector`
    max_num_scheduled_tokens: int
    running: list[Request]
    waiting: PrefillQueue

    def __init__(self, **kwargs: Any) -> None:
        self._begin_stock(kwargs)
        assert isinstance(self.connector, TetriConnector)
        self._endpoint = endpoint = self.connector.endpoint
        config = self._config = endpoint.config
        self._most_tokens = self.max_num_scheduled_tokens  # vLLM's own budget
        self.preemptions = self.decodes_done = 0
        self.continuations = Continuations(self)
        pad_no_drafts(self)
        self.blocks = blocks = PromptBlocks(self.kv_cache_manager)
        self.pins = Pins(self.kv_cache_manager, blocks)
        total_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        self.gate = DecodeGate(
            load_policy("admission", config.decode_policy if blocks.growing else "greedy"),
            config.reserve_end,
            lengths=endpoint.lengths_store.outputs,
            block_size=blocks.block_tokens,
            total_blocks=total_blocks // max(1, len(blocks.growing)),
            draft_tokens=self.num_spec_tokens + self.num_lookahead_tokens,
            entry_weight=ENTRY_ORDERS[config.decode_order],
        )
        fit, chunk_tokens = StepFit(), None
        if config.chunk_size != "auto":
            chunk_tokens = min(config.chunk_size, self._most_tokens)
        self.budget = StepBudget(fit, chunk_tokens, config.tbt_slo_s, self._most_tokens)
        self.clock = StepClock(fit, self.budget)
        self._cuts_freely = cuts_freely(self.vllm_config)
        self._shares: dict[str, int] = {}  # tokens of this step per started prompt
        self._limited: Container[str] = ()  # requests that may get less than vLLM gives them
        self._num_ready = 0  # that this step may admit in addition to started prompts
        self._adapters = AdapterSlots(self.lora_config and self.lora_config.max_loras)
        self._num_decodes = self._decode_tokens = 0  # of this step; they come first in `running`
        self._is_stuck = False
        # Ranks of a mixture of experts step together: none may make the others wait.
        steps_alone = self.vllm_config.parallel_config.data_parallel_size == 1
        self._arrival_wait_s = ARRIVAL_WAIT_S if steps_alone else 0.0
        order = load_policy("order", config.prefill_policy)
        self.waiting = PrefillQueue(
            PromptQueue(order, config.sched_batch, blocks.block_tokens, self.remaining_tokens),
            self.gate,
            endpoint,
        )
        endpoint.scheduler = self
        endpoint.cache = self.kv_event_publisher = CacheLog(self, blocks)

    def _begin_stock(self, kwargs: dict[str, Any]) -> None:
        """Initialize what is vLLM's own; encoder-decoder models get our connector here."""
        given: VllmConfig = kwargs["vllm_config"]
        if given.model_config.is_encoder_decoder:  # vLLM's scheduler refuses any connector there
            kwargs["vllm_config"] = hiding = copy(given)
            hiding.kv_transfer_config = None
        super().__init__(**kwargs)
        if self.connector is None:  # ours hands nothing over: `identity.why_alone`
            self.vllm_config = given
            self.connector = TetriConnector(given, KVConnectorRole.SCHEDULER, self.kv_cache_config)
            self.connector_prefix_cache_stats = PrefixCacheStats() if self.log_stats else None

    def remaining_tokens(self, request: Request) -> int:
        """Return how many tokens of a waiting request are left to compute."""
        arriving_tokens = self._endpoint.receives.arriving_tokens(request.request_id)
        known = max(arriving_tokens, self.kv_cache_manager.get_computed_blocks(request)[1])
        return request.num_tokens - known

    # -- requests ---------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        self._endpoint.take_role()  # the side of KV transfer depends on it
        if request.request_id not in self.requests:  # else vLLM continues or refuses it
            self._add(request)
        super().add_request(request)

    def _add(self, request: Request) -> None:
        params = params_of(request)
        self.continuations.forget(request.request_id)
        if isinstance(params, DecodeParams):
            if params.digest not in ("", prompt_digest(request)):
                self._endpoint.receives.refuse(request, params)
                params = None
            elif params.prior_output is not None:
                self.continuations.begin(request, params.prior_output, params.cached_tokens)
        self._endpoint.add(request, params)
        self._endpoint.times.add(request.request_id)

    def record_decoded(self, request: Request) -> None:
        """Record the end of a request that was decoded here."""
        if request.num_output_tokens == 0:
            return
        self.decodes_done += 1
        if has_length(request):
            self.gate.record_output(request)  # judged by what was known before it ended
        self._endpoint.learn(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if self._adapters.are_taken(request, self.running):
            return False
        is_new_to_grammar = request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        is_ready = super()._handle_blocked_waiting_request(request)
        if is_ready and is_new_to_grammar:
            self.continuations.accept_grammar(request)
        return is_ready

    # -- a step -----------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._endpoint.take_role()
        self._prepare_step()
        was_running = bool(self.running)
        output = super().schedule(throttle_prefills)
        self.continuations.prepare(output.scheduled_new_reqs, self.requests)
        self._after_schedule(output)
        if output.total_num_scheduled_tokens:
            self.clock.begin(output, time.monotonic(), was_running=was_running)
        else:
            self.clock.interrupt()
        return output

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.pins.release_all()  # vLLM resets it only while no block is used
        self._endpoint.pool.clear()
        with unfenced(self) if reset_running_requests else nullcontext():
            return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.clock.interrupt()
        super().set_pause_state(pause_state)

    def _prepare_step(self) -> None:
        self._endpoint.moves.begin_step()
        self._look_for_arrivals()
        wait_s = 0.0 if self.running else self._arrival_wait_s
        self.waiting.let_in(self._endpoint.predictions, wait_s)
        for request_id in self.finished_req_ids:
            known = self.requests.get(request_id)
            if known is None or known.is_finished():  # else another one has its name now
                self.waiting.lane.discard(request_id)
                self.continuations.forget(request_id)
                self.gate.forget(request_id)
        self.running, num_prompts = decodes_first(self.running)
        self._adapters.begin_step()
        self._num_decodes = len(self.running) - num_prompts
        self.pins.leave_room(chain(self.running, self.kv_holding_waiting))
        self._set_budget()
        holding = [*self.kv_holding_waiting]  # which vLLM empties before it asks the gate
        self.gate.begin_step(
            lambda: [*self.running, *filter(_keeps, holding)],
            time.monotonic(),
            free_blocks=self._free_per_group(),
            tokens_per_step=self.max_num_scheduled_tokens,
        )
        if self.waiting.lane.order.is_preemptive:
            self._share_out()
        else:
            # Leave the tokens added by `_set_budget` to the requests that are ready.
            prompts = self.running[self._num_decodes :] if self._num_ready else []
            self._shares = share_in_order(prompts, self._chunk_tokens)
        parked = self._endpoint.moves.parked
        self._limited = self._shares.keys() | parked if parked else self._shares

    def _free_per_group(self) -> int:
        """Return how many free blocks there are for each group that grows with its requests;
        without one, vLLM's own check is enough: blocks do not follow from tokens."""
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        num_growing = len(self.blocks.growing)
        return int(free_blocks) // num_growing if num_growing else _ANY_BLOCKS

    def _set_budget(self) -> None:
        """Set the tokens of the step: a chunk and all decodes, and those of every request whose KV
        is here: vLLM admits none without tokens left."""
        decodes, lane = self.running[: self._num_decodes], self.waiting.lane
        self._decode_tokens = decode_tokens = due_tokens(decodes, self.num_spec_tokens)
        has_place = len(self.running) < self.max_num_active_reqs and not self.gate.is_shut
        first_tokens = lane.first_tokens(has_place=has_place) if decode_tokens else 0
        # vLLM lets a request in that decodes at once only with all its drafts.
        has_ready = self.waiting.first or self.kv_holding_waiting
        arriving, least = self._endpoint.receives.arriving_tokens, 1 + self.num_spec_tokens
        num_waiting = len(lane) or self.waiting.num_long(self.kv_holding_waiting, arriving, least)
        tokens = self.budget.tokens(self.running, decode_tokens, num_waiting, first_tokens)
        self._num_ready = num_ready = self._ready_tokens() if has_ready else 0
        self.max_num_scheduled_tokens = min(tokens + num_ready, self._most_tokens)
        self._chunk_tokens = max(1, self.max_num_scheduled_tokens - decode_tokens - num_ready)

    def _ready_tokens(self) -> int:
        """Return the tokens of requests that need only one of a step (their KV is here or loading),
        and of those for the KV of a prefix."""
        is_here, first = self._endpoint.receives.is_here, self.waiting.first
        num_ready = len(self.kv_holding_waiting) + sum(is_here(each.request_id) for each in first)
        fetched_tokens = sum(map(self._endpoint.sends.fetch_tokens, first))
        return num_ready * (1 + self.num_spec_tokens) + fetched_tokens

    def _loading(self) -> set[str]:
        """Return started prompts whose load goes on: they get no share of a step."""
        loads = (each for each in self.kv_holding_waiting if each.status is _LOADS)
        return {each.request_id for each in loads} - self.finished_recving_kv_req_ids

    def _look_for_arrivals(self) -> None:
        """Take KV and first tokens that other instances sent; if all that is here waits for some,
        wait for news of them."""
        self._take_arrivals()  # before: nothing that is here already ends the wait
        receives, parked = self._endpoint.receives, self._endpoint.moves.num_waiting
        num_busy = len(self.running) + len(self.kv_holding_waiting) - parked
        is_idle = not num_busy and 0 < len(self.waiting) + parked <= receives.num_waiting + parked
        if is_idle and self._arrival_wait_s:
            receives.wait(self._arrival_wait_s)
            self._take_arrivals()

    def _take_arrivals(self) -> None:
        receives = self._endpoint.receives
        for request_id, prior_output in receives.take_outputs():
            self.continuations.begin_late(self.requests[request_id], prior_output)
        receives.pin_arrived(self.requests)

    def _share_out(self) -> None:
        """Share the chunk out among started prompts; the queue gets the rest."""
        queue, prompts = self.waiting, self.waiting.lane
        if self._is_stuck:
            queue.lane.free_blocks, self._shares = 0, {}  # started prompts continue as in vLLM
            return
        # Pinned ones are free if vLLM, once asked, lacks them.
        free_blocks = self._free_per_group() + self.pins.num_blocks
        chunk_tokens = self.max_num_scheduled_tokens - self._num_ready
        if len(self.running) > len(prompts.started):
            chunk_tokens -= self._decode_tokens
        self._shares = queue.lane.share_out(
            chunk_tokens,
            free_blocks=free_blocks if len(self.running) < self.max_num_active_reqs else 0,
            was_refused=self.gate.was_shut,
            may_run=lambda each: may_run(each) and not self._adapters.are_taken(each, self.running),
            absent=self._loading(),
        )

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        # vLLM lets this method lower what a request gets of a step, and asks for every request.
        if request.request_id not in self._limited and not self.num_prefill_lookahead:
            return max(num_new_tokens, 0)  # as vLLM does
        if request.request_id in self._endpoint.moves.parked:
            return 0
        if self._shares and self._cuts_freely:
            share = self._shares.get(request.request_id, num_new_tokens)
            # One whose prefix was loaded in the background may be started, but not in the batch;
            # vLLM pads the last token of its prompt by drafts.
            if request.status is not RequestStatus.RUNNING:
                share = max(share, 1 + self.num_spec_tokens)
            num_new_tokens = min(num_new_tokens, share)
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def _after_schedule(self, output: SchedulerOutput) -> None:
        prompts, is_idle = self.waiting.lane, True
        for request_id in [*prompts.started]:
            if num_tokens := output.num_scheduled_tokens.get(request_id):
                is_idle = False
                request = self.requests[request_id]
                remaining_tokens = request.num_tokens - request.num_computed_tokens
                prompts.computed(request_id, num_tokens, remaining_tokens)
        # Whatever delays the head of the queue, started prompts must continue.
        self._is_stuck = is_idle and not prompts.started.keys() <= self._loading()
        self.preemptions += len(output.preempted_req_ids or ())

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            self.clock.end(time.monotonic())
        endpoint = self._endpoint
        endpoint.predictions.take(model_runner_output)
        hands_over = len(endpoint.sends) > 0  # asked first: those that end are removed
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        compute_again(self, endpoint.times, model_runner_output.kv_connector_output)
        for each in outputs.values():
            endpoint.times.end_step(each.outputs)
            endpoint.moves.tell_moved(self.continuations.show(each.outputs))
            if hands_over:
                pass_on_logprobs(each.outputs)
        end_requests(self, endpoint.sends.refused | endpoint.receives.unmoved, outputs)
        return outputs


class TetriAsyncScheduler(TetriScheduler, AsyncScheduler):
    """Asynchronous variant."""


def make_scheduler(**kwargs: Any) -> Scheduler:
    """Return the scheduler that `--scheduler-cls` names (`SchedulerConfig.get_scheduler_cls`)."""
    config: VllmConfig = kwargs["vllm_config"]
    is_async = config.scheduler_config.async_scheduling
    made: type[Scheduler] = TetriAsyncScheduler if is_async else TetriScheduler
    if (theirs := diffusion_scheduler(config)) is not None:
        made = type(made.__name__, (made, theirs), {})
    return made(**kwargs)


@cache
def require_supported(version: str = vllm.__version__) -> None:
    """Raise an UnsupportedError that names the seam if this package does not fit the installed
    vLLM; a release that was not tested but follows a tested one only brings a warning, once per
    process."""
    ours = (TetriScheduler, TetriConnector, PrefillQueue, CalmExecutor, CountsOnce)
    if warning := require_contract(ours, version):
        logger.warning(warning)
