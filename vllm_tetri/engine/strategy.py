"""What a role is to a scheduler: the part of it that changes with a flip."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tetri.config import TetriConfig
from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.types import Role


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a scheduler works in a role.

    Attributes:
        order: Of waiting prompts.
        is_chunked: Whether a step takes one chunk, or what the pace of decodes allows.
        pads: Whether chunks that are not full are filled up.
        is_gated: Whether decodes are admitted by prediction.
    """

    order: PrefillPolicy
    is_chunked: bool
    pads: bool
    is_gated: bool


def strategy_of(role: Role, config: TetriConfig) -> Strategy:
    """The strategy of a role under an instance's options."""
    is_prefill = role is Role.PREFILL
    return Strategy(
        # A decode instance computes prompts only as a last resort: as they come.
        order=PrefillPolicy.FCFS if role is Role.DECODE else config.prefill_policy,
        is_chunked=is_prefill,
        pads=is_prefill and config.pad == "on",
        is_gated=not is_prefill and config.decode_policy is not DecodePolicy.GREEDY,
    )
