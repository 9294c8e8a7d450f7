"""What a cluster decides, as values that can be compared with a real cluster's: the argument
`log` of `cluster.run` gets every decision when it is made, with requests by `RequestSpec.id`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_tetri.types import InstanceId


@dataclass(frozen=True, slots=True)
class Step:
    """An instance begins its step with a number from 1: requests with the prompt tokens that are
    computed, requests that get a token, and those preempted since the step before."""

    instance: InstanceId
    number: int
    prompts: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...]
    preempted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Routed:
    """The router sent a request to the instance that computes its prompt."""

    request: int
    to: InstanceId
    is_split: bool


@dataclass(frozen=True, slots=True)
class DecodeChosen:
    """A prefill instance chose the decode instance of a request."""

    request: int
    to: InstanceId


@dataclass(frozen=True, slots=True)
class RefusedLate:
    """The router refused a request; simulated clients do not retry."""

    request: int
    reason: str
    retry_after_s: int


@dataclass(frozen=True, slots=True)
class Held:
    """KV stays at the prefill instance until the decode instance's receive arena has room."""

    request: int
    at: InstanceId


Decision = Step | Routed | RefusedLate | DecodeChosen | Held
Log = Callable[[Decision], object]
