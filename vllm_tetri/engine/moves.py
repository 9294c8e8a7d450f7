"""Running outputs that move to another instance, scheduler half of the one that they leave.

Owner: the engine thread. Only `order` and `cancel` may be called from another thread.

A move is a hand-over in the middle of an output. While a request decodes, its finished blocks are
pushed to a slot for exactly `num_tokens` tokens, which it will have computed a few steps later. It
stops there: the step that computes the last of them pushes the rest, and the output tokens follow
as a note. The request then waits with all its blocks. If the other instance goes on, the router
closes the connection here, and vLLM aborts the request. If anything fails, the request goes on
here as if nothing had been: only the router decides which of the two the client hears.
"""

from __future__ import annotations

import logging
import queue
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from vllm_tetri.control.agent import Agent
from vllm_tetri.engine.compat import COMPLETE, Request, RequestStatus, SchedulerOutput
from vllm_tetri.engine.identity import prompt_digest
from vllm_tetri.engine.prediction import Predictions
from vllm_tetri.engine.step import (
    FREED,
    FirstTokens,
    KVLayout,
    Open,
    StepMeta,
    WorkerReport,
    Write,
    encode_note,
)
from vllm_tetri.engine.transfers import Sending
from vllm_tetri.handover import DecodeParams, PriorOutput, choice_name
from vllm_tetri.messages import Move, Moved, Moving
from vllm_tetri.policy.step_cost import HandoverFit
from vllm_tetri.types import TransferId

logger = logging.getLogger(__name__)

# Steps until a request stops: at least so many, for the decode request to be on its way; at most so
# many, or a fast link would not be waited for.
LEAST_STEPS, MOST_STEPS = 4, 256
OPENING_S = 0.03  # takes a decode request, about
MOST_OUTPUT_TOKENS = 10_000  # a note has no room for more


@dataclass(slots=True)
class _Leaving:
    """One choice of an output that moves."""

    request: Request
    order: Move
    transfer: TransferId  # of this choice
    num_tokens: int  # prompt and output of which the KV moves
    round: int
    deadline: float
    is_open: bool = False
    pushed_tokens: int = 0
    is_pushed: bool = False  # completely
    is_told: bool = False  # the other instance has its output tokens
    num_ended: int = 0  # shards that are done with it
    freeing: bool = False  # the request has ended here, and keeps its blocks until they are sent

    @property
    def is_stopped(self) -> bool:
        """Whether it has computed all that moves, and so waits."""
        return self.request.num_computed_tokens >= self.num_tokens


