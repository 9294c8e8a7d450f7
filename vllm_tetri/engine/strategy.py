"""What a role is to a scheduler: the part of it that changes with a flip."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tetri.config import TetriConfig
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.types import Role


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a scheduler works in a role. Any role computes prompts and decodes, since
    direction is per request.

    Attributes:
        order: Of waiting prompts.
        is_chunked: Whether a step without decodes takes one chunk even where decodes were
            promised a pace.
        pads: Whether chunks that are not full are filled up.
    """

    order: PrefillPolicy
    is_chunked: bool
    pads: bool


def strategy_of(role: Role, config: TetriConfig) -> Strategy:
    """The strategy of a role under an instance's options."""
    return Strategy(
        order=config.prefill_policy,
        is_chunked=role is Role.PREFILL,
        pads=role is Role.PREFILL and config.pad == "on",
    )
