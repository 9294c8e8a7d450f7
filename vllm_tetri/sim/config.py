"""What is simulated: instances, and how they work together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.lengths import End
from vllm_tetri.policy.step_tokens import StepSizes
from vllm_tetri.sim.cost.profiles import PROFILES, Profile
from vllm_tetri.sim.cost.step_cost import StepCost
from vllm_tetri.types import InstanceId, InstanceInfo, Role

MODEL = "model"
_WINDOW_TOKENS = 1 << 20


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine, here vLLM with this package; `cluster.ENGINES` names the class that
    simulates it. `can_hand_over` says whether it sends and receives KV, `has_timeout` whether a
    transfer without room is given up."""

    can_hand_over = has_prefix_cache = has_timeout = True


@dataclass(frozen=True)
class Stock(EngineKind):
    """vLLM without this package; with a small budget Sarathi-Serve. Decodes and prompts share the
    `budget_tokens` of a step, the engine's `most_tokens` by default."""

    budget_tokens: int | None = None
    can_hand_over = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine. `Stock` uses only `cost`, the KV pool, `max_requests` and `most_tokens`."""

    cost: StepCost = PROFILES["smollm2-1core"].cost
    kv_blocks: int = 4096
    block_size: int = 16
    arena_tokens: int = 16384  # size of the receive arena, for KV that arrives or waits
    chunk_tokens: int = 512  # most prompt tokens of a step, in addition to decodes
    has_sized_chunks: bool = False  # by what steps cost instead, as engines do by default
    max_requests: int = 256  # in a step
    kind: EngineKind = EngineKind()
    # Of steps, as in `policy.step_tokens.StepSizes`.
    tbt_slo_s: float | None = None
    most_tokens: int = 2048
    tile_tokens: int = 16
    order: str = "sjf"  # name of a policy (docs/policies.md, `plugins`), as is `admission`
    sched_batch: int = 16  # prompts that are ordered together
    admission: str = "reserve-dynamic"
    decode_order: str = "fcfs"  # of `admission.ENTRY_ORDERS`
    end: End = End.EXPECTED  # of a predicted length, which is reserved
    kv_token_bytes: int | None = None  # KV of a token, for links; None if unknown
    # From the arrival of a request until the engine has it; the longest of a cluster counts.
    front_s: float = 0.0

    @property
    def pool_tokens(self) -> int:
        """Size of the KV pool in tokens."""
        return self.kv_blocks * self.block_size

    @property
    def step_sizes(self) -> StepSizes:
        """What bounds the tokens of a step."""
        chunk_tokens = None if self.has_sized_chunks else self.chunk_tokens
        return StepSizes(chunk_tokens, self.tbt_slo_s, self.most_tokens, self.tile_tokens)


def of_profile(engine: EngineConfig, known: Profile) -> EngineConfig:
    """Move an engine to a profile's device, with its limits of a step, and its KV pool if the
    profile has one."""
    blocks = max(1, (known.kv_tokens or engine.pool_tokens) // engine.block_size)
    return replace(
        engine,
        cost=known.cost,
        kv_blocks=blocks,
        kv_token_bytes=known.kv_token_bytes,
        front_s=known.front_s,
        most_tokens=known.most_tokens,
        max_requests=known.max_requests,
        tile_tokens=known.tile_tokens,
    )


@dataclass(frozen=True)
class InstanceConfig:
    """An instance; an engine without hand-over does both."""

    id: InstanceId
    role: Role
    engine: EngineConfig

    @cached_property
    def info(self) -> InstanceInfo:
        """What the instance announces when it joins."""
        return InstanceInfo(
            id=self.id,
            url=f"http://{self.id}",
            role=self.role,
            models=(MODEL,),
            kv_endpoint=f"{self.id}:1" if self.engine.kind.can_hand_over else "",
            identity={"block_size": str(self.engine.block_size)},
            max_model_len=_WINDOW_TOKENS,
            block_size=self.engine.block_size,
            pid=1,
            root="sim",
        )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A cluster; raises ConfigError if it has no instance, or a link that cannot be simulated."""

    instances: tuple[InstanceConfig, ...]
    mode: str | Callable[[ClusterConfig], Any] = "split"  # a name in `modes.MODES`, or a class
    seed: int = 0
    report_period_s: float = 0.1  # between two load reports, and between two broadcasts of them
    handover_base_s: float = 0.008  # from the end of a prompt until its KV can be used
    # In addition per token whose KV was not sent while later ones were computed; without a link.
    handover_token_s: float = 5e-6
    link: float | None = None  # bytes per second; None: hand-overs do not slow each other down
    sends_chunks: bool = True  # the KV of a chunk when it is computed; else all after the prompt
    dispatch: str = "power-of-two"  # name of a policy (docs/policies.md, `plugins`)
    moves: bool = True  # running outputs move between instances that exchange KV (`policy.moves`)

    def __post_init__(self) -> None:
        if not self.instances:
            raise ConfigError("a cluster needs at least one instance")
        for each in self.instances:
            needs_bytes = self.link is not None and each.engine.kind.can_hand_over
            if needs_bytes and each.engine.kv_token_bytes is None:
                raise ConfigError(f"a link needs the kv_token_bytes of {each.id} or of its profile")


def make_instances(
    prefill: int = 0, decode: int = 0, both: int = 0, *, engine: EngineConfig | None = None
) -> tuple[InstanceConfig, ...]:
    """Return instances of every role, all with one configuration; raises ConfigError if a number
    is negative."""
    if min(prefill, decode, both) < 0:
        raise ConfigError("numbers of instances must be at least 0")
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: both}
    return tuple(
        InstanceConfig(InstanceId(f"{role}-{number}"), role, engine or EngineConfig())
        for role, count in counts.items()
        for number in range(count)
    )
