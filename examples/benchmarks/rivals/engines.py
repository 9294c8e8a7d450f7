"""Engines of other systems.

- `Static` (FasterTransformer): a batch is computed until its longest output ends; shorter prompts
  are padded, and requests that have ended keep their blocks and are computed along.
- `Orca`: whole prompts join running decodes at every step. Every request holds blocks for the
  longest request that there may be, so few are in a step and none is preempted.
- `PromptsFirst` (vLLM of 2023): a step computes whole prompts or decodes, prompts first.
- `Cadence` (EcoServe; vLLM 0.33's `--prefill-schedule-interval`): beside decodes, prompts are in
  every k-th step only.
- `Unchunked` (DistServe, Splitwise): KV is handed over, prompts are computed whole and before
  decodes. Where both meet, a prompt without blocks takes those of the newest decodes, but not of
  any that has aged (Splitwise, section IV-B).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from operator import attrgetter

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cluster import ENGINES
from vllm_tetri.sim.config import EngineKind, InstanceConfig, Stock
from vllm_tetri.sim.engine.instance import Cluster, Share
from vllm_tetri.sim.engine.stock import StockInstance
from vllm_tetri.sim.engine.tetri import TetriInstance
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import above_0

USUAL_WINDOW_TOKENS = 2048


@dataclass(frozen=True)
class Static(EngineKind):
    """Static batching. `window_tokens` holds the longest prompt and output together."""

    window_tokens: int = USUAL_WINDOW_TOKENS
    can_hand_over = has_prefix_cache = False

    def __post_init__(self) -> None:
        above_0(window_tokens=self.window_tokens)


@dataclass(frozen=True)
class Orca(Static):
    """Iteration-level batching with reserved memory."""


@dataclass(frozen=True)
class PromptsFirst(EngineKind):
    """vLLM of 2023, with limits of a step: its prompts, and their tokens together. A longer prompt
    is computed alone."""

    most_prompts: int = 16
    most_tokens: int = 2048
    can_hand_over = has_prefix_cache = False


@dataclass(frozen=True)
class Cadence(Stock):
    """Prompts in one of `interval` steps with decodes."""

    interval: int = 2


@dataclass(frozen=True)
class Unchunked(EngineKind):
    """Whole prompts that fit into the configuration's `chunk_tokens` together, or a longer one
    alone, before decodes. For prompts a request is preempted no more often than that, nor once it
    was decoded for `ageing_s`."""

    most_preemptions: int = 2
    ageing_s: float = inf
    has_prefix_cache = has_timeout = False


class OrcaInstance(StockInstance):
    """A simulated `Orca`."""

    def __init__(self, config: InstanceConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        kind = config.engine.kind
        assert isinstance(kind, Static)
        self._window_tokens = kind.window_tokens
        self._window_blocks = super().blocks(kind.window_tokens)
        if self._window_blocks > config.engine.kv_blocks:
            raise ConfigError(
                f"a window of {self._window_tokens} tokens does not fit into a KV pool of "
                f"{config.engine.kv_blocks} blocks"
            )

    def submit(self, request: SimRequest, now: float) -> None:
        if request.spec.prompt_tokens + request.spec.output_tokens > self._window_tokens:
            raise ConfigError(
                f"a request is longer than the window of {self.config.id}: {self._window_tokens}"
            )
        super().submit(request, now)

    def blocks(self, tokens: int) -> int:
        return self._window_blocks if tokens else 0

    def compose(self, now: float) -> list[Share]:
        shares: list[Share] = []
        while self.waiting and self.has_place() and self._window_blocks <= self.free_blocks:
            self.begin(self.waiting[0].target_tokens, shares)
        return shares


class StaticInstance(OrcaInstance):
    """A simulated `Static`."""

    def __init__(self, config: InstanceConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self._num_padded = 0  # requests that have ended before their batch
        self._longest_tokens = 0  # prompt of the batch
        self._first_step = 0

    def compose(self, now: float) -> list[Share]:
        if len(self.batch):
            return []
        shares = super().compose(now)
        self._longest_tokens = max((tokens for _, tokens in shares), default=0)
        self._first_step = self.batch.num_steps
        return shares

    def duration_s(self, shares: list[Share]) -> float:
        longest = self._longest_tokens
        if shares:
            return self.engine.cost.step_s(0, 0, len(shares) * longest, (longest - 1) / 2)
        num = len(self.batch) + self._num_padded
        context = longest + self.batch.num_steps - self._first_step
        return self.engine.cost.step_s(num, num * context, 0, 0)

    def on_end(self, request: SimRequest) -> None:
        """Its blocks were freed; take them again until the batch is done."""
        window_blocks = self.blocks(request.num_computed_tokens)
        if len(self.batch) or self.started:
            self._num_padded += 1
            self.free_blocks -= window_blocks
        else:
            self.free_blocks += self._num_padded * window_blocks
            self._num_padded = 0


class CadenceInstance(StockInstance):
    """A simulated `Cadence`."""

    _since = 0  # steps with decodes and without prompts

    def compose(self, now: float) -> list[Share]:
        kind = self.engine.kind
        assert isinstance(kind, Cadence)
        self._since += 1
        if len(self.batch) and self._since < kind.interval:
            self.grow(now)
            return []
        self._since = 0
        return super().compose(now)


class PromptsFirstInstance(StockInstance):
    """A simulated `PromptsFirst`."""

    def compose(self, now: float) -> list[Share]:
        limits = self.engine.kind
        assert isinstance(limits, PromptsFirst)
        shares: list[Share] = []
        left = limits.most_tokens
        while self.waiting and len(shares) < limits.most_prompts and self.has_place():
            tokens = self.waiting[0].target_tokens
            if self.blocks(tokens) > self.free_blocks or (shares and tokens > left):
                break
            left -= self.begin(tokens, shares)
        self.is_batch_paused = bool(shares)
        if not shares:
            self.grow(now)
        return shares


class UnchunkedInstance(TetriInstance):
    """A simulated `Unchunked`."""

    def compose(self, now: float) -> list[Share]:
        self.settle(now)
        self._make_room(now)
        self.begin_step(now)
        preemptions = self.preemptions
        self.grow(now)
        shares: list[Share] = []
        if self.preemptions == preemptions:
            self.start(self.engine.chunk_tokens, shares)
            self.admit(self.engine.max_requests, shares)
        for request, tokens in shares:
            self.queue.computed(request.request_id, tokens, 0)
        return shares

    def put_back(self, request: SimRequest) -> None:
        """Keep the KV of decodes: these systems swap it out."""
        request.target_tokens = request.num_computed_tokens
        request.arrived_tokens = request.target_tokens
        self.arena_tokens += self.whole_blocks(request.target_tokens)
        self.held.appendleft(request)

    def start(self, left_tokens: int, shares: list[Share]) -> None:
        """Start whole prompts: the first one, and those after it that fit as well."""
        while self.queue:
            tokens, num = self.queue.head().missing_tokens, len(shares)
            if shares and tokens > left_tokens:
                return
            super().start(tokens, shares)
            if len(shares) == num:
                return
            left_tokens -= tokens

    def _make_room(self, now: float) -> None:
        """Preempt the newest decodes if that is enough for the next prompt."""
        if not self.queue or not self.has_place():
            return
        kind = self.engine.kind
        assert isinstance(kind, Unchunked)
        missing = self.blocks(self.queue.head().target_tokens) - self.free_blocks
        self.batch.settle()
        young = [each for each in self.batch if now - each.first_token_s < kind.ageing_s]
        if kind.ageing_s < inf:  # priority grows with age, whatever was preempted before
            young.sort(key=attrgetter("first_token_s"))
        losers = []
        while missing > 0 and young and young[-1].preemptions < kind.most_preemptions:
            losers.append(young.pop())
            missing -= self.blocks(losers[-1].num_computed_tokens)
        if missing <= 0:
            for request in losers:
                self.batch.put_last(request)
                self.preempt_newest(now)


ENGINES.update(
    {
        Static: StaticInstance,
        Orca: OrcaInstance,
        PromptsFirst: PromptsFirstInstance,
        Cadence: CadenceInstance,
        Unchunked: UnchunkedInstance,
    }
)
