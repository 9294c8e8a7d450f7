"""How many tokens the next step may take so that decodes keep their pace.

Sarathi-Serve's token budget (section 4.3), chosen anew for every step from
what the decodes of that step cost, and corrected by how long steps really take.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from vllm_tetri.engine.compat import Request
from vllm_tetri.policy.cost import Drift, StepCost, knee_tokens

logger = logging.getLogger(__name__)

_computed = attrgetter("num_computed_tokens")
# Without decodes nobody waits for the next token, so nearly all throughput is taken,
# but no more tokens than that needs: a step of several prompts makes the first wait.
_ALONE_PART = 0.97


class StepBudget:
    """The token budget of one engine. Owner: the engine thread.

    Args:
        cost: What steps cost.
        slo_s: Longest time between two tokens of an answer, in seconds.
        most_tokens: vLLM's own budget, never exceeded.
        tile_tokens: Steps are filled in multiples of this.
        lag_steps: Steps between scheduling one and learning that it is done:
            1 with vLLM's asynchronous scheduling, else 0.
    """

    def __init__(
        self,
        cost: StepCost,
        slo_s: float,
        most_tokens: int,
        tile_tokens: int,
        *,
        lag_steps: int = 0,
    ) -> None:
        self._cost = cost
        self._slo_s = slo_s
        self._most_tokens = most_tokens
        self._tile_tokens = tile_tokens
        knee = knee_tokens(cost.curve, aligned_to=tile_tokens, part=_ALONE_PART)
        self._alone_tokens = min(knee, most_tokens)
        self.drift = Drift()
        # Predictions of the newest steps, oldest first; 0: nothing to learn from it.
        self._predicted_s: deque[float] = deque(maxlen=1 + lag_steps)
        self._called_s = 0.0
        self._num_decodes = 0
        self._decode_context = 0
        self._prefill_context = 0
        lone_s = cost.decode_s(1, 0)
        if lone_s > slo_s:
            logger.warning(
                "--tetri-tbt-slo %g cannot be met: a step that decodes a single request takes "
                "%.4f s here; prompts get %d tokens a step",
                slo_s, lone_s, tile_tokens,
            )  # fmt: skip

    def tokens(self, running: Sequence[Request], now: float) -> int:
        """Tokens of the step about to be scheduled, decodes included.

        Args:
            running: Requests that take part, started prompts among them.
            now: A monotonic time in seconds.
        """
        if self._predicted_s and len(self._predicted_s) == self._predicted_s.maxlen:
            predicted_s = self._predicted_s[0]
            if predicted_s > 0:
                self.drift.learn(now - self._called_s, predicted_s)
        self._called_s = now
        prompts = [request for request in running if request.is_prefill_chunk]
        prompt_context = sum(map(_computed, prompts))
        self._num_decodes = len(running) - len(prompts)
        self._decode_context = sum(map(_computed, running)) - prompt_context
        # The first started prompt gets what it can take; a new one has no context.
        self._prefill_context = prompts[0].num_computed_tokens if prompts else 0
        if self._num_decodes == 0:
            return self._alone_tokens
        return self._cost.most_tokens(
            self.drift.limit_s(self._slo_s),
            self._num_decodes,
            self._decode_context,
            self._prefill_context,
            most=self._most_tokens,
            tile=self._tile_tokens,
        )

    def scheduled(self, total_tokens: int) -> None:
        """What the step of the last `tokens` takes in the end; without this nothing is learnt."""
        prefill_tokens = total_tokens - self._num_decodes
        is_known = self._num_decodes > 0 and prefill_tokens >= 0
        self._predicted_s.append(
            self._cost.step_s(
                self._num_decodes, self._decode_context, prefill_tokens, self._prefill_context
            )
            if is_known
            else 0.0
        )
