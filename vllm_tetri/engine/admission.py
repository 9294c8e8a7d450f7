"""When a request enters the decode batch: `policy.admission` before vLLM's own check.

Owner: the engine thread; what is said to be for any thread only reads.

vLLM asks its connector about every waiting request that it could take next. That is
where a request passes the gate or not. The first one that does not shuts it for the
step: whoever is behind it stays in the queue, and KV that arrived stays in the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from vllm_tetri.engine.compat import Request, RequestStatus
from vllm_tetri.policy.admission import Admission, DecodePolicy
from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.types import Prediction

# As often as loads are reported (paper section 3.4).
_PICTURE_PERIOD_S = 0.1
# What is expected of an answer changes slowly while it is written.
_LOOK_AGAIN_TOKENS = 16
_UNKNOWN = (0, 0, 0)


class Answers:
    """How long the answers of this instance's requests will be.

    Args:
        lengths: What answers of a bucket turned out to be.
        predicted_here: What is predicted of a request that began here, by its id.
        window: Longest prompt plus answer, in tokens.
    """

    def __init__(
        self,
        lengths: Lengths,
        predicted_here: Callable[[str], Prediction | None],
        window: int,
    ) -> None:
        self._lengths = lengths
        self._predicted_here = predicted_here
        self._window = window
        self._predicted: dict[str, Prediction] = {}

    @property
    def num_predicted(self) -> int:
        """Requests that came with a prediction (any thread)."""
        return len(self._predicted)

    def add(self, request_id: str, predicted: Prediction) -> None:
        """A request came with a prediction from where it began."""
        self._predicted[request_id] = predicted

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._predicted.pop(request_id, None)

    def total_tokens(self, request: Request, end: End, *, produced_tokens: int) -> int:
        """Tokens of the whole answer, given that it has so many; more than those, and no
        more than `max_tokens` and the window allow (any thread)."""
        name = request.request_id
        predicted = self._predicted.get(name) or self._predicted_here(name)
        total_tokens = self._lengths.total_tokens(predicted, produced_tokens, end)
        most_tokens = min(request.max_tokens, self._window - request.num_prompt_tokens)
        return max(produced_tokens + 1, min(total_tokens, most_tokens))


class DecodeGate:
    """The gate of one scheduler.

    Args:
        policy: Not greedy: that is having no gate.
        end: Which end of a predicted bucket is reserved.
        total_blocks: Blocks of the KV pool.

    Attributes:
        is_shut: Whether a request was refused in this step.
        was_shut: The same of the step before.
    """

    def __init__(
        self,
        policy: DecodePolicy,
        end: End,
        *,
        answers: Answers,
        block_size: int,
        total_blocks: int,
    ) -> None:
        self._admission = Admission(policy, block_size=block_size, total_blocks=total_blocks)
        self._end = end
        self._answers = answers
        self._block_size = block_size
        self._now = self._picture_s = float("-inf")
        self._list_running: Callable[[], Collection[Request]] = tuple
        self._has_picture = False
        self._free_blocks = total_blocks
        self._tokens_per_step = 1
        self._missing_tokens = 0  # prompt tokens that others must compute first
        # Of a request that decodes: from how many tokens held to how many its end, in
        # tokens held, is taken to be the same.
        self._ends: dict[str, tuple[int, int, int]] = {}
        self.is_shut = self.was_shut = False

    def begin_step(
        self,
        now: float,
        *,
        running: Callable[[], Collection[Request]],
        free_blocks: int,
        tokens_per_step: int,
    ) -> None:
        """Open the gate, before anything is allocated in this step.

        Args:
            running: Gives all that hold blocks and grow.
            free_blocks: What vLLM could hand out now.
            tokens_per_step: Most that a step computes.
        """
        self.was_shut, self.is_shut = self.is_shut, False
        self._now, self._list_running = now, running
        self._free_blocks, self._tokens_per_step = free_blocks, tokens_per_step
        self._has_picture = False
        if now - self._picture_s >= _PICTURE_PERIOD_S:
            self._take_picture()

    def _take_picture(self) -> None:
        """What runs, as it was when the step began: vLLM counts what a step computes when
        it has scheduled all of it."""
        running, free_blocks = self._list_running(), self._free_blocks
        self._has_picture, self._picture_s = True, self._now
        self._missing_tokens = 0
        self._tokens_per_step = max(1, self._tokens_per_step - len(running))
        size, picture, ends = self._block_size, [], self._ends
        for request in running:
            computed_tokens = request.num_computed_tokens
            since, until, end = ends.get(request.request_id, _UNKNOWN)
            if since <= computed_tokens < until:
                picture.append((computed_tokens, end - computed_tokens))
                continue
            tokens = max(computed_tokens, request.num_tokens - 1)
            missing_tokens = tokens - computed_tokens
            self._missing_tokens += missing_tokens
            remaining_tokens = self._remaining_tokens(request, missing_tokens > 0)
            picture.append((tokens, remaining_tokens))
            if missing_tokens:  # room that its prompt will take counts as taken
                free_blocks -= -(-tokens // size) + (-computed_tokens // size)
            else:
                until = tokens + min(_LOOK_AGAIN_TOKENS, remaining_tokens)
                ends[request.request_id] = (tokens, until, tokens + remaining_tokens)
        self._admission.begin(max(0, free_blocks), picture)

    def _remaining_tokens(self, request: Request, has_missing: bool) -> int:
        """Steps from now to the end of its answer: a token each, and what is computed
        before the next one."""
        produced_tokens = request.num_output_tokens + request.num_output_placeholders
        total = self._answers.total_tokens(request, self._end, produced_tokens=produced_tokens)
        steps = -(-self._missing_tokens // self._tokens_per_step) if has_missing else 0
        return total - produced_tokens + steps

    def lets_in(self, request: Request, missing_tokens: int) -> bool:
        """Whether the next request may enter now.

        Args:
            missing_tokens: What is neither computed nor loaded of it, the token that the
                next one is sampled from excepted.
        """
        if self.is_shut:
            return False
        if not self._has_picture:
            self._take_picture()
        self._missing_tokens += missing_tokens
        remaining_tokens = self._remaining_tokens(request, missing_tokens > 0)
        if not self._admission.admit(request.num_tokens - 1, remaining_tokens):
            self.is_shut = True
            return False
        return True

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._ends.pop(request_id, None)

    @property
    def num_known(self) -> int:
        """Requests whose end is followed (any thread)."""
        return len(self._ends)

    def ended(self, request: Request) -> None:
        """An answer ended: what was expected of it at its start, and what it came to."""
        if request.status not in _BY_ITSELF or request.num_output_tokens < 1:
            return
        expected = self._answers.total_tokens(request, self._end, produced_tokens=0)
        self._admission.finished(expected, request.num_output_tokens)

    @property
    def reserved_blocks(self) -> int:
        """Blocks kept for what runs, beyond what it holds, at the last picture (any
        thread)."""
        return self._admission.reserved_blocks


_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
