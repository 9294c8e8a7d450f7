"""What a cluster decides, as values that can be compared with a real one's.

`cluster.run(..., log=decisions.append)` tells of every decision when it is made. Requests are
named by `Ask.id`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_tetri.types import InstanceId


@dataclass(frozen=True, slots=True)
class Step:
    """An instance put a step together.

    Attributes:
        number: From 1, of the steps in which it computes something.
        prompts: Requests of whose prompts it computes tokens, and how many, in order; with
            them those that compute a lost answer again.
        decodes: Requests that get a token otherwise, in the order of its batch.
        preempted: Requests that lost their blocks since the step before.
    """

    instance: InstanceId
    number: int
    prompts: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...]
    preempted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Routed:
    """The router sent a request to an instance, which computes its prompt."""

    request: int
    to: InstanceId
    is_split: bool


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A prefill instance chose where the answer to a request is written."""

    request: int
    to: InstanceId


@dataclass(frozen=True, slots=True)
class Refusal:
    """The router did not take a request: it would have come late, or nobody has room for it.

    Attributes:
        reason: In words.
        retry_after_s: Whole seconds after which its client may come again; none does here.
    """

    request: int
    reason: str
    retry_after_s: int


@dataclass(frozen=True, slots=True)
class Held:
    """The arena of an instance was full when a request's KV was to come there: the KV stays
    at the prefill instance until others have left."""

    request: int
    at: InstanceId


Decision = Step | Routed | Refusal | Dispatched | Held
Log = Callable[[Decision], object]
