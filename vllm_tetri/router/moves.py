"""Running outputs go on at another instance: the router's part.

The decode request is opened while the instance that has the output still writes. Its response
begins with all output so far. When that is what the client has received and more follows, the
task that relays the output is interrupted and goes on with the other response; closing the first
one ends the request there. Before that, the first instance can go on at any time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Set
from typing import NamedTuple

from vllm_tetri.control.monitor import Monitor
from vllm_tetri.handover import DecodeParams, choice_name
from vllm_tetri.messages import CancelTransfer, Move, Moved, Moving, Poll, TransferLost
from vllm_tetri.policy.mirrors import LongOutput
from vllm_tetri.policy.moves import (
    LEAVES,
    MoveOrder,
    RunningOutput,
    Source,
    choose_moves,
    usual_left,
    why_leave,
)
from vllm_tetri.policy.route import Phase
from vllm_tetri.router.errors import HttpError, InstanceAtLimit, InstanceFailed, Refusal
from vllm_tetri.router.liveness import repeat
from vllm_tetri.router.placement import Placer
from vllm_tetri.router.request import ApiRequest
from vllm_tetri.router.response import HttpResponse, close_result
from vllm_tetri.router.resume import ContinuationFailed, ContinuationMismatch, NotResumable
from vllm_tetri.router.retry import Scheduler
from vllm_tetri.router.stream import Output
from vllm_tetri.router.table import Entry, Movable, RequestTable
from vllm_tetri.types import InstanceId, InstanceInfo, InstanceState, RequestId, TransferId

_PATIENCE_S = 10.0  # after the order; then a move is given up
_RETRY_S = 0.5  # after a move that came to nothing
_CAUGHT_UP_S = 0.002  # between two looks whether the client has all that was written
_LOOK_S = 0.05  # between two looks at the cluster, unless something happens
_STREAMING = (Phase.DECODING, Phase.SERVING)
_WRITING = (Phase.HANDING_OVER, Phase.SERVING)  # a response that comes as a whole

_log = logging.getLogger(__name__)
Send = Callable[[InstanceInfo, bytes], Awaitable[HttpResponse]]


class Successor(NamedTuple):
    """Where an output goes on, and the response to its request there, which may still be due."""

    instance: InstanceInfo
    response: Awaitable[HttpResponse]


class _Move:
    """One move under way."""

    def __init__(
        self, transfer: TransferId, source: InstanceId, target: InstanceInfo, reason: str
    ) -> None:
        self.transfer, self.source, self.target, self.reason = transfer, source, target, reason
        self.begin_s = time.monotonic()
        self.task: asyncio.Task[None] | None = None  # opens the decode request
        self.num_due = 1  # choices of which the target has not told that they go on
        self.goes_on = asyncio.get_running_loop().create_future()  # done: all of them do
        self.timer: asyncio.TimerHandle | None = None


class Mover:
    """Moves the output of one request, one move at a time. Owned by the event loop; the task that
    serves the request begins and ends it."""

    def __init__(
        self, request: ApiRequest, entry: Entry, output: Output, scheduler: Scheduler, send: Send
    ) -> None:
        self._request, self._entry, self._output = request, entry, output
        self._scheduler, self._send = scheduler, send
        self._handler: asyncio.Task[object] | None = None  # serves the request
        self._move: _Move | None = None
        self._successor: Successor | None = None
        self._rescue: asyncio.Future[None] | None = None  # the handler waits for a successor
        self.num_moves = 0
        self._rest_until_s = time.monotonic()

    def begin(self) -> None:
        """Let outputs of the calling task's request move."""
        self._handler = asyncio.current_task()
        self._entry.mover = self

    @property
    def is_moving(self) -> bool:
        """Whether it is on its way."""
        return self._move is not None or self._successor is not None

    def movable(self, usual_left_tokens: float, now: float) -> RunningOutput | None:
        """Return what decides about a move; None if the output cannot move."""
        request, entry = self._request, self._entry
        # Nothing proves that links show the same media once more.
        is_able = request.is_splittable and not request.has_links
        if not is_able or self.is_moving or now < self._rest_until_s:
            return None
        if request.is_streamed:
            if entry.phase not in _STREAMING or not (self._output.is_recorded and entry.generated):
                return None
        elif entry.phase not in _WRITING or request.wants_logprobs:
            return None  # instances do not keep log probabilities of what is not streamed
        expected = max((entry.predicted or 0) - entry.generated, usual_left_tokens)
        if request.max_tokens is not None:
            most = request.max_tokens - entry.generated
            expected = most if request.ignores_eos else min(expected, most)
        context = (entry.prompt_tokens or request.approx_tokens) + entry.generated
        here_s = now - entry.marks[-1].at_s
        return RunningOutput(entry.id, context, expected, self.num_moves, here_s, request.model)

    def order(self, target: InstanceInfo, reason: str) -> TransferId | None:
        """Order the instance that has the output to move it; return by which transfer, None if it
        cannot be reached."""
        transfer, source = self._entry.new_transfer(), self._entry.worker
        order = Move(
            self._entry.id, transfer, target.id, target.kv_endpoint, self._request.num_choices
        )
        if self.is_moving or not self._scheduler.monitor.send(source, order):
            return None
        self._move = move = _Move(transfer, source, target, reason)
        loop = asyncio.get_running_loop()
        move.timer = loop.call_later(_PATIENCE_S, self._end, move, "late")
        return transfer

    def growing(self) -> LongOutput | None:
        """Return what decides about a copy; None if no instance could go on with one."""
        request, entry = self._request, self._entry
        if self.is_moving or not (request.may_fetch and self._output.knows_tokens()):
            return None
        prompt_tokens = entry.prompt_tokens or request.approx_tokens
        return LongOutput(
            entry.id, request.model, entry.worker, entry.generated, prompt_tokens, entry.mirror
        )

    def copied(self) -> ApiRequest:
        """Return the request whose KV is that of prompt and output so far, if it is `growing`."""
        return self._request.after(self._output.token_ids())

    def on_message(self, message: Moving | Moved) -> None:
        """Take what an instance tells of the move under way."""
        move = self._move
        if move is None or message.transfer != move.transfer:
            return
        if isinstance(message, Moved):
            move.num_due -= 1
            if move.num_due <= 0 and not move.goes_on.done():
                move.goes_on.set_result(None)
        elif message.problem:
            _log.info("request %s stays at %s: %s", self._entry.id, move.source, message.problem)
            self._end(move, "refused" if move.task is None else "failed")
        elif move.task is None:
            move.num_due = len(message.kv_tokens)
            move.task = asyncio.create_task(self._open(move, message))

    async def _open(self, move: _Move, message: Moving) -> None:
        params = DecodeParams(
            move.transfer,
            message.digest,
            predicted=message.predicted,
            is_early=True,
            prefill=move.source,
            kv_tokens=message.kv_tokens,
        )
        body = self._request.decode_body(params, message.prompt_token_ids, move.target)
        sending = asyncio.ensure_future(self._send(move.target, body))
        is_over = False
        try:
            if self._request.is_streamed:
                await self._until_proved(move.target, await sending, message)
            else:
                await asyncio.wait((move.goes_on, sending), return_when=asyncio.FIRST_COMPLETED)
                if sending.done() and not await sending.result().is_good():
                    raise InstanceFailed(move.target.id, "it refused or aborted the request")
            is_over = True
            self._take_over(move, sending)
        except (
            InstanceFailed,
            InstanceAtLimit,
            HttpError,
            NotResumable,
            ContinuationMismatch,
            ContinuationFailed,
        ) as error:
            _log.info(
                "request %s does not move from %s to %s: %s",
                self._entry.id, move.source, move.target.id, error,
            )  # fmt: skip
            self._end(move, "failed")
        finally:
            if not is_over:
                sending.add_done_callback(close_result)
                sending.cancel()

    async def _until_proved(
        self, target: InstanceInfo, response: HttpResponse, message: Moving
    ) -> None:
        """Wait until a stream begins with all that the client has received, and goes on."""
        if response.status != 200:
            raise InstanceFailed(target.id, f"HTTP {response.status}")
        # The other instance does not know the log probabilities of prior output, so the client has
        # to have them all.
        num_prior = message.kv_tokens[0] + 1 - len(message.prompt_token_ids)
        num_due = num_prior if self._request.wants_logprobs else 0
        while seen := await response.peek():
            while num_due > self._output.num_received():
                await asyncio.sleep(_CAUGHT_UP_S)
            if self._output.is_continued_by(seen):
                return
        raise InstanceFailed(target.id, "its stream ended too early")

    def _take_over(self, move: _Move, response: asyncio.Future[HttpResponse]) -> None:
        """Let the handler go on with the other response."""
        self._forget(move)
        handler = self._handler
        if handler is None or handler.done() or self._entry.is_over:
            response.add_done_callback(close_result)
            return
        self._successor = Successor(move.target, response)
        self.num_moves += 1
        metrics, seconds = self._scheduler.metrics, time.monotonic() - move.begin_s
        metrics.record_move(self._entry.id, move.target.id, move.reason, "moved")
        self._entry.reason += f"; moved to {move.target.id} ({move.reason})"
        metrics.move_seconds.labels("whole").observe(seconds)
        _log.info(
            "request %s moved from %s to %s (%s)",
            self._entry.id, move.source, move.target.id, move.reason,
        )  # fmt: skip
        if self._rescue is not None:
            self._rescue.set_result(None)
        else:
            handler.cancel()

    def take(self) -> Successor | None:
        """Return where the output goes on now, if it moved, and count the request there; the caller
        has the response."""
        successor, self._successor = self._successor, None
        if successor is not None:
            self._entry.send_aggregated(successor.instance.id)
            self._output.record_move()
        return successor

    def was_interrupted(self) -> bool:
        """Whether the handler was cancelled for a successor, and for nothing else."""
        handler = asyncio.current_task()
        assert handler is not None
        return self._successor is not None and not handler.uncancel()

    async def rescue(self) -> bool:
        """Wait for the successor of an output whose instance failed while it moved; False if there
        will be none."""
        move = self._move
        if move is None:
            return self._successor is not None
        if move.task is None:
            self._end(move, "failed")  # else it could still interrupt what the handler does now
            return False
        self._rescue = asyncio.get_running_loop().create_future()
        for index in range(self._request.num_choices):  # the target takes what is complete
            name = choice_name(move.transfer, index)
            self._scheduler.monitor.send(move.target.id, TransferLost(name))
        try:
            await asyncio.wait((move.task, self._rescue), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._rescue = None
        return self._successor is not None

    def close(self) -> None:
        """End a move with its request. Idempotent."""
        self._entry.mover = None
        if self._move is not None:
            self._end(self._move, "ended")
        if self._successor is not None:
            asyncio.ensure_future(self._successor.response).add_done_callback(close_result)

    def _end(self, move: _Move, outcome: str) -> None:
        """Let the output stay where it is."""
        if self._move is not move:
            return
        self._forget(move)
        self._rest_until_s = time.monotonic() + _RETRY_S
        metrics, request = self._scheduler.metrics, self._entry.id
        metrics.record_move(request, move.target.id, move.reason, outcome)
        for instance in (move.source, move.target.id):
            self._scheduler.monitor.send(instance, CancelTransfer(move.transfer))
        if move.task is not None and move.task is not asyncio.current_task():
            move.task.cancel()

    def avoid(self, leaving: Set[InstanceId]) -> None:
        """Let an output stay that is on its way to an instance which others leave."""
        if self._move is not None and self._move.target.id in leaving:
            self._end(self._move, "failed")

    def _forget(self, move: _Move) -> None:
        self._move = None
        if move.timer is not None:
            move.timer.cancel()


class _UnderWay(NamedTuple):
    """An output that moves."""

    mover: Movable
    output: RunningOutput
    order: MoveOrder


class Moves:
    """Looks for outputs that should move, and orders it. Build it on a running event loop."""

    def __init__(
        self, monitor: Monitor, table: RequestTable, placer: Placer, *, is_on: bool
    ) -> None:
        self._monitor, self._table, self._placer = monitor, table, placer
        self.any_role = False  # whether any instance may take an output
        self._under_way: dict[TransferId, _UnderWay] = {}
        watch = repeat("look for moves", self._look, _LOOK_S, is_on=is_on, due=table.changed)
        self._task = asyncio.get_running_loop().create_task(watch)

    async def close(self) -> None:
        """Order no more moves. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def on_message(self, message: Moving | Moved) -> None:
        """Pass on what an instance tells of a move."""
        if (moving := self._under_way.get(message.transfer)) is not None:
            moving.mover.on_message(message)

    def order(self, request: RequestId, target: InstanceId) -> InstanceId:
        """Order the output of a request to move, and return where it is now. Raises `Refusal` 404:
        there is no such request or instance; 409: it cannot move there, now or at all."""
        entry, one = self._table.get(request), self._monitor.view_of(target)
        if entry is None or one is None:
            what = f"request {request!r}" if entry is None else f"instance {target!r}"
            raise Refusal(404, f"there is no {what}")
        here = self._monitor.view_of(entry.worker) if entry.worker else None
        mover, source = entry.mover, entry.worker
        output = mover.movable(0.0, time.monotonic()) if mover is not None else None
        if mover is None or here is None or output is None:
            raise Refusal(409, f"{request} has no running output that can move now")
        if source == target:
            raise Refusal(409, f"{request} is at {target} already")
        if one.state is not InstanceState.READY:
            raise Refusal(409, f"{target} takes no outputs: it is {one.state}")
        if one.info.alone or one.info.identity != here.info.identity:
            raise Refusal(409, f"{source} and {target} exchange no KV")
        if not self._begin(mover, output, one.info, MoveOrder(request, source, target, "order")):
            raise Refusal(409, f"{source} cannot be reached")
        return source

    def _begin(
        self, mover: Movable, output: RunningOutput, target: InstanceInfo, order: MoveOrder
    ) -> bool:
        self._forget_ended()
        if (transfer := mover.order(target, order.reason)) is None:
            return False
        self._under_way[transfer] = _UnderWay(mover, output, order)
        return True

    def _forget_ended(self) -> None:
        self._under_way = {n: each for n, each in self._under_way.items() if each.mover.is_moving}

    def _look(self) -> None:
        if not (len(self._table) or self._table.leaving):
            return
        table = self._placer.table(now := time.monotonic())
        reasons = why_leave(table)
        leaving = self._table.leaving = {n for n, why in reasons.items() if why in LEAVES.values()}
        for name in leaving:
            if not self._table.num_reaching(name):  # it need not wait for the next period's poll
                self._monitor.send(name, Poll(table.view.router, table.view.seq, in_flight=0))
        for each in self._under_way.values():
            each.mover.avoid(leaving)
        self._forget_ended()
        if not reasons:
            return
        views = {each.info.id: each for each in table.view.instances}
        able: dict[RequestId, tuple[Movable, RunningOutput]] = {}
        outputs: dict[InstanceId, list[RunningOutput]] = {name: [] for name in reasons}
        for entry in self._table:
            if (mover := entry.mover) is None or entry.worker not in reasons:
                continue
            if (output := mover.movable(usual_left(views[entry.worker]), now)) is not None:
                able[entry.id] = mover, output
                outputs[entry.worker].append(output)
        on_way = Counter(each.order.source for each in self._under_way.values())
        sources = [Source(views[n], why, outputs[n], on_way[n]) for n, why in reasons.items()]
        coming = [(each.order.target, each.output) for each in self._under_way.values()]
        for order in choose_moves(sources, table, coming=coming, any_role=self.any_role):
            self._begin(*able[order.request], views[order.target].info, order)
