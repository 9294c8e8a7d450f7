"""What is simulated: instances, and how they work together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective
from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.dispatch import DispatchPolicy
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.sim.cost.profiles import PROFILES, Profile
from vllm_tetri.sim.cost.step_cost import StepCost
from vllm_tetri.sim.engine.kinds import TETRI, Engine, Orca, Static, Tetri, Unchunked
from vllm_tetri.sim.links import Link
from vllm_tetri.types import InstanceId, Role

if TYPE_CHECKING:
    from vllm_tetri.sim.mode.modes import Router


@dataclass(frozen=True, slots=True)
class Shape:
    """An engine.

    Attributes:
        cost: What its steps take.
        kv_blocks: Its KV pool.
        block_size: Tokens per block.
        arena_tokens: KV that may arrive or wait beside the pool.
        chunk_tokens: Most prompt tokens of a step, on top of the decodes.
        max_requests: That may be in a step.
        engine: Its kind; all but `Tetri` and `Unchunked` use of the rest only `cost`, the KV
            pool and `max_requests`.
        tbt_slo_s: Steps with decodes take no more prompt tokens than fit into this time,
            but at least `least_tokens`.
        order, sched_batch, admission: Policies (docs/policies.md).
        kv_token_bytes: KV of a token, for links; None if that is not known.
        front_s: From a request's arrival until the engine knows of it; of several shapes in a
            cluster the longest counts.

    Raises:
        ConfigError: A number makes no sense.
    """

    cost: StepCost = PROFILES["smollm2-1core"].cost
    kv_blocks: int = 4096
    block_size: int = 16
    arena_tokens: int = 16384
    chunk_tokens: int = 512
    max_requests: int = 256
    engine: Engine = TETRI
    tbt_slo_s: float | None = None
    least_tokens: int = 16
    order: PrefillPolicy = PrefillPolicy.SJF
    sched_batch: int = 16
    admission: DecodePolicy = DecodePolicy.RESERVE_DYNAMIC
    kv_token_bytes: int | None = None
    front_s: float = 0.0

    def __post_init__(self) -> None:
        counts = {
            "KV blocks": self.kv_blocks,
            "block size": self.block_size,
            "arena tokens": self.arena_tokens,
            "chunk tokens": self.chunk_tokens,
            "requests in a step": self.max_requests,
            "prompt tokens of a step": self.least_tokens,
            "sched batch": self.sched_batch,
            "KV bytes of a token": 1 if self.kv_token_bytes is None else self.kv_token_bytes,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"{name}: {value} must be at least 1")
        if self.front_s < 0:
            raise ConfigError(f"front: {self.front_s:g} s must be at least 0")
        if self.tbt_slo_s is not None and self.tbt_slo_s <= 0:
            raise ConfigError(f"TBT SLO: {self.tbt_slo_s:g} s must be above 0")
        if self.window_tokens > self.kv_blocks * self.block_size:
            raise ConfigError(
                f"a window of {self.window_tokens} tokens does not fit into a KV pool of "
                f"{self.kv_blocks} blocks of {self.block_size} tokens"
            )

    @property
    def can_hand_over(self) -> bool:
        """Whether KV may come and go."""
        return isinstance(self.engine, Tetri | Unchunked)

    @property
    def window_tokens(self) -> int:
        """Of the longest prompt and answer together."""
        if isinstance(self.engine, Orca | Static):
            return self.engine.window_tokens
        return self.kv_blocks * self.block_size


def of_profile(shape: Shape, known: Profile) -> Shape:
    """The same engine on a profile's device. Its KV pool stays: not every profile has one."""
    return replace(
        shape, cost=known.cost, kv_token_bytes=known.kv_token_bytes, front_s=known.front_s
    )


@dataclass(frozen=True, slots=True)
class Place:
    """An instance of the cluster.

    Raises:
        ConfigError: An engine without hand-over has a role.
    """

    id: InstanceId
    role: Role
    shape: Shape

    def __post_init__(self) -> None:
        if not self.shape.can_hand_over and self.role is not Role.BOTH:
            raise ConfigError(f"{self.id}: an engine without hand-over does both, not {self.role}")


@dataclass(frozen=True, slots=True)
class Setting:
    """A cluster.

    Attributes:
        mode: How requests find instances: a name in `modes.MODES`, or a factory as those.
        seed: Of probes.
        report_period_s: Between two load reports, and between two broadcasts of them.
        handover_base_s: From the end of a prompt to where its KV can be used.
        handover_token_s: On top per token whose KV did not travel while later ones were
            computed, whatever else travels. Only without a link.
        link: What KV travels over instead; see `links.Links`.
        sends_chunks: Whether KV of a chunk leaves when it is computed. If not, all of it leaves
            when the prompt is done.
        dispatch: Policy (docs/policies.md).
        objective: What clients were promised; for modes that refuse what would be late.

    Raises:
        ConfigError: There is no instance, two have one name, or a time is negative.
    """

    instances: tuple[Place, ...]
    mode: str | Callable[[Setting], Router] = "split"
    seed: int = 0
    report_period_s: float = 0.1
    handover_base_s: float = 0.008
    handover_token_s: float = 5e-6
    link: Link | None = None
    sends_chunks: bool = True
    dispatch: DispatchPolicy = DispatchPolicy.POWER_OF_TWO
    objective: Objective = NO_OBJECTIVE

    def __post_init__(self) -> None:
        if not self.instances:
            raise ConfigError("a cluster needs at least one instance")
        if len({each.id for each in self.instances}) < len(self.instances):
            raise ConfigError("two instances have the same name")
        if self.report_period_s <= 0 or min(self.handover_base_s, self.handover_token_s) < 0:
            raise ConfigError("the report period must be above 0 s, a hand-over not below")
        unknown = [
            each.id
            for each in self.instances
            if each.shape.can_hand_over and each.shape.kv_token_bytes is None
        ]
        if self.link is not None and unknown:
            raise ConfigError(
                f"a link needs the KV bytes of a token of {unknown[0]}: kv_token_bytes of its "
                "shape or profile"
            )

    def handover_s(self, shape: Shape) -> tuple[float, float]:
        """Seconds of a hand-over while nothing else travels, and on top per token whose KV
        did not travel before."""
        if self.link is None:
            return self.handover_base_s, self.handover_token_s
        token_s = (shape.kv_token_bytes or 0) / self.link.bytes_per_s
        return self.handover_base_s + self.link.latency_s, token_s


def places(
    prefill: int = 0,
    decode: int = 0,
    both: int = 0,
    *,
    shape: Shape | None = None,
) -> tuple[Place, ...]:
    """So many instances of every role, all of one shape.

    Raises:
        ConfigError: A number is negative.
    """
    shape = shape or Shape()
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: both}
    for role, count in counts.items():
        if count < 0:
            raise ConfigError(f"{count} {role} instances: must be at least 0")
    return tuple(
        Place(InstanceId(f"{role}-{number}"), role, shape)
        for role, count in counts.items()
        for number in range(count)
    )
