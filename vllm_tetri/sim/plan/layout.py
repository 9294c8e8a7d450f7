"""Layouts that a plan compares: how many instances of which role, and what runs in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_tetri.sim.cost.profiles import Profile
from vllm_tetri.sim.engine.kinds import Stock
from vllm_tetri.sim.links import Link
from vllm_tetri.sim.setting import Place, Setting, Shape, of_profile, places
from vllm_tetri.types import InstanceId, Role, StepCoefficients

_BLOCK_TOKENS = 16
_KV_BLOCKS = 4096  # of a profile that says nothing; as `vllm-tetri sim`
_ARENA_TOKENS = 16384
_ARENA_REQUESTS = 8  # that are on their way to an instance at once, of the longest
# A prefill instance that takes no time, before one whose decoding is looked at.
_INSTANT = StepCoefficients(base_s=1e-9, confidence=1.0)
_ENDLESS = 1 << 24


class System(StrEnum):
    """What serves. All but the first are this package, in the mode of that name."""

    STOCK = "stock vLLM"
    WHOLE = "whole"
    ADAPTIVE = "adaptive"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class Layout:
    """A cluster.

    Attributes:
        profile: Of every instance.
        prefill, decode, both: Instances of each role.
        tokens: Most prompt tokens of a step: the chunk, or vLLM's budget, which decodes share.
    """

    system: System
    profile: Profile
    prefill: int
    decode: int
    both: int
    tokens: int

    @property
    def num_devices(self) -> int:
        """GPUs, of all instances."""
        return (self.prefill + self.decode + self.both) * self.profile.num_devices

    @property
    def is_coupled(self) -> bool:
        """Whether every request stays on one instance."""
        return self.system in (System.STOCK, System.WHOLE)

    @property
    def has_roles(self) -> bool:
        """Whether instances are for prompts or for answers."""
        return not self.both

    @property
    def instances(self) -> str:
        """As `3P+5D`."""
        counts = {"P": self.prefill, "D": self.decode, "B": self.both}
        return "+".join(f"{count}{letter}" for letter, count in counts.items() if count)


@dataclass(frozen=True, slots=True)
class Site:
    """What all layouts have in common.

    Attributes:
        link: Between instances; None for the hand-over times that settings have by themselves.
        longest_tokens: Of the longest prompt.
    """

    link: Link | None
    longest_tokens: int
    seed: int

    def setting(self, layout: Layout) -> Setting:
        """A layout as the simulator wants it."""
        shape = self._shape(layout.profile, layout.tokens)
        if layout.system is System.STOCK:
            shape = replace(shape, engine=Stock(layout.tokens))
            return self._setting(places(both=layout.both, shape=shape), "least-in-flight", layout)
        roles = places(layout.prefill, layout.decode, layout.both, shape=shape)
        return self._setting(roles, layout.system.value, layout)

    def decode_only(self, profile: Profile, tokens: int) -> Setting:
        """One decode instance, to which prompts come computed."""
        shape = self._shape(profile, tokens)
        instant = replace(shape, cost=_INSTANT, chunk_tokens=_ENDLESS, kv_blocks=_ENDLESS)
        pair = (
            Place(InstanceId("instant"), Role.PREFILL, instant),
            Place(InstanceId("decode"), Role.DECODE, shape),
        )
        return self._setting(pair, "split", Layout(System.SPLIT, profile, 1, 1, 0, tokens))

    def _shape(self, profile: Profile, tokens: int) -> Shape:
        shape = Shape(
            kv_blocks=profile.kv_blocks(_BLOCK_TOKENS) or _KV_BLOCKS,
            block_size=_BLOCK_TOKENS,
            arena_tokens=max(_ARENA_TOKENS, _ARENA_REQUESTS * self.longest_tokens),
            chunk_tokens=tokens,
        )
        return of_profile(shape, profile)

    def _setting(self, instances: tuple[Place, ...], mode: str, layout: Layout) -> Setting:
        # A profile that does not say what KV takes keeps the simulator's own hand-over times.
        is_known = layout.profile.kv_token_bytes is not None
        return Setting(instances, mode, self.seed, link=self.link if is_known else None)


def kv_tokens(profile: Profile) -> int:
    """That an instance's pool holds in a plan."""
    return (profile.kv_blocks(_BLOCK_TOKENS) or _KV_BLOCKS) * _BLOCK_TOKENS
