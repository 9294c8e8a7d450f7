"""vLLM's waiting queue, ordered by our policies.

Owner: the engine thread. The agent's thread reads `len`.

Two lanes. *First*: requests whose prompt another instance computed, by `DecodeGate.join`, and
before them those that vLLM preempted while they decoded. *Ordered*: prompts, by `policy.order`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from vllm_tetri.engine.compat import Request, RequestQueue, RequestStatus
from vllm_tetri.engine.prediction import Predictions
from vllm_tetri.policy.admission import DecodeGate
from vllm_tetri.policy.queue import PromptQueue


class Transfers(Protocol):
    """What the transfers of requests mean to their order."""

    def goes_first(self, request: Request) -> bool: ...
    def must_wait(self, request_id: str) -> bool: ...


def may_run(request: Request) -> bool:
    """Whether an ordered prompt may start: its grammar, if any, is compiled."""
    asked = request.structured_output_request
    return asked is None or asked.grammar is not None


class AdapterSlots:
    """The LoRA adapters of running requests, of which `most` fit (None: no request has one). vLLM
    counts those with tokens in a step, which some may lack here, and asserts it in the next."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._num_known, self._taken = -1, set[int]()  # of so many running requests

    def begin_step(self) -> None:
        self._num_known = -1

    def are_taken(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether running requests have as many adapters as fit, all of them others."""
        if self._most is None or request.lora_request is None:
            return False
        if self._num_known != len(running):  # it only grows while others are admitted
            names = {each.lora_request.lora_int_id for each in running if each.lora_request}
            self._num_known, self._taken = len(running), names
        is_other = request.lora_request.lora_int_id not in self._taken
        return is_other and len(self._taken) >= self._most


class PrefillQueue(RequestQueue):
    """What vLLM's scheduler has as `waiting`. `lane` are the ordered prompts; while the
    gate is shut nothing is scheduled; prompts wait for `let_in` while `transfers`
    says that they must."""

    def __init__(self, lane: PromptQueue[Request], gate: DecodeGate, transfers: Transfers) -> None:
        self.lane, self._gate, self._transfers = lane, gate, transfers
        self.first: deque[Request] = deque()
        # Prompts that wait for their prediction, or for a prefix.
        self.held_back: dict[str, Request] = {}

    # -- vLLM's interface -------------------------------------------------------

    def add_request(self, request: Request) -> None:
        name = request.request_id
        if self._transfers.goes_first(request):
            self._gate.join(self.first, request)
        elif self._transfers.must_wait(name):
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
        if name in self.lane.started:
            self.lane.put_back(request, is_lost=request.status is RequestStatus.PREEMPTED)
        else:
            was_running = request.status is RequestStatus.PREEMPTED
            self._gate.rejoin(self.first, request, was_running=was_running)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        name = request.request_id
        is_found = self.held_back.pop(name, None) is not None or self.lane.discard(name)
        if not is_found and request in self.first:
            self.first.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        return not self._gate.is_shut and (bool(self.first) or self.lane.may_start())

    def __len__(self) -> int:
        return len(self.first) + len(self.held_back) + len(self.lane.waiting)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.first, self.held_back.values(), self.lane)

    # -- ours -------------------------------------------------------------------

    def let_in(self, predictions: Predictions, wait_s: float) -> None:
        """Let prompts start that need not wait any more, neither for their prediction nor for what
        they fetch, by arrival. If nothing else is here than such that lack one, wait for one."""
        if not self.held_back:
            predictions.exchange()
            return
        for each_s in (0.0, wait_s):
            predictions.exchange(each_s)
            waiting = {name for name in self.held_back if self._transfers.must_wait(name)}
            for name in [name for name in self.held_back if name not in waiting]:
                self.lane.add(self.held_back.pop(name))
            if len(waiting) < len(self) or not any(map(predictions.holds, waiting)):
                return

    def num_long(
        self, loading: Iterable[Request], arriving: Callable[[str], int], least: int
    ) -> int:
        """Return how many requests outside the lane have more than `least` tokens to compute: those
        of which a part is loading, and decode requests without their KV."""
        return sum(
            each.num_tokens - max(each.num_computed_tokens, arriving(each.request_id)) > least
            for each in chain(self.first, loading)
        )

    def _lane(self) -> deque[Request] | None:
        """Return the next lane, None for the ordered prompts. IndexError: nothing may start."""
        if self.first:
            return self.first
        if self.lane.may_start():
            return None
        raise IndexError("nothing to schedule")
