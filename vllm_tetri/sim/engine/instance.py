"""What all simulated engines have in common: steps, a KV pool, and preemption.

An engine is idle or in a step. At the start of a step it decides what the step computes and
allocates blocks for it; at its end every request in the batch has a token more. Blocks are exact.
Requests whose blocks have names use a prefix cache, in the memory that running requests leave free;
blocks without a name are taken from what is free first. Two requests that compute equal blocks at
the same time share them as soon as both have them; vLLM keeps both copies until one ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from vllm_tetri.sim.config import ClusterConfig, InstanceConfig
from vllm_tetri.sim.engine.batch import DecodeBatch
from vllm_tetri.sim.engine.cache import PrefixCache
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import NAME_TOKENS
from vllm_tetri.types import InstanceId, InstanceLoad

Share = tuple[SimRequest, int]
"""Prompt tokens that a step computes of a request."""


class Cluster(Protocol):
    """What connects an instance with others."""

    loop: Loop
    config: ClusterConfig

    # `computed` follows every chunk of a prompt but the last, `granted` memory in an arena,
    # and `ended` the last token; `prefilled` says whether another instance decodes the rest.
    # `moving` is a request that is decoded elsewhere from now on.
    # `refused` is a prefix that is asked for and not here any more.
    def computed(self, request: SimRequest, now: float) -> None: ...
    def prefilled(self, request: SimRequest, now: float) -> bool: ...
    def granted(self, request: SimRequest, now: float) -> None: ...
    def ended(self, request: SimRequest, now: float) -> None: ...
    def refused(self, request: SimRequest, now: float) -> None: ...
    def moving(self, request: SimRequest, target: InstanceId, now: float) -> None: ...


class Instance(ABC):
    """A simulated engine."""

    def __init__(self, config: InstanceConfig, cluster: Cluster) -> None:
        self.config, self.engine, self.cluster = config, config.engine, cluster
        self.free_blocks = self.engine.kv_blocks  # those of unused names included
        self.cache = PrefixCache()
        self._name_blocks = max(1, NAME_TOKENS // self.engine.block_size)
        self.batch = DecodeBatch(self.engine.block_size)
        self.started: list[SimRequest] = []  # prompts that are computed in part
        self.busy_s = self.step_s = 0.0  # in steps so far, and in the newest one
        self.prompt_tokens_done = self.preemptions = 0
        self.has_changed = True  # since the last load report; the reader resets it
        self.is_batch_paused = False  # the next step leaves decodes out
        self._paused_s = 0.0  # since the last step with decodes
        self._is_busy = False
        self._shares: list[Share] = []

    @abstractmethod
    def submit(self, request: SimRequest, now: float) -> None:
        """Take a new request."""

    @abstractmethod
    def compose(self, now: float) -> list[Share]:
        """Decide the next step: which requests join the batch, and which prompts go on."""

    @abstractmethod
    def put_back(self, request: SimRequest) -> None:
        """Queue a preempted request, which has lost its blocks, before all that wait."""

    def load(self) -> InstanceLoad:
        """Return what the instance reports; vLLM without this package reports nothing."""
        return InstanceLoad()

    def on_end(self, request: SimRequest) -> None:  # noqa: B027
        """A response ended here."""

    def check_end(self) -> None:
        """Assert that nothing is left of any request."""
        assert self.free_blocks == self.engine.kv_blocks, f"{self.config.id} keeps blocks"

    # -- steps ---------------------------------------------------------------------

    def wake(self, now: float) -> None:
        """Begin a step if the engine is idle and has work."""
        self.has_changed = True
        if self._is_busy:
            return
        self._is_busy = True  # calls that `compose` makes may lead back to here
        self._shares = shares = self._compose_until_filled(now)
        self.cache.shrink(self.free_blocks // self._name_blocks)
        if not shares and (self.is_batch_paused or not len(self.batch)):
            self._is_busy = False
            return
        self.step_s = self.duration_s(shares)
        self.busy_s += self.step_s
        self.prompt_tokens_done += sum(num for _, num in shares)
        for request, _ in shares:
            is_first = request.num_computed_tokens == request.reused_tokens
            if is_first and not request.num_output_tokens:
                request.begun_s = now
        self.cluster.loop.at(now + self.step_s, self._end_step)

    def duration_s(self, shares: list[Share]) -> float:
        """Seconds of a step with these prompt tokens and, unless it is paused, the batch."""
        tokens, context = 0, 0.0
        for request, num in shares:
            tokens += num
            context += num * (request.num_computed_tokens + (num - 1) / 2)
        mean_context = context / tokens if tokens else 0.0
        num_decodes, decode_context = len(self.batch), self.batch.context_tokens
        if self.is_batch_paused:
            num_decodes = decode_context = 0
        return self.engine.cost.step_s(num_decodes, decode_context, tokens, mean_context)

    def _compose_until_filled(self, now: float) -> list[Share]:
        """Compose again while a step is empty only because of a preemption, or because started
        prompts were held back for one that could not start."""
        while True:
            preemptions = self.preemptions
            shares = self.compose(now)
            may_fill = self.preemptions > preemptions or self.started
            if shares or len(self.batch) or not may_fill:
                return shares

    def _end_step(self, now: float) -> None:
        if self.is_batch_paused:
            self._paused_s += self.step_s
        elif len(self.batch):
            seconds, self._paused_s = self._paused_s + self.step_s, 0.0
            for request in self.batch.step(seconds, now):
                self._end(request, now)
        for request, num in self._shares:
            request.num_computed_tokens += num
            self.remember(request)
            if request.num_computed_tokens >= request.target_tokens:
                self.started.remove(request)
                self._sample(request, now)
        self._is_busy = False
        self.wake(now)

    def _sample(self, request: SimRequest, now: float) -> None:
        """Give a request its next token after all its tokens are computed."""
        if request.num_output_tokens:
            request.gaps.append(now - request.last_token_s)
        else:
            request.first_token_s = now
        request.last_token_s = now
        request.num_output_tokens += 1
        if request.num_output_tokens == request.spec.output_tokens:
            self._end(request, now)
        elif request.num_output_tokens > 1 or not self.cluster.prefilled(request, now):
            self.batch.join(request)

    def _end(self, request: SimRequest, now: float) -> None:
        self.remember(request)
        self._give_back(request, request.num_computed_tokens)
        # The first token of a split request is no response of this instance.
        if not (request.is_split and request.prefill == self.config.id):
            self.on_end(request)
        self.cluster.ended(request, now)

    def release(self, request: SimRequest, now: float) -> None:
        """Free its blocks: another instance has its KV."""
        self._give_back(request, request.target_tokens)
        self.wake(now)

    # -- prefix cache ------------------------------------------------------------------

    def find(self, request: SimRequest) -> tuple[int, int]:
        """Return how many names a request finds in the cache, such that at least a token is left to
        compute, and how many blocks of these other requests use."""
        if not request.spec.names or not self.engine.kind.has_prefix_cache:
            return 0, 0
        self.cache.shrink(self.free_blocks // self._name_blocks)
        most = (request.target_tokens - 1) // NAME_TOKENS
        found, shared = self.cache.find(request.spec.names[:most])
        return found, shared * self._name_blocks

    def reuse(self, request: SimRequest, found: int) -> None:
        """Use what `find` found for a request. What is missing of it is computed behind that."""
        shared = self.cache.use(request.spec.names[:found])
        self.free_blocks -= (found - shared) * self._name_blocks
        request.num_names = found
        if request.missing_tokens:
            request.num_computed_tokens = request.reused_tokens = found * NAME_TOKENS
            if not request.preemptions and not request.num_output_tokens:
                request.cached_tokens = request.reused_tokens

    def remember(self, request: SimRequest) -> None:
        """Store the whole blocks that a request has here under their names."""
        names, first = request.spec.names, request.num_names
        count = min(len(names), request.num_computed_tokens // NAME_TOKENS)
        if count > first and self.engine.kind.has_prefix_cache:
            self.free_blocks += self.cache.use(names[first:count]) * self._name_blocks
            request.num_names = count

    def _give_back(self, request: SimRequest, tokens: int) -> None:
        """Free the blocks of a request that has so many tokens here."""
        shared = self.cache.let_go(request.spec.names[: request.num_names])
        self.free_blocks += self.blocks(tokens) - shared * self._name_blocks
        request.num_names = 0

    # -- blocks ----------------------------------------------------------------------

    def blocks(self, tokens: int) -> int:
        """Blocks that hold the KV of `tokens` tokens."""
        return -(-tokens // self.engine.block_size)

    def has_place(self) -> bool:
        """Whether one more request may be in a step."""
        return len(self.batch) + len(self.started) < self.engine.max_requests

    def grow(self, now: float) -> None:
        """Allocate blocks for a token of every request in the batch, preempting the newest
        requests until there are enough."""
        while self.batch.growth_blocks > self.free_blocks:
            self.preempt_newest(now)
        self.free_blocks -= self.batch.growth_blocks

    def preempt_newest(self, now: float) -> SimRequest:
        """Take the blocks of the newest request. Prompts come after decodes in vLLM's list of
        running requests, so they lose theirs first."""
        self.preemptions += 1
        if self.started:
            request = self.started.pop()
        else:
            request = self.batch.newest
            self.batch.leave(request, now - self._paused_s)
        self._give_back(request, request.num_computed_tokens)
        request.preemptions += 1
        self.put_back(request)
        return request

    def go_on(
        self, left_tokens: int, shares: list[Share], now: float, parts: dict[str, int] | None = None
    ) -> int:
        """Add started prompts to a step, at most `parts` tokens of each by request id. One without
        blocks takes those of the prompt that was started last, possibly its own. Returns the
        tokens that are left of the step."""
        for request in tuple(self.started):
            most = (parts or {}).get(request.request_id, request.missing_tokens)
            tokens = min(most, left_tokens)
            if tokens <= 0 or request not in self.started:
                continue
            taken = self.take_blocks(request, tokens)
            while not taken and self.preempt_newest(now) is not request:
                taken = self.take_blocks(request, tokens)
            if taken:
                shares.append((request, taken))
                left_tokens -= taken
        return left_tokens

    def take_blocks(self, request: SimRequest, tokens: int) -> int:
        """Allocate blocks for the next tokens of a prompt. Returns the tokens, or 0 if there are
        too few blocks."""
        computed = request.num_computed_tokens
        more_blocks = self.blocks(computed + tokens) - self.blocks(computed)
        if more_blocks > self.free_blocks:
            return 0
        self.free_blocks -= more_blocks
        return tokens
