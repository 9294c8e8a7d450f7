"""A request in the simulated cluster, which is its own result when it has ended."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.sim.links import Transfer
from vllm_tetri.sim.workload import RequestSpec
from vllm_tetri.types import InstanceId

MAX_TOKENS = 1 << 30  # of an output: no bound
Stretch = tuple["array[float]", int, int]
"""Durations of an instance's decode steps, and the range in which a request took part."""


@dataclass(slots=True, eq=False)
class SimRequest:
    """Owner: the instance that it is on. Offers the attributes of vLLM's `Request` that
    policies read."""

    spec: RequestSpec
    request_id: str
    prefill: InstanceId  # computes its prompt
    is_split: bool = False  # whether another instance is to decode it; at the end whether one did
    decode: InstanceId | None = None  # decodes it, once chosen; at the end the last one
    target_tokens: int = 0  # to compute before its next token, while it is in no decode batch
    num_computed_tokens: int = 0  # of those; in a decode batch as of `settled_step`
    num_output_tokens: int = 0  # as well
    is_granted: bool = False  # whether the receive arena of `decode` has memory for its KV
    hidden_tokens: int = 0  # whose KV was sent while later ones were computed; without links
    sent_tokens: int = 0  # whose KV was given to the links, or need not be sent
    held_tokens: int = 0  # of the prompt, which `decode` is taken to have in its prefix cache
    arrived_tokens: int = 0  # whose KV is in the arena of `decode`
    cached_tokens: int = 0  # of the prompt, in the prefix cache when it was started first
    reused_tokens: int = 0  # as well when it was started last
    fetched_tokens: int = 0  # of the prompt, which another instance sent
    num_names: int = 0  # named blocks in use by it where its KV is
    transfer: Transfer | None = None
    waiting: SimRequest | None = None  # the prompt for which this one fetches a prefix
    joined_step: int = 0  # of the decode batch
    settled_step: int = 0
    preemptions: int = 0
    num_moves: int = 0  # to another instance while it was decoded
    here_s: float = 0.0  # since when it is decoded where it is
    begun_s: float = 0.0  # its first step; the last one that was, if its blocks were lost
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    gaps: list[float] = field(default_factory=list, repr=False)  # that are not in `stretches`
    stretches: list[Stretch] = field(default_factory=list, repr=False)

    num_output_placeholders: ClassVar[int] = 0  # steps are synchronous
    priority: ClassVar[int] = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.spec.prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.spec.prompt_tokens + self.num_output_tokens

    @property
    def max_tokens(self) -> int:
        """Bound on its output: a prefill instance samples one token, a decode instance any."""
        return 1 if self.is_split and not self.num_output_tokens else MAX_TOKENS

    @property
    def missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.target_tokens - self.num_computed_tokens

    @property
    def moved_tokens(self) -> int:
        """Tokens of the prompt whose KV is to be sent to `decode`."""
        return self.spec.prompt_tokens - self.held_tokens

    # -- the result ------------------------------------------------------------------

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.spec.arrival_s

    @property
    def jct_s(self) -> float:
        """Time to the last token."""
        return self.last_token_s - self.spec.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first one; 0 with one token."""
        return (self.jct_s - self.ttft_s) / max(1, self.spec.output_tokens - 1)

    @property
    def gap_parts(self) -> list[NDArray[np.float64]]:
        """All times between two tokens, in pieces."""
        pieces = [durations[start:stop] for durations, start, stop in self.stretches]
        return [np.array(piece) for piece in (self.gaps, *pieces) if len(piece)]
