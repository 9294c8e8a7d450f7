"""Text Generation Inference: prompts enter when enough of them wait.

A step computes whole prompts or decodes. While requests are decoded, prompts enter only if as many
can enter together as `waiting_served_ratio` times the decodes, rounded down, or if none has entered
for `max_waiting_tokens` steps; after them comes a step of decodes. Every request holds memory for
its longest output, so none is preempted. Numbers are the defaults of its launcher; its router alone
takes a ratio of 1.2. Each request enters with the longest output that a client may ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cluster import ENGINES
from vllm_tetri.sim.config import EngineKind, InstanceConfig
from vllm_tetri.sim.engine.instance import Cluster, Share
from vllm_tetri.sim.engine.stock import StockInstance
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import above_0


@dataclass(frozen=True)
class Tgi(EngineKind):
    """Limits of a step. A longer prompt is computed alone."""

    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    prefill_tokens: int = 4096
    longest_output: int = 512
    can_hand_over = has_prefix_cache = False

    def __post_init__(self) -> None:
        above_0(prefill_tokens=self.prefill_tokens, longest_output=self.longest_output)
        if self.waiting_served_ratio < 0 or self.max_waiting_tokens < 1:
            raise ConfigError("a ratio below 0, or prompts that wait for less than a step")


class TgiInstance(StockInstance):
    """A simulated `Tgi`."""

    def __init__(self, config: InstanceConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        assert isinstance(config.engine.kind, Tgi)
        self._limits = config.engine.kind
        self._unreserved_blocks = config.engine.kv_blocks
        self._waited_steps = 0  # since prompts have entered, that step included
        self._is_decodes_turn = False

    def submit(self, request: SimRequest, now: float) -> None:
        spec, limits = request.spec, self._limits
        if spec.output_tokens > limits.longest_output:
            raise ConfigError(f"an output of more than {limits.longest_output} tokens")
        if self._needed(request) > self.engine.kv_blocks:
            raise ConfigError(f"a prompt and {limits.longest_output} tokens do not fit")
        super().submit(request, now)

    def on_end(self, request: SimRequest) -> None:
        self._unreserved_blocks += self._needed(request)

    def compose(self, now: float) -> list[Share]:
        shares: list[Share] = []
        num_decodes = len(self.batch)
        for request in [*islice(self.waiting, self._entering(num_decodes))]:
            self._unreserved_blocks -= self._needed(request)
            self.begin(request.target_tokens, shares)
        self.is_batch_paused = bool(shares)
        self._waited_steps = 1 if shares else self._waited_steps + 1
        self._is_decodes_turn = bool(shares and num_decodes)
        if not shares:
            self.grow(now)
        return shares

    def _needed(self, request: SimRequest) -> int:
        return self.blocks(request.spec.prompt_tokens + self._limits.longest_output)

    def _entering(self, num_decodes: int) -> int:
        """Return how many prompts enter with the next step."""
        limits, num, tokens, free = self._limits, 0, 0, self._unreserved_blocks
        if self._is_decodes_turn and num_decodes:
            return 0
        is_due = self._waited_steps >= limits.max_waiting_tokens
        least = 0 if is_due else int(num_decodes * limits.waiting_served_ratio)
        for request in self.waiting:
            tokens += request.target_tokens
            free -= self._needed(request)
            is_full = num > 0 and tokens > limits.prefill_tokens
            if free < 0 or is_full or num_decodes + num >= self.engine.max_requests:
                break
            num += 1
        return num if num >= least else 0


ENGINES[Tgi] = TgiInstance
