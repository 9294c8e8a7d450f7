"""A request in the simulated cluster, and its result."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

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
    policies read.

    Attributes:
        is_split: Whether another instance is to decode it.
        prefill: The instance that computes its prompt.
        decode: The instance that decodes it, once chosen.
        target_tokens: Tokens to compute before its next token can be sampled, while it is in no
            decode batch.
        num_computed_tokens: Number of them that are computed.
        held_tokens: Tokens of KV that it held when it joined a decode batch.
        num_output_tokens: Output tokens at that time.
        is_granted: Whether the receive arena of the decode instance has memory for its KV.
        hidden_tokens: Tokens whose KV was sent while later ones were computed; without links.
        sent_tokens: Tokens whose KV was given to the links.
        joined_step: Step of the decode batch in which it joined.
        begun_s: When the first step with a part of its prompt began; the last time, if its
            blocks were lost.
        gaps: Times between tokens that are not in `stretches`.
    """

    spec: RequestSpec
    request_id: str
    is_split: bool = False
    prefill: InstanceId | None = None
    decode: InstanceId | None = None
    target_tokens: int = 0
    num_computed_tokens: int = 0
    held_tokens: int = 0
    num_output_tokens: int = 0
    is_granted: bool = False
    hidden_tokens: int = 0
    sent_tokens: int = 0
    transfer: Transfer | None = None
    joined_step: int = 0
    num_preemptions: int = 0
    begun_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)

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
    def num_output_placeholders(self) -> int:
        """Simulated steps are synchronous."""
        return 0

    @property
    def priority(self) -> int:
        """Simulated requests have no priorities."""
        return 0

    @property
    def missing_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.target_tokens - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class Served:
    """Result of a request: where it was served, and seconds from its arrival to the first step with
    a part of its prompt (`waited_s`), to its first token and to its last one.

    Attributes:
        max_itl_s: The longest time between two tokens; 0 with one token.
        gaps: Times between two tokens that are not in `stretches`.
    """

    spec: RequestSpec
    prefill: InstanceId
    decode: InstanceId
    waited_s: float
    ttft_s: float
    jct_s: float
    max_itl_s: float
    preemptions: int
    gaps: tuple[float, ...] = field(repr=False)
    stretches: tuple[Stretch, ...] = field(compare=False, repr=False)

    @property
    def gap_parts(self) -> tuple[NDArray[np.float64], ...]:
        """All times between two tokens, in pieces."""
        pieces = [durations[start:stop] for durations, start, stop in self.stretches]
        return tuple(np.array(piece) for piece in (self.gaps, *pieces) if len(piece))

    @property
    def is_split(self) -> bool:
        """Whether two instances served it."""
        return self.prefill != self.decode

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first one; 0 with one token."""
        return (self.jct_s - self.ttft_s) / max(1, self.spec.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request that was refused, and why; its client does not retry."""

    spec: RequestSpec
    reason: str


def served(request: SimRequest) -> Served:
    """Result of a request that has its last token."""
    most = [max(durations[start:stop]) for durations, start, stop in request.stretches]
    most += request.gaps
    assert request.prefill is not None
    arrival_s = request.spec.arrival_s
    return Served(
        spec=request.spec,
        prefill=request.prefill,
        decode=request.decode or request.prefill,
        waited_s=request.begun_s - arrival_s,
        ttft_s=request.first_token_s - arrival_s,
        jct_s=request.last_token_s - arrival_s,
        max_itl_s=max(most, default=0.0),
        preemptions=request.num_preemptions,
        gaps=tuple(request.gaps),
        stretches=tuple(request.stretches),
    )
