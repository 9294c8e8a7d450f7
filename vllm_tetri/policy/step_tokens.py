"""How many prompt tokens a step computes, by what steps cost (`policy.step_cost`). Pure.

- **Alone**, the knee: the fewest that a device computes nine tenths as fast as any number (paper
  section 3.3.3), n with n · p = 9 · F, where a step takes F without prompt tokens and F + n · p
  with n of them.
- **Beside decodes**, the slack: as many as are worth the pause. W prompts wait, D outputs go on. Of
  Q tokens that wait, each chunk of n costs F, so all W wait W·Q·F/n longer than for one chunk, and
  D outputs pause Q/n times. A pause of s seconds is held to cost s²/τ, so that one of τ costs as
  much as a prompt that waits as long, and shorter ones less; τ is `CALM_STEPS` of the longest steps
  that vLLM's own budget allows. The sum is least at n·p = √(F² + W·F·τ/D): with few prompts beside
  many decodes a step takes twice as long as without them, with many prompts beside few decodes up
  to as long as vLLM's own. The prompt that goes first is cut into equal parts of about that size
  (`equal_part`): a short rest would cost it a step, and spare the outputs nothing.
- **Within a bound** on the time of a step (Sarathi-Serve's token budget, section 4.3, chosen anew
  for every step), as many as fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from vllm_tetri.types import StepCoefficients

KNEE_PART = 0.9
# Simulated between a half and 16: less makes first tokens late, more makes gaps long. With 3,
# p99 of gaps is 0.33 to 1.0 of that with vLLM's own budget, and first tokens take 1.0 to 1.12 of
# the time (examples/benchmarks/chunks.py).
CALM_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What bounds the tokens of an engine's steps.

    Attributes:
        chunk_tokens: Prompt tokens of every step; None: by what steps cost.
        slo_s: Longest time between two tokens of an output, if there is such an objective: with
            it, `chunk_tokens` counts without decodes only.
        most_tokens: The most of a step, prompts and decodes: vLLM's own budget.
        tile_tokens: A device computes whole tiles of these (Sarathi-Serve: 257 tokens instead of
            256 cost it 32 %), so steps that are sized have whole ones.
    """

    chunk_tokens: int | None
    slo_s: float | None
    most_tokens: int
    tile_tokens: int

    @property
    def is_fixed(self) -> bool:
        """Whether every step takes the given chunk, whatever it costs."""
        return self.chunk_tokens is not None and self.slo_s is None

    def alone(self, cost: StepCoefficients) -> int:
        """Return the prompt tokens of a step without decodes."""
        return self._whole(0, knee_tokens(cost)) if self.chunk_tokens is None else self.chunk_tokens

    def beside(
        self,
        cost: StepCoefficients,
        *,
        num_decodes: int,
        decode_tokens: int,
        decode_context: int,
        num_prompts: int,
        prompt_context: int,
        first_tokens: int = 0,
        slower: float = 1.0,
    ) -> int:
        """Return all tokens of a step with decodes and prompts. `first_tokens` are left of the
        prompt that goes first, as far as it is known. A step may take `slower` times its cost, and
        still keeps the objective."""
        if self.slo_s is not None:
            left_s = self.slo_s / slower - cost.step_s(num_decodes, decode_context, 0, 0)
            return self._whole(decode_tokens, bounded_tokens(cost, left_s, prompt_context))
        if self.chunk_tokens is not None:
            return decode_tokens + self.chunk_tokens
        longest_s = cost.step_s(0, 0, self.most_tokens, self.most_tokens / 2)
        prompt_tokens = slack_tokens(
            cost,
            calm_s=CALM_STEPS * longest_s,
            num_decodes=num_decodes,
            decode_context=decode_context,
            num_prompts=num_prompts,
            prompt_context=prompt_context,
        )
        room_tokens = max(1, self.most_tokens - decode_tokens)
        part_tokens = equal_part(min(prompt_tokens, room_tokens), first_tokens, room_tokens)
        return self._whole(decode_tokens, part_tokens + self.tile_tokens - 1)  # round up

    def next_chunk(
        self,
        cost: StepCoefficients,
        *,
        num_decodes: int,
        decode_context: int,
        num_prompts: int,
        slower: float = 1.0,
    ) -> int:
        """Return the prompt tokens of a step after one more prompt has come to `num_prompts`, as
        far as decodes have no drafts."""
        if not num_decodes:
            return self.alone(cost)
        tokens = self.beside(
            cost,
            num_decodes=num_decodes,
            decode_tokens=num_decodes,
            decode_context=decode_context,
            num_prompts=num_prompts + 1,
            prompt_context=0,
            slower=slower,
        )
        return max(1, min(tokens, self.most_tokens) - num_decodes)

    def _whole(self, decode_tokens: int, prompt_tokens: int) -> int:
        """Round to whole tiles. Prompts must go on, so one tile of them fits however few are asked
        for; only `most_tokens` is never exceeded."""
        tile, most = self.tile_tokens, self.most_tokens
        least = -(-(decode_tokens + tile) // tile) * tile
        wanted = min(decode_tokens + prompt_tokens, most) // tile * tile
        return min(max(least, wanted), most)


def knee_tokens(cost: StepCoefficients) -> int:
    """Return the prompt tokens of a step without decodes."""
    fixed_s = cost.base_s * KNEE_PART / (1 - KNEE_PART)
    return bounded_tokens(cost, fixed_s, 0)


def slack_tokens(
    cost: StepCoefficients,
    *,
    calm_s: float,
    num_decodes: int,
    decode_context: int,
    num_prompts: int,
    prompt_context: int,
) -> int:
    """Return how many prompt tokens are worth the pause of `num_decodes` outputs, with
    `num_prompts` that wait or are started; the next token follows `prompt_context` others. A pause
    of `calm_s` costs as much as a prompt that waits as long."""
    fixed_s = cost.step_s(num_decodes, decode_context, 0, 0)
    spent_s = sqrt(fixed_s * (fixed_s + calm_s * num_prompts / num_decodes))
    return bounded_tokens(cost, spent_s, prompt_context)


def equal_part(chunk_tokens: int, prompt_tokens: int, most_tokens: int) -> int:
    """Return the tokens of each of the equal chunks of about `chunk_tokens`, `most_tokens` at most,
    that a prompt is cut into; `chunk_tokens` for a prompt that is no longer. With x = prompt /
    chunk, k chunks wait and pause like k + x²/k, which is least for the first k with
    k · (k + 1) ≥ x²."""
    if prompt_tokens <= chunk_tokens or chunk_tokens <= 0:
        return chunk_tokens
    ratio = prompt_tokens / chunk_tokens
    parts = ceil((sqrt(1 + 4 * ratio * ratio) - 1) / 2)
    return -(-prompt_tokens // max(parts, -(-prompt_tokens // most_tokens)))


def bounded_tokens(cost: StepCoefficients, left_s: float, prompt_context: int) -> int:
    """Return how many prompt tokens after `prompt_context` others fit into `left_s`: the
    root of n · (prompt_s + (context + n / 2) · context_s) = left_s."""
    if left_s <= 0:
        return 0
    linear = max(cost.prompt_s + prompt_context * cost.context_s, 1e-9)
    root = linear * linear + 2 * cost.context_s * left_s
    return int(2 * left_s / (linear + sqrt(root)))
