"""vLLM's waiting queue with our order behind it.

Owner: the engine thread. `len` is read by the agent thread.

Three lanes. *First*: requests with nothing to order: KV that another instance
computed, and whatever vLLM preempted while it was decoding. *Ordered*: prompts,
by `policy.order`. *Last*: padding. The instance's own measurements pass before
all of them while the queue is closed to the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from vllm_tetri.engine.compat import Request, RequestQueue, RequestStatus
from vllm_tetri.engine.own import is_own, is_padding
from vllm_tetri.policy.order import PrefillPolicy, PrefillQueues


class PrefillQueue(RequestQueue):
    """What vLLM's scheduler sees as `waiting`.

    Args:
        policy: Order of prompts.
        sched_batch: Prompts that are ordered together.
        remaining_of: Tokens of a request that its prefix-cache hit leaves to compute.
        blocks_of: KV blocks of its whole prompt.
        is_arriving: Whether a request's KV comes from another instance.
        is_shut: Whether nobody but own requests may be taken any more in this step.

    Attributes:
        is_open: Whether anything but own requests may be scheduled.
        awaits_predictions: Whether new prompts stay aside until `let_in`.
        room_blocks: KV blocks that the ordered prompts started in this step may need
            until they are done; None means that vLLM's own check is enough.
    """

    def __init__(
        self,
        policy: PrefillPolicy,
        sched_batch: int,
        *,
        remaining_of: Callable[[Request], int],
        blocks_of: Callable[[Request], int],
        is_arriving: Callable[[Request], bool],
        is_shut: Callable[[], bool],
    ) -> None:
        self.prompts = PrefillQueues(policy, sched_batch)
        self.is_open = True
        self.awaits_predictions = False
        self.room_blocks: int | None = None
        self._remaining_of = remaining_of
        self._blocks_of = blocks_of
        self._is_arriving = is_arriving
        self._is_shut = is_shut
        self._own: deque[Request] = deque()
        self._first: deque[Request] = deque()
        self._unpredicted: dict[str, Request] = {}
        self._ordered: dict[str, Request] = {}
        self._last: deque[Request] = deque()
        self._skipped: set[str] = set()  # ordered ones that vLLM could not start

    # -- vLLM's interface -------------------------------------------------------

    def add_request(self, request: Request) -> None:
        name = request.request_id
        if is_own(name):
            (self._last if is_padding(name) else self._own).append(request)
        elif self._is_arriving(request):
            self._first.append(request)
        elif self.awaits_predictions:
            self._unpredicted[name] = request
        else:
            self._enter(request)

    def _enter(self, request: Request) -> None:
        # What the prefix cache holds by then is looked up when it is ordered.
        name = request.request_id
        self.prompts.remove(name)  # of an aborted one that the last step still knew
        self.prompts.add(name, request.num_tokens, request.priority)
        self._ordered[name] = request

    def peek_request(self) -> Request:
        lane = self._lane()
        return lane[0] if lane is not None else self._next()

    def pop_request(self) -> Request:
        lane = self._lane()
        if lane is not None:
            return lane.popleft()
        request = self._next()
        if self.room_blocks is not None:
            self.room_blocks -= self._blocks_of(request)
        return self._ordered.pop(self.prompts.start())

    def prepend_request(self, request: Request) -> None:
        """Skipped in this step, or preempted."""
        name = request.request_id
        if is_own(name):
            self._own.appendleft(request)
        elif self.prompts.is_started(name):
            is_lost = request.status is RequestStatus.PREEMPTED
            self.prompts.put_back(name, self._remaining_of(request) if is_lost else None)
            self._ordered[name] = request
            if not is_lost:
                self._skipped.add(name)
        else:
            self._first.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        self.prompts.remove(request.request_id)
        if self._unpredicted.pop(request.request_id, None) is not None:
            return
        if self._ordered.pop(request.request_id, None) is None:
            for lane in (self._own, self._first, self._last):
                if request in lane:
                    lane.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        if not self.is_open:
            return bool(self._own)
        if self._is_shut():
            return bool(self._own or self._last)
        return bool(self._own or self._first or self._last) or self.may_start()

    def __len__(self) -> int:
        lanes = (self._own, self._first, self._unpredicted, self._ordered, self._last)
        return sum(map(len, lanes))

    def __iter__(self) -> Iterator[Request]:
        ordered = (self._ordered[name] for name in self.prompts)
        return chain(self._own, self._first, self._unpredicted.values(), ordered, self._last)

    # -- ours -------------------------------------------------------------------

    @property
    def num_unpredicted(self) -> int:
        """Prompts that wait for their prediction."""
        return len(self._unpredicted)

    @property
    def num_first(self) -> int:
        """Requests with nothing to order."""
        return len(self._first)

    def count_first(self, is_ready: Callable[[Request], bool]) -> int:
        """How many of them are ready."""
        return sum(map(is_ready, self._first))

    def let_in(self, holds: Callable[[str], bool]) -> None:
        """Prompts that are not held any more may start, by arrival."""
        for name in [name for name in self._unpredicted if not holds(name)]:
            self._enter(self._unpredicted.pop(name))

    @property
    def num_own(self) -> int:
        """Own requests among those that wait."""
        return len(self._own) + len(self._last)

    def _refill(self, *, is_chunk_open: bool) -> None:
        """Order what may be ordered now."""
        batch = self.prompts.pull(is_chunk_open=is_chunk_open)
        if batch:
            self.prompts.enter((name, self._remaining_of(self._ordered[name])) for name in batch)

    def order_again(self) -> None:
        """Fill up what is ordered, between two steps."""
        self._refill(is_chunk_open=False)

    def may_start(self) -> bool:
        """Whether the next ordered prompt may start in this step."""
        if not self._ordered or self.room_blocks is None:
            return bool(self._ordered)
        return self.room_blocks > 0 and self._blocks_of(self._next()) <= self.room_blocks

    def unable(self) -> set[str]:
        """Ordered prompts that cannot start yet: their grammar is being compiled."""
        self._skipped = {
            name
            for name in self._skipped
            if (request := self._ordered.get(name)) is not None and _waits_for_grammar(request)
        }
        return self._skipped

    def forget(self, request_id: str) -> None:
        """A request ended while it was running."""
        self.prompts.remove(request_id)

    def _lane(self) -> deque[Request] | None:
        """The lane that is next, None for the ordered prompts.

        Raises:
            IndexError: Nothing waits that may be scheduled.
        """
        if self._own:
            return self._own
        if self.is_open:
            if self._first:
                return self._first
            if self.may_start():
                return None
            if self._last:
                return self._last
        raise IndexError("nothing to schedule")

    def _next(self) -> Request:
        name = self.prompts.head()
        if name is None:
            self._refill(is_chunk_open=True)
            name = self.prompts.head()
        assert name is not None, "every prompt that waits can be ordered"
        return self._ordered[name]


def _waits_for_grammar(request: Request) -> bool:
    asked = request.structured_output_request
    return (
        request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        and asked is not None
        and asked.grammar is None
    )
