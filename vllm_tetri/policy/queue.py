"""What may start in a step: waiting prompts in order, and the gate of the decode batch. Pure.

Both work on requests of an engine or of the simulator, by `RequestView`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Generic, Protocol, TypeVar

from vllm_tetri.policy.admission import Admission, AdmissionPolicy
from vllm_tetri.policy.lengths import End, OutputLengths, RequestView
from vllm_tetri.policy.order import Order, PrefillQueues

# As often as loads are reported (paper section 3.4).
_SNAPSHOT_PERIOD_S = 0.1
# The expected end of an output changes slowly while it is written.
_ESTIMATE_TOKENS = 16
_UNKNOWN = (0, 0, 0)

R = TypeVar("R", bound=RequestView)
R_contra = TypeVar("R_contra", bound=RequestView, contravariant=True)


class PromptEngine(Protocol[R_contra]):
    """What a queue asks its engine about a waiting request."""

    def remaining_tokens(self, request: R_contra) -> int:
        """Prompt tokens to compute that the prefix cache does not hold."""

    def num_blocks(self, request: R_contra) -> int:
        """KV blocks of the whole prompt."""


class PromptQueue(Generic[R]):
    """Prompts that wait for their first chunk, by `policy.order`. Owner: the engine thread.

    `free_blocks` is what prompts started in this step may need of KV until they are done; None if
    the engine's own check is enough.
    """

    def __init__(self, order: Order, sched_batch: int, engine: PromptEngine[R]) -> None:
        self.prompts = PrefillQueues(order, sched_batch)
        self.free_blocks: int | None = None
        self._engine = engine
        self._waiting: dict[str, R] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[R]:
        return (self._waiting[name] for name in self.prompts)

    def get(self, request_id: str) -> R | None:
        """Return a waiting request by its id."""
        return self._waiting.get(request_id)

    def add(self, request: R) -> None:
        """Append a new prompt. What the prefix cache holds is looked up when it is ordered."""
        name = request.request_id
        self.prompts.remove(name)  # of an aborted request that the last step still knew
        self.prompts.add(name, request.num_tokens, request.priority)
        self._waiting[name] = request

    def discard(self, request_id: str) -> bool:
        """Remove a request; False if it does not wait here."""
        self.prompts.remove(request_id)
        return self._waiting.pop(request_id, None) is not None

    def head(self) -> R:
        """Return the next prompt; there must be one."""
        name = self.prompts.head()
        if name is None:
            self.order_waiting(is_chunk_open=True)
            name = self.prompts.head()
        assert name is not None, "every prompt that waits can be ordered"
        return self._waiting[name]

    def start(self) -> R:
        """Take the next prompt out: it is about to be computed."""
        request = self.head()
        if self.free_blocks is not None:
            self.free_blocks -= self._engine.num_blocks(request)
        return self._waiting.pop(self.prompts.start())

    def put_back(self, request: R, *, is_lost: bool) -> None:
        """Let a started prompt wait again, without its KV if `is_lost`."""
        name = request.request_id
        remaining_tokens = self._engine.remaining_tokens(request) if is_lost else None
        self.prompts.put_back(name, remaining_tokens)
        self._waiting[name] = request

    def may_start(self) -> bool:
        """Whether the next prompt may start in this step."""
        if not self._waiting or self.free_blocks is None:
            return bool(self._waiting)
        return 0 < self.free_blocks >= self._engine.num_blocks(self.head())

    def order_waiting(self, *, is_chunk_open: bool = False) -> None:
        """Fill up the set of prompts that are ordered together."""
        batch = self.prompts.pull(is_chunk_open=is_chunk_open)
        if batch:
            remaining = self._engine.remaining_tokens
            self.prompts.enter((name, remaining(self._waiting[name])) for name in batch)

    def share_out(
        self,
        chunk_tokens: int,
        *,
        free_blocks: int,
        block_size: int,
        was_refused: bool,
        unable: Collection[str] = (),
    ) -> dict[str, int]:
        """Share out the prompt tokens of a step under a preemptive order; see
        `PrefillQueues.plan`. Paused prompts keep their blocks, so new ones leave them enough to be
        finished.

        Args:
            free_blocks: What the engine could hand out; 0 if it may run no other request.
            was_refused: Whether the gate refused a request in the last step; it most likely
                does so again.
        """
        prompts = self.prompts
        started_blocks = sum(-(-tokens // block_size) for tokens in prompts.started_tokens())
        self.free_blocks = max(0, free_blocks - started_blocks)
        self.order_waiting()
        shares = prompts.plan(chunk_tokens, unable=unable)
        if len(prompts) and (was_refused or not self.may_start()):
            shares = prompts.plan(chunk_tokens, only_started=True)
        return shares


class GateEngine(Protocol):
    """What a gate reads of its engine, in the step that it was opened for."""

    def growing_requests(self) -> Collection[RequestView]:
        """All requests that hold blocks and grow."""


class DecodeGate:
    """Decides which waiting requests enter the decode batch of one engine, by any policy but
    greedy, which needs no gate. `end` of a predicted bucket is reserved. The first request that is
    refused shuts the gate for the step (`is_shut`): requests after it stay in the queue, and
    received KV stays in the arena. Owner: the engine thread."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        end: End,
        *,
        lengths: OutputLengths,
        block_size: int,
        total_blocks: int,
    ) -> None:
        self._admission = Admission(policy, block_size=block_size, total_blocks=total_blocks)
        self._end = end
        self._lengths = lengths
        self._block_size = block_size
        self._now = self._snapshot_s = float("-inf")
        self._engine: GateEngine | None = None  # while the step has no snapshot
        self._free_blocks = total_blocks
        self._tokens_per_step = 1
        self._missing_tokens = 0  # prompt tokens that are to be computed before
        # Per request that decodes: from how many tokens held until how many its expected end,
        # in tokens held, stays as it is.
        self._ends: dict[str, tuple[int, int, int]] = {}
        self.is_shut = self.was_shut = False

    def begin_step(
        self, engine: GateEngine, now: float, *, free_blocks: int, tokens_per_step: int
    ) -> None:
        """Open the gate, before anything is allocated in this step: of what the engine could hand
        out now, and for a step that computes at most `tokens_per_step`."""
        self.was_shut, self.is_shut = self.is_shut, False
        self._now, self._engine = now, engine
        self._free_blocks, self._tokens_per_step = free_blocks, tokens_per_step
        if now - self._snapshot_s >= _SNAPSHOT_PERIOD_S:
            self._take_snapshot(engine)

    def _take_snapshot(self, engine: GateEngine) -> None:
        """Read what runs, as it was when the step began: vLLM counts what a step computes
        only when it has scheduled all of it."""
        running, free_blocks = engine.growing_requests(), self._free_blocks
        self._engine, self._snapshot_s = None, self._now
        self._missing_tokens = 0
        self._tokens_per_step = max(1, self._tokens_per_step - len(running))
        size, snapshot, ends = self._block_size, [], self._ends
        for request in running:
            computed_tokens = request.num_computed_tokens
            since, until, end = ends.get(request.request_id, _UNKNOWN)
            if since <= computed_tokens < until:
                snapshot.append((computed_tokens, end - computed_tokens))
                continue
            tokens = max(computed_tokens, request.num_tokens - 1)
            missing_tokens = tokens - computed_tokens
            self._missing_tokens += missing_tokens
            remaining_tokens = self._remaining_tokens(request, missing_tokens > 0)
            snapshot.append((tokens, remaining_tokens))
            if missing_tokens:  # blocks that its prompt will take count as taken
                free_blocks -= -(-tokens // size) + (-computed_tokens // size)
            else:
                until = tokens + min(_ESTIMATE_TOKENS, remaining_tokens)
                ends[request.request_id] = (tokens, until, tokens + remaining_tokens)
        self._admission.begin(max(0, free_blocks), snapshot)

    def _remaining_tokens(self, request: RequestView, has_missing: bool) -> int:
        """Steps to the end of its output: a token each, and what is computed before."""
        produced_tokens = request.num_output_tokens + request.num_output_placeholders
        total = self._lengths.total_tokens(request, self._end, produced_tokens=produced_tokens)
        steps = -(-self._missing_tokens // self._tokens_per_step) if has_missing else 0
        return total - produced_tokens + steps

    def admit(self, request: RequestView, missing_tokens: int) -> bool:
        """Whether the next request may enter now. Its `missing_tokens` are neither computed nor
        loaded, except for the one from which the next token is sampled."""
        if self.is_shut:
            return False
        if self._engine is not None:
            self._take_snapshot(self._engine)
        self._missing_tokens += missing_tokens
        remaining_tokens = self._remaining_tokens(request, missing_tokens > 0)
        self.is_shut = not self._admission.admit(request.num_tokens - 1, remaining_tokens)
        return not self.is_shut

    def forget(self, request_id: str) -> None:
        """Drop a request that ended."""
        self._ends.pop(request_id, None)

    @property
    def num_known(self) -> int:
        """Requests whose end is followed (any thread)."""
        return len(self._ends)

    def record_output(self, request: RequestView) -> None:
        """Learn from an output that ended by itself: what was expected, and its length."""
        expected = self._lengths.total_tokens(request, self._end, produced_tokens=0)
        self._admission.finished(expected, request.num_output_tokens)

    @property
    def reserved_blocks(self) -> int:
        """Blocks kept for what runs, beyond what it holds, as of the last snapshot (any
        thread)."""
        return self._admission.reserved_blocks
