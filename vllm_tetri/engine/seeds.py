"""Seeded sampling on CPU when a prompt takes more than one step.

After a step that computes only a part of what a request needs, vLLM's V1 runner
throws the sampled token away and rewinds the request's generator by its offset.
torch's CPU generator has no offset: the attempt ends the engine. Stock vLLM
meets this only with prompts longer than its token budget; small chunks meet it
with every seeded prompt of more than one. patches/0001 is the same for upstream.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


class RewindableGenerator(torch.Generator):
    """A CPU generator that can go back to where its request's output stands.

    The sampler draws one number per step and request (vLLM:
    `TopKTopPSampler.forward_cpu`), so that is one per output token.
    """

    _state: weakref.ref[Any]

    _seed: int

    @classmethod
    def of(cls, generator: torch.Generator, state: Any) -> RewindableGenerator:
        """A generator with the same seed that stands where the output of a runner's
        request state ends."""
        made = cls(device="cpu")
        made._state = weakref.ref(state)
        made._seed = generator.initial_seed()
        made.set_offset(0)
        return made

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Forget the draw that belonged to no output token, whatever `offset` says."""
        state = self._state()
        num_draws = len(state.output_token_ids) if state is not None else 0
        self.manual_seed(self._seed)
        for _ in range(num_draws):
            torch.randint(0, 2**31, (1,), generator=self, dtype=torch.long)
