"""What is simulated: instances, and how they work together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from vllm_tetri.errors import ConfigError
from vllm_tetri.plugins import load_policy
from vllm_tetri.policy.adaptive import NO_OBJECTIVE, Objective
from vllm_tetri.sim.cost.profiles import PROFILES, Profile
from vllm_tetri.sim.cost.step_cost import StepCost
from vllm_tetri.sim.links import Link
from vllm_tetri.sim.snapshot import SimRouter
from vllm_tetri.types import InstanceId, InstanceInfo, Role

STOCK_BUDGET_TOKENS = 2048
_WINDOW_TOKENS = 1 << 20


class EngineKind(Protocol):
    """A kind of engine; `cluster.ENGINES` names the class that simulates it."""

    @property
    def can_hand_over(self) -> bool:
        """Whether the engine sends and receives KV."""

    @property
    def window_tokens(self) -> int | None:
        """Longest prompt and output together, if less than the KV pool."""


@dataclass(frozen=True, slots=True)
class Tetri:
    """vLLM with this package. Its numbers and policies are those of the `EngineConfig`."""

    can_hand_over = True
    window_tokens = None


@dataclass(frozen=True, slots=True)
class Stock:
    """vLLM without this package; with a small budget Sarathi-Serve. Decodes and prompts share the
    `budget_tokens` of a step."""

    budget_tokens: int = STOCK_BUDGET_TOKENS
    can_hand_over = False
    window_tokens = None

    def __post_init__(self) -> None:
        at_least_1("token budget of a step", self.budget_tokens)


TETRI = Tetri()


def at_least_1(what: str, value: int) -> None:
    """Raise ConfigError if a count is below 1."""
    if value < 1:
        raise ConfigError(f"{what}: {value} must be at least 1")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine.

    Attributes:
        cost: Duration of its steps.
        kv_blocks: Size of its KV pool.
        block_size: Tokens per block.
        arena_tokens: Size of the receive arena, for KV that arrives or waits.
        chunk_tokens: Most prompt tokens of a step, in addition to decodes.
        max_requests: Most requests in a step.
        kind: What it runs; `Stock` uses only `cost`, the KV pool and `max_requests`.
        tbt_slo_s: Steps with decodes take no more prompt tokens than fit into this time, but at
            least `least_tokens`.
        order, admission: Names of policies (docs/policies.md, `plugins`).
        sched_batch: Prompts that are ordered together.
        kv_token_bytes: KV of a token, for links; None if unknown.
        front_s: From the arrival of a request until the engine has it. In a cluster of several
            configurations the longest counts.

    Raises:
        ConfigError: A number is out of range.
    """

    cost: StepCost = PROFILES["smollm2-1core"].cost
    kv_blocks: int = 4096
    block_size: int = 16
    arena_tokens: int = 16384
    chunk_tokens: int = 512
    max_requests: int = 256
    kind: EngineKind = TETRI
    tbt_slo_s: float | None = None
    least_tokens: int = 16
    order: str = "sjf"
    sched_batch: int = 16
    admission: str = "reserve-dynamic"
    kv_token_bytes: int | None = None
    front_s: float = 0.0

    def __post_init__(self) -> None:
        for what, count in (
            ("KV blocks", self.kv_blocks),
            ("block size", self.block_size),
            ("arena tokens", self.arena_tokens),
            ("chunk tokens", self.chunk_tokens),
            ("requests in a step", self.max_requests),
            ("prompt tokens of a step", self.least_tokens),
            ("sched batch", self.sched_batch),
            ("KV bytes of a token", 1 if self.kv_token_bytes is None else self.kv_token_bytes),
        ):
            at_least_1(what, count)
        load_policy("order", self.order)
        load_policy("admission", self.admission)
        if self.front_s < 0:
            raise ConfigError(f"front: {self.front_s:g} s must be at least 0")
        if self.tbt_slo_s is not None and self.tbt_slo_s <= 0:
            raise ConfigError(f"TBT SLO: {self.tbt_slo_s:g} s must be above 0")
        if self.window_tokens > self.pool_tokens:
            raise ConfigError(
                f"a window of {self.window_tokens} tokens does not fit into a KV pool of "
                f"{self.kv_blocks} blocks of {self.block_size} tokens"
            )

    @property
    def pool_tokens(self) -> int:
        """Size of the KV pool in tokens."""
        return self.kv_blocks * self.block_size

    @property
    def window_tokens(self) -> int:
        """Longest prompt and output together."""
        return self.kind.window_tokens or self.pool_tokens