class MoveSide:
    """Outputs of this instance that are to go on at another one. `parked` are the requests that
    wait for it: no step has tokens for them."""

    def __init__(
        self,
        layout: KVLayout,
        scheduler: Sending,
        predictions: Predictions,
        fit: HandoverFit,
        agent: Agent,
        timeout_s: float,
    ) -> None:
        self._layout, self._scheduler, self._blocks = layout, scheduler, scheduler.blocks
        self._predictions, self._fit = predictions, fit
        self._agent, self._timeout_s = agent, timeout_s
        self._why_not = ""  # move any output
        if scheduler.num_spec_tokens or not scheduler.continuations.is_supported:
            self._why_not = "nothing continues exactly after drafts, or on this model runner"
        self._leaving: dict[str, _Leaving] = {}
        self._orders: queue.SimpleQueue[Move | TransferId] = queue.SimpleQueue()
        self._stops, self._frees = list[str](), list[str]()
        self._notes: list[tuple[str, bytes]] = []
        self._num_rounds = FREED
        self.parked: set[str] = set()
        self.arrivals: dict[str, TransferId] = {}  # of requests that are to go on here

    def __len__(self) -> int:
        return len(self._leaving)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the instance that they move to, if it has all that it needs."""
        return 0 if self._notes else len(self.parked)

    def order(self, order: Move) -> None:
        """Move an output from the next step on (any thread)."""
        self._orders.put(order)

    def cancel(self, transfer: TransferId) -> None:
        """Let an output continue here (any thread)."""
        if self._leaving or not self._orders.empty():
            self._orders.put(transfer)

    # -- one step ---------------------------------------------------------

    def begin_step(self) -> None:
        """Take orders, and park requests that have computed all that moves."""
        while not self._orders.empty():
            order = self._orders.get()
            if isinstance(order, Move):
                if problem := self._why_not or self._begin(order):
                    self._agent.publish(Moving(order.request, order.transfer, problem=problem))
            else:
                self._drop(order, "")
        if not self._leaving:
            self.parked = set()
            return
        now = time.monotonic()
        for each in [one for one in self._leaving.values() if now >= one.deadline]:
            self._drop(each.order.transfer, f"it did not go on elsewhere in {self._timeout_s:g} s")
        stopped = [each for each in self._leaving.values() if each.is_stopped and not each.freeing]
        self.parked = {each.request.request_id for each in stopped}
        for each in stopped:
            if not (each.is_told or each.request.num_output_placeholders):
                each.is_told = True
                prior = PriorOutput(list(each.request.output_token_ids), is_seen=True)
                note = encode_note(FirstTokens(each.transfer, prior))
                self._notes.append((each.order.kv_endpoint, note))

    def _begin(self, order: Move) -> str:
        """Begin to move all choices of an output; return why not."""
        asked = re.escape(order.request)
        name = re.compile(rf"(?:\d+_)?(?:chatcmpl-{asked}|cmpl-{asked}-0)(?:-[^-]*)?")
        requests = self._scheduler.requests
        choices = [
            requests[each] for each in sorted(filter(name.fullmatch, requests), key=choice_of)
        ]
        if len(choices) != order.num_choices:
            return "it has ended, or one of its choices, or another router's has its name"
        if problem := next(filter(None, map(self._problem, choices)), ""):
            return problem
        most_tokens = max(each.num_tokens for each in choices)
        send_s = OPENING_S + most_tokens * self._fit.token_s * len(choices)
        steps = ceil(send_s / max(self._scheduler.clock.step_s, 1e-4))
        steps = min(max(LEAST_STEPS, steps), MOST_STEPS)
        if any(each.max_tokens - each.num_output_tokens <= steps + 2 for each in choices):
            return "it is about to end"
        deadline = time.monotonic() + self._timeout_s
        kv_tokens = [each.num_computed_tokens + steps for each in choices]
        for index, (each, num_tokens) in enumerate(zip(choices, kv_tokens, strict=True)):
            self._num_rounds += 1
            transfer = choice_name(order.transfer, index)
            self._leaving[each.request_id] = _Leaving(
                each, order, transfer, num_tokens, self._num_rounds, deadline
            )
        first = choices[0]
        self._agent.publish(
            Moving(
                order.request,
                order.transfer,
                kv_tokens,
                prompt_digest(first),
                list(first.prompt_token_ids or ()),
                self._predictions.get(first.request_id),
            )
        )
        return ""

    def _problem(self, request: Request) -> str:
        """Say why a request does not move now; empty if it does."""
        sampling = request.sampling_params
        problems = {
            "it moves already": request.request_id in self._leaving,
            "it does not decode yet": request.status is not RequestStatus.RUNNING
            or bool(request.is_prefill_chunk)
            or not request.num_output_tokens,
            "it wants log probabilities of its prompt": sampling is None
            or sampling.prompt_logprobs is not None,
            "its output is too long": request.num_output_tokens > MOST_OUTPUT_TOKENS,
        }
        return next((problem for problem, applies in problems.items() if applies), "")

    def fill(self, meta: StepMeta, output: SchedulerOutput) -> None:
        """Add this step's orders to `meta`, as `SendSide.fill` does."""
        if not (self._leaving or self._stops or self._frees or self._notes):
            return
        for request_id in output.preempted_req_ids or ():
            if (each := self._leaving.get(request_id)) is not None:
                self._drop(each.order.transfer, "it was preempted")
        for request_id, each in self._leaving.items():
            if not each.is_pushed and request_id in output.num_scheduled_tokens:
                self._push(meta, each, output.num_scheduled_tokens[request_id])
        meta.stops += self._stops
        meta.frees += self._frees
        meta.notes += self._notes
        self._stops, self._frees, self._notes = [], [], []

    def _push(self, meta: StepMeta, each: _Leaving, num_tokens: int) -> None:
        request_id, computed = each.request.request_id, each.request.num_computed_tokens
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        if not each.is_open:
            each.is_open = True
            num_blocks = self._blocks.count(each.num_tokens)
            opening = each.round, each.order.kv_endpoint, each.transfer, num_blocks
            meta.opens.append(Open(request_id, *opening))
        runs, since = self._blocks.runs, each.pushed_tokens
        if found := runs(each.num_tokens, block_ids, since=since, until=computed):
            meta.writes.append(Write(request_id, found, is_last=False))
        each.pushed_tokens = computed
        if computed + num_tokens >= each.num_tokens:
            each.is_pushed = True
            found = runs(each.num_tokens, block_ids, since=computed)
            meta.tails.append(Write(request_id, found, is_last=True))

    # -- the end of a move --------------------------------------------------

    def report(self, report: WorkerReport) -> set[str]:
        """Handle what workers report; return the requests whose blocks vLLM may free now."""
        freeable = set()
        for request_id, (failed, status, text) in report.failed.items():
            each = self._leaving.get(request_id)
            if each is not None and failed == each.round and not each.freeing:
                self._drop(each.order.transfer, f"its KV cannot be sent: {status} {text}".strip())
        for (request_id, ended), num_ranks in report.ended.items():
            each = self._leaving.get(request_id)
            if each is None or ended != (FREED if each.freeing else each.round):
                continue
            each.num_ended += num_ranks
            if each.num_ended >= self._layout.shards.num_parts and each.freeing:
                freeable.add(request_id)
                del self._leaving[request_id]
        return freeable

    def moved_by(self, request: Request) -> str:
        """Return the transfer by which a request that ends here goes on elsewhere, as it leaves or
        did not come; or nothing."""
        if request.status in COMPLETE:
            return ""
        leaves = self._leaving.get(request.request_id)
        return leaves.transfer if leaves is not None else self.arrivals.get(request.request_id, "")

    def finish(self, request: Request) -> bool | None:
        """Record the end of a request; return whether vLLM must keep its blocks, None if it was not
        to move."""
        each = self._leaving.get(request.request_id)
        arrived = self.arrivals.pop(request.request_id, None)
        if arrived is not None and request.status in COMPLETE:  # with its first token here
            self._agent.publish(Moved(arrived))
        if each is None:
            return None
        self.parked.discard(request.request_id)
        is_read = self._is_read(each)
        if is_read:
            each.freeing, each.num_ended = True, 0
            self._stops.append(request.request_id)
            self._frees.append(request.request_id)
        else:
            del self._leaving[request.request_id]
        return is_read

    def expect(self, request: Request, params: DecodeParams) -> DecodeParams:
        """Return the parameters of the choice that a request is, which may have moved here."""
        if not params.kv_tokens:
            return params
        self.arrivals[request.request_id] = params.transfer
        return params.of_choice(choice_of(request.request_id))

    def tell_moved(self, request_ids: Iterable[str]) -> None:
        """Tell routers of those requests that have moved here, and go on now."""
        for request_id in request_ids:
            if (transfer := self.arrivals.pop(request_id, None)) is not None:
                self._agent.publish(Moved(transfer))

    def stop(self, problem: str) -> None:
        """Let all outputs continue here, and move none any more."""
        self._why_not = problem
        for transfer in {each.order.transfer for each in self._leaving.values()}:
            self._drop(transfer, problem)

    def _is_read(self, each: _Leaving) -> bool:
        """Whether a shard may still send its blocks."""
        return each.is_open and each.num_ended < self._layout.shards.num_parts

    def _drop(self, transfer: TransferId, problem: str) -> None:
        """Let all choices of an output continue here; tell why, unless the router wanted it."""
        here = self._leaving.values()
        kept = [each for each in here if each.order.transfer == transfer and not each.freeing]
        for each in kept:
            name = each.request.request_id
            if self._is_read(each):
                self._stops.append(name)
            self.parked.discard(name)
            del self._leaving[name]
        if kept and problem:
            order = kept[0].order
            logger.info("request %s stays here: %s", order.request, problem)
            self._agent.publish(Moving(order.request, transfer, problem=problem))


def choice_of(request_id: str) -> int:
    """Return which choice of an output vLLM's name of a request is of (`ParentRequest`)."""
    head = request_id.partition("_")[0]
    return int(head) if head.isdecimal() else 0
