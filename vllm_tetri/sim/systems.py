"""Systems that papers compare, each on the same instances: how its engines compute, and how
requests find them.

A new one is a function and a line in `SYSTEMS`. What is left out of each is in
docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective
from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.dispatch import DispatchPolicy
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.sim.engine.kinds import (
    USUAL_WINDOW_TOKENS,
    Engine,
    Orca,
    PromptsFirst,
    Static,
    Stock,
    Unchunked,
)
from vllm_tetri.sim.setting import Setting, Shape, places
from vllm_tetri.types import Role

SARATHI_BUDGET_TOKENS = 512  # Sarathi-Serve's under a strict SLO, section 5
SPLITWISE_BATCH_TOKENS = 2048
# Mooncake: chunks of more than 1000 tokens saturate the device. Those of its decode instances
# are for prompts that disturb nobody; the paper names no number.
MOONCAKE_CHUNK_TOKENS, MOONCAKE_INLINE_TOKENS = 1024, 128
_USUAL = Shape()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a system is made of.

    Attributes:
        instances: All of them.
        shape: Steps, memory and chunk of each; what is particular to a system, it sets.
        prefill: How many of them are for prompts, where these are apart; None for half.
        window_tokens: Prompt and answer of the longest request, for engines that reserve
            memory for it.
        objective: What clients were promised, for systems that refuse.
        seed: Of probes.

    Raises:
        ConfigError: There is no instance, or none is left for one of the phases.
    """

    instances: int
    shape: Shape = _USUAL
    prefill: int | None = None
    window_tokens: int = USUAL_WINDOW_TOKENS
    objective: Objective = NO_OBJECTIVE
    seed: int = 0

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ConfigError(f"{self.instances} instances: must be at least 1")
        if self.prefill is not None and not 1 <= self.prefill < self.instances:
            raise ConfigError(
                f"{self.prefill} of {self.instances} instances for prompts: must be at least 1, "
                "and leave one for answers"
            )

    def divided(self) -> tuple[int, int]:
        """Instances for prompts, and for answers.

        Raises:
            ConfigError: There is only one.
        """
        if self.instances < 2:
            raise ConfigError("a system with prefill and decode instances needs at least 2")
        prefill = self.instances // 2 if self.prefill is None else self.prefill
        return prefill, self.instances - prefill


class System(NamedTuple):
    """A row of a comparison: what it is in a few words, and how it is built.

    `setting` raises ConfigError if it cannot be built of these parts.
    """

    words: str
    setting: Callable[[Parts], Setting]


def _alike(parts: Parts, engine: Engine) -> Setting:
    """Engines that share nothing; each request goes where fewest are."""
    shape = replace(parts.shape, engine=engine, tbt_slo_s=None)
    return Setting(places(both=parts.instances, shape=shape), "least-in-flight", parts.seed)


def _static(parts: Parts) -> Setting:
    return _alike(parts, Static(parts.window_tokens))


def _orca(parts: Parts) -> Setting:
    return _alike(parts, Orca(parts.window_tokens))


def _vllm_2023(parts: Parts) -> Setting:
    return _alike(parts, PromptsFirst())


def _vllm(parts: Parts) -> Setting:
    return _alike(parts, Stock())


def _sarathi(parts: Parts) -> Setting:
    return _alike(parts, Stock(SARATHI_BUDGET_TOKENS))


def _unchunked(parts: Parts, chunk_tokens: int) -> Shape:
    return replace(
        parts.shape,
        engine=Unchunked(),
        chunk_tokens=chunk_tokens,
        order=PrefillPolicy.FCFS,
        admission=DecodePolicy.GREEDY,
        tbt_slo_s=None,
    )


def _distserve(parts: Parts) -> Setting:
    shape = _unchunked(parts, parts.shape.chunk_tokens)
    return Setting(
        places(*parts.divided(), shape=shape),
        "split",
        parts.seed,
        dispatch=DispatchPolicy.LEAST_LOADED,
    )


def _splitwise(parts: Parts) -> Setting:
    shape = _unchunked(parts, SPLITWISE_BATCH_TOKENS)
    return Setting(places(*parts.divided(), shape=shape), "splitwise", parts.seed)


def _mooncake(parts: Parts) -> Setting:
    shape = replace(
        parts.shape,
        chunk_tokens=MOONCAKE_CHUNK_TOKENS,
        order=PrefillPolicy.FCFS,
        admission=DecodePolicy.GREEDY,
        tbt_slo_s=None,
    )
    inline = replace(shape, chunk_tokens=MOONCAKE_INLINE_TOKENS)
    instances = tuple(
        replace(place, shape=inline) if place.role is Role.DECODE else place
        for place in places(*parts.divided(), shape=shape)
    )
    return Setting(instances, "mooncake", parts.seed, objective=parts.objective)


def _tetri(parts: Parts) -> Setting:
    shape = replace(
        parts.shape,
        order=PrefillPolicy.SJF,
        sched_batch=16,
        admission=DecodePolicy.RESERVE_DYNAMIC,
    )
    return Setting(
        places(*parts.divided(), shape=shape),
        "split",
        parts.seed,
        dispatch=DispatchPolicy.POWER_OF_TWO,
    )


def _adaptive(parts: Parts) -> Setting:
    return Setting(places(both=parts.instances, shape=parts.shape), "adaptive", parts.seed)


def _whole(parts: Parts) -> Setting:
    return Setting(places(both=parts.instances, shape=parts.shape), "whole", parts.seed)


SYSTEMS: dict[str, System] = {
    "static": System("one batch after the other, padded (FasterTransformer)", _static),
    "orca": System("whole prompts join decodes, memory for the longest request", _orca),
    "vllm-2023": System("steps of whole prompts before steps of decodes", _vllm_2023),
    "vllm": System("today's, 2048 tokens a step", _vllm),
    "sarathi": System("the same with 512 (Sarathi-Serve)", _sarathi),
    "distserve": System("whole prompts here, answers there", _distserve),
    "splitwise": System("the same, and a mixed pool for what is too much", _splitwise),
    "mooncake": System("refuses what would be late, short prompts beside answers", _mooncake),
    "tetri": System("TetriInfer: chunks, shortest first, answers by expected length", _tetri),
    "adaptive": System("split or whole, whatever costs less", _adaptive),
    "whole": System("one instance for each request, where least is waited", _whole),
}
APART = ("distserve", "splitwise", "mooncake", "tetri")


def system_of(name: str, parts: Parts) -> Setting:
    """A named system, built of these parts.

    Raises:
        ConfigError: There is none of that name, or it cannot be built of them.
    """
    if name not in SYSTEMS:
        raise ConfigError(f"no system {name!r}; there are {', '.join(SYSTEMS)}")
    return SYSTEMS[name].setting(parts)