def of_profile(engine: EngineConfig, known: Profile) -> EngineConfig:
    """Move an engine to a profile's device, with its KV pool if the profile has one."""
    return replace(
        engine,
        cost=known.cost,
        kv_blocks=known.kv_blocks(engine.block_size) or engine.kv_blocks,
        kv_token_bytes=known.kv_token_bytes,
        front_s=known.front_s,
    )


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """An instance; raises ConfigError if an engine without hand-over has the role prefill or
    decode."""

    id: InstanceId
    role: Role
    engine: EngineConfig

    def __post_init__(self) -> None:
        if not self.engine.kind.can_hand_over and self.role is not Role.BOTH:
            raise ConfigError(f"{self.id}: an engine without hand-over does both, not {self.role}")

    def info(self, model: str) -> InstanceInfo:
        """Return what the instance announces when it joins."""
        return InstanceInfo(
            id=self.id,
            url=f"http://{self.id}",
            role=self.role,
            models=(model,),
            kv_endpoint=f"{self.id}:1" if self.engine.kind.can_hand_over else "",
            identity={"block_size": str(self.engine.block_size)},
            max_model_len=_WINDOW_TOKENS,
            block_size=self.engine.block_size,
            pid=1,
            version="sim",
        )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A cluster.

    Attributes:
        mode: How requests find instances: a name in `modes.MODES`, or a class like those.
        report_period_s: Between two load reports, and between two broadcasts of them.
        handover_base_s: From the end of a prompt until its KV can be used.
        handover_token_s: In addition per token whose KV was not sent while later tokens were
            computed. Ignored with a link.
        link: What KV is sent over; see `links.Links`. None: hand-overs take the two times above
            and do not slow each other down.
        sends_chunks: Whether the KV of a chunk is sent as soon as it is computed. If not, all KV
            is sent when the prompt is done.
        dispatch: Name of a policy (docs/policies.md, `plugins`).
        objective: SLOs, for modes that refuse requests that would be late.

    Raises:
        ConfigError: There is no instance, two have one name, or a time is out of range.
    """

    instances: tuple[InstanceConfig, ...]
    mode: str | Callable[[ClusterConfig], SimRouter] = "split"
    seed: int = 0
    report_period_s: float = 0.1
    handover_base_s: float = 0.008
    handover_token_s: float = 5e-6
    link: Link | None = None
    sends_chunks: bool = True
    dispatch: str = "power-of-two"
    objective: Objective = NO_OBJECTIVE

    def __post_init__(self) -> None:
        load_policy("dispatch", self.dispatch)
        if not self.instances:
            raise ConfigError("a cluster needs at least one instance")
        if len({each.id for each in self.instances}) < len(self.instances):
            raise ConfigError("two instances have the same name")
        if self.report_period_s <= 0 or min(self.handover_base_s, self.handover_token_s) < 0:
            raise ConfigError("the report period must be above 0 s, a hand-over not below")
        for each in self.instances:
            needs_bytes = self.link is not None and each.engine.kind.can_hand_over
            if needs_bytes and each.engine.kv_token_bytes is None:
                raise ConfigError(
                    f"a link needs the KV bytes of a token of {each.id}: set kv_token_bytes in "
                    "its configuration or profile"
                )

    def handover_s(self, engine: EngineConfig) -> tuple[float, float]:
        """Seconds of a hand-over while nothing else is sent, and in addition per token whose KV
        was not sent before."""
        if self.link is None:
            return self.handover_base_s, self.handover_token_s
        token_s = (engine.kv_token_bytes or 0) / self.link.bytes_per_s
        return self.handover_base_s + self.link.latency_s, token_s


def make_instances(
    prefill: int = 0, decode: int = 0, both: int = 0, *, engine: EngineConfig | None = None
) -> tuple[InstanceConfig, ...]:
    """Return instances of every role, all with one configuration; raises ConfigError if a number
    is negative."""
    engine = engine or EngineConfig()
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: both}
    for role, count in counts.items():
        if count < 0:
            raise ConfigError(f"{count} {role} instances: must be at least 0")
    return tuple(
        InstanceConfig(InstanceId(f"{role}-{number}"), role, engine)
        for role, count in counts.items()
        for number in range(count)
    )
