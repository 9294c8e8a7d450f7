"""A request on its way through the simulated cluster, and what became of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.sim.links import Transfer
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import InstanceId

Stretch = tuple["array[float]", int, int]
"""Durations of an instance's decode steps, and from where to where it took part."""


@dataclass(slots=True, eq=False)
class Job:
    """Owner: the instance that it is on.

    Attributes:
        name: Its id as policies want it.
        is_split: Whether another instance is to decode it.
        prefill: Where its prompt is computed.
        decode: Where it is decoded, once that is known.
        target_tokens: To be computed before its next token can be sampled, when it is
            not in a decode batch.
        computed_tokens: Of those.
        held_tokens: Whose KV it holds, when it comes into a decode batch.
        produced_tokens: Of its answer, as of then.
        is_granted: Whether the decode instance has memory for its KV.
        hidden_tokens: Whose KV travelled while later ones were computed; without links.
        sent_tokens: Whose KV was given to the links.
        transfer: Of its KV, over links.
        joined_step: Of the decode batch that it is in.
        known_until, known_end: What is expected of its end, until it has so many tokens.
        begun_s: When the first step with a part of its prompt began; the last time, if it was
            lost.
        last_token_s: When its newest token came.
        gaps: Between tokens, apart from those in `stretches`.
    """

    ask: Ask
    name: str
    is_split: bool = False
    prefill: InstanceId | None = None
    decode: InstanceId | None = None
    target_tokens: int = 0
    computed_tokens: int = 0
    held_tokens: int = 0
    produced_tokens: int = 0
    is_granted: bool = False
    hidden_tokens: int = 0
    sent_tokens: int = 0
    transfer: Transfer | None = None
    joined_step: int = 0
    known_until: int = 0
    known_end: int = 0
    num_preemptions: int = 0
    begun_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def missing_tokens(self) -> int:
        """Not computed yet."""
        return self.target_tokens - self.computed_tokens


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request; times in seconds.

    Attributes:
        prefill: Instance that computed its prompt.
        decode: Instance that wrote the rest of its answer.
        waited_s: From its arrival to the beginning of the first step with a part of its prompt.
        ttft_s: From its arrival to its first token.
        jct_s: From its arrival to its last token.
        max_itl_s: The longest time between two tokens; 0 with one token.
        preemptions: How often it lost its place in a batch.
        gaps: Times between two tokens, apart from those in `stretches`.
        stretches: The others.
    """

    ask: Ask
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
        parts = [np.array(self.gaps)] if self.gaps else []
        parts += [np.array(durations[start:stop]) for durations, start, stop in self.stretches]
        return tuple(parts)

    @property
    def is_split(self) -> bool:
        """Whether two instances shared it."""
        return self.prefill != self.decode

    @property
    def tpot_s(self) -> float:
        """Mean time per token behind the first one; 0 with one token."""
        return (self.jct_s - self.ttft_s) / max(1, self.ask.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was not taken, and why; it does not come again."""

    ask: Ask
    reason: str


def served(job: Job) -> Served:
    """What became of a job that is done."""
    most = [max(job.gaps)] if job.gaps else []
    most += [max(durations[start:stop]) for durations, start, stop in job.stretches]
    assert job.prefill is not None
    return Served(
        ask=job.ask,
        prefill=job.prefill,
        decode=job.decode or job.prefill,
        waited_s=job.begun_s - job.ask.arrival_s,
        ttft_s=job.first_token_s - job.ask.arrival_s,
        jct_s=job.last_token_s - job.ask.arrival_s,
        max_itl_s=max(most, default=0.0),
        preemptions=job.num_preemptions,
        gaps=tuple(job.gaps),
        stretches=tuple(job.stretches),
    )
