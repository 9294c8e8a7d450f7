"""The requests that an instance decodes, at a cost per step that does not depend on how many.

Every step gives each of them a token, so what each has follows from how many steps were taken
since it joined. Kept are only sums: their context, which of them end at which step, and how many
need another KV block at a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from vllm_tetri.sim.request import SimRequest


class DecodeBatch:
    """Owner: its instance. `context_tokens` is what all requests hold together."""

    def __init__(self, block_size: int) -> None:
        self.durations: array[float] = array("d")  # of steps with decodes, and pauses before them
        self.context_tokens = 0
        self.num_steps = 0
        self._block_size = block_size
        self._members: dict[SimRequest, None] = {}  # in order of arrival
        self._ends: dict[int, list[SimRequest]] = {}
        self._borders = [0] * block_size  # how many fill a block at steps ≡ index
        self._new: list[SimRequest] = []  # took part in no step yet

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[SimRequest]:
        return iter(self._members)

    @property
    def newest(self) -> SimRequest:
        """The request that joined last."""
        return next(reversed(self._members))

    @property
    def growth_blocks(self) -> int:
        """Blocks that the next step needs in addition."""
        return self._borders[self.num_steps % self._block_size]

    def join(self, request: SimRequest) -> None:
        """Give it a token with every step from the next one on."""
        request.joined_step = request.settled_step = self.num_steps
        self._members[request] = None
        self._new.append(request)
        self.context_tokens += request.num_computed_tokens
        self._ends.setdefault(self._end_of(request), []).append(request)
        self._borders[self._border_of(request)] += 1

    def put_last(self, request: SimRequest) -> None:
        """Move it to the end of the order, if it is in the batch."""
        if request in self._members:
            del self._members[request]
            self._members[request] = None

    def leave(self, request: SimRequest, now: float) -> None:
        """Remove it before its end, and write its tokens to it. `now` is the end of the newest
        step."""
        if request.joined_step < self.num_steps:
            request.last_token_s = now
        self._ends[self._end_of(request)].remove(request)
        self._drop(request)

    def step(self, seconds: float, now: float) -> list[SimRequest]:
        """End a step. Requests with their last token are removed and returned."""
        self.durations.append(seconds)
        self.num_steps += 1
        self.context_tokens += len(self._members)
        for request in self._new:
            request.gaps.append(now - request.last_token_s)
        self._new.clear()
        ended = self._ends.pop(self.num_steps, [])
        for request in ended:
            self._drop(request)
            request.last_token_s = now
        return ended

    def settle(self) -> None:
        """Write to all requests what they have now."""
        for request in self._members:
            self._settle(request)

    def _settle(self, request: SimRequest) -> None:
        steps = self.num_steps - request.settled_step
        request.num_computed_tokens += steps
        request.num_output_tokens += steps
        request.settled_step = self.num_steps

    def _end_of(self, request: SimRequest) -> int:
        return request.settled_step + request.spec.output_tokens - request.num_output_tokens

    def _border_of(self, request: SimRequest) -> int:
        return (request.settled_step - request.num_computed_tokens) % self._block_size

    def _drop(self, request: SimRequest) -> None:
        del self._members[request]
        self._settle(request)
        self._borders[self._border_of(request)] -= 1
        self.context_tokens -= request.num_computed_tokens
        steps = self.num_steps - request.joined_step
        if not steps:
            self._new.remove(request)
        elif steps > 1:  # the gap before its first token here is in `gaps`
            request.stretches.append((self.durations, request.joined_step + 1, self.num_steps))
