"""A request on its way through the simulated cluster, and what became of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        hidden_tokens: Whose KV travelled while later ones were computed.
        joined_step: Of the decode batch that it is in.
        known_until, known_end: What is expected of its end, until it has so many tokens.
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
    joined_step: int = 0
    known_until: int = 0
    known_end: int = 0
    num_preemptions: int = 0
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
        ttft_s: From its arrival to its first token.
        jct_s: From its arrival to its last token.
        max_itl_s: The longest time between two tokens; 0 with one token.
        preemptions: How often it lost its place in a batch.
        gap_parts: All times between two tokens, in pieces.
    """

    ask: Ask
    prefill: InstanceId
    decode: InstanceId
    ttft_s: float
    jct_s: float
    max_itl_s: float
    preemptions: int
    gap_parts: tuple[NDArray[np.float64], ...] = field(compare=False, repr=False)

    @property
    def is_split(self) -> bool:
        """Whether two instances shared it."""
        return self.prefill != self.decode

    @property
    def tpot_s(self) -> float:
        """Mean time per token behind the first one; 0 with one token."""
        return (self.jct_s - self.ttft_s) / max(1, self.ask.output_tokens - 1)


def served(job: Job, views: dict[int, NDArray[Any]]) -> Served:
    """What became of a job that is done.

    Args:
        views: Filled with what was looked at: durations of an instance's steps, by the
            identity of their array. They may not grow any more.
    """
    parts = [np.array(job.gaps)] if job.gaps else []
    for durations, start, stop in job.stretches:
        view = views.get(id(durations))
        if view is None:
            view = views[id(durations)] = np.frombuffer(durations)
        parts.append(view[start:stop])
    assert job.prefill is not None
    return Served(
        ask=job.ask,
        prefill=job.prefill,
        decode=job.decode or job.prefill,
        ttft_s=job.first_token_s - job.ask.arrival_s,
        jct_s=job.last_token_s - job.ask.arrival_s,
        max_itl_s=max((float(part.max()) for part in parts), default=0.0),
        preemptions=job.num_preemptions,
        gap_parts=tuple(parts),
    )
