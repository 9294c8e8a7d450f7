"""vLLM's waiting queue, ordered by our policies.

Owner: the engine thread. The agent's thread reads `len`.

Three lanes. *First*: requests with nothing to order, since another instance computed their
prompt or vLLM preempted them while they decoded. *Ordered*: prompts, by `policy.order`.
*Last*: dummy requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from vllm_tetri.engine.chunk_size import is_dummy
from vllm_tetri.engine.compat import Request, RequestQueue, RequestStatus
from vllm_tetri.policy.admission import DecodeGate
from vllm_tetri.policy.queue import PromptQueue


class PrefillQueue(RequestQueue):
    """What vLLM's scheduler has as `waiting`. `lane` are the ordered prompts; unless `is_open`
    and the gate is, only dummy requests are scheduled; with `awaits_predictions` new prompts wait
    for `let_in`, as they do while they fetch a prefix. `is_arriving` tells whether a
    request has nothing to order, `is_fetching` by id whether it fetches."""

    def __init__(
        self,
        lane: PromptQueue[Request],
        gate: DecodeGate,
        is_arriving: Callable[[Request], bool],
        is_fetching: Callable[[str], bool],
    ) -> None:
        self.lane, self._gate = lane, gate
        self._is_arriving, self._is_fetching = is_arriving, is_fetching
        self.is_open = True
        self.awaits_predictions = False
        self.first: deque[Request] = deque()
        # Prompts that wait for their prediction, or for a prefix.
        self.held_back: dict[str, Request] = {}
        self.dummies: deque[Request] = deque()

    # -- vLLM's interface -------------------------------------------------------

    def add_request(self, request: Request) -> None:
        name = request.request_id
        if is_dummy(name):
            self.dummies.append(request)
        elif self._is_arriving(request):
            self.first.append(request)
        elif self.awaits_predictions or self._is_fetching(name):
            self.held_back[name] = request
        else:
            self.lane.add(request)

    def peek_request(self) -> Request:
        lane = self._lane()
        return lane[0] if lane is not None else self.lane.head()

    def pop_request(self) -> Request:
        lane = self._lane()
        if lane is not None:
            return lane.popleft()
        return self.lane.start()

    def prepend_request(self, request: Request) -> None:
        """Put back a request that was skipped in this step, or preempted."""
        name = request.request_id
        if is_dummy(name):
            self.dummies.appendleft(request)
        elif name in self.lane.started:
            self.lane.put_back(request, is_lost=request.status is RequestStatus.PREEMPTED)
        else:
            self.first.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        name = request.request_id
        if self.held_back.pop(name, None) is None and not self.lane.discard(name):
            for lane in (self.first, self.dummies):
                if request in lane:
                    lane.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        if not self.is_open or self._gate.is_shut:
            return bool(self.dummies)
        return bool(self.first or self.dummies) or self.lane.may_start()

    def __len__(self) -> int:
        return len(self.first) + len(self.held_back) + len(self.lane) + len(self.dummies)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.first, self.held_back.values(), self.lane, self.dummies)

    # -- ours -------------------------------------------------------------------

    def let_in(self, must_wait: Callable[[str], bool]) -> None:
        """Let prompts start that need not wait any more, neither for their prediction nor for
        what they fetch, by arrival."""
        waits = self._is_fetching
        for name in [each for each in self.held_back if not (must_wait(each) or waits(each))]:
            self.lane.add(self.held_back.pop(name))

    def unable(self) -> set[str]:
        """Return ordered prompts that cannot start yet: their grammar is being compiled."""
        return {
            request.request_id
            for request in islice(self.lane, self.lane.sched_batch)
            if (asked := request.structured_output_request) is not None and asked.grammar is None
        }

    def _lane(self) -> deque[Request] | None:
        """Return the next lane, None for the ordered prompts. IndexError: nothing may start."""
        if self.is_open and self.first:
            return self.first
        if self.is_open and self.lane.may_start():
            return None
        if self.dummies:
            return self.dummies
        raise IndexError("nothing to schedule")
