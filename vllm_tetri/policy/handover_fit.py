"""How long KV takes to its decode instance, from the hand-overs of one instance. Pure."""

from __future__ import annotations

# What a transfer does not show: a second HTTP request, a copy, a first step over KV that no
# cache has seen (docs/first-token.md).
_LEG_S = 0.006
# Of what came before, at each hand-over.
_KEPT = 0.98
# Until there is more than a guess: a step until it is noticed, then shared memory.
_GUESS_S = 0.005
_GUESS_TOKEN_S = 1e-6
_GUESSES = 1.0
_USUAL_TOKENS = 500.0


class HandoverFit:
    """Learns seconds from the end of a prompt to that of its transfer as base + tokens ·
    `token_s`. What travels while the prompt is computed takes none.

    Owner: the engine thread; any thread may read.

    Attributes:
        base_s: With what the request itself needs to go on elsewhere.
        token_s: Per token of the prompt.
    """

    def __init__(self) -> None:
        self.base_s, self.token_s = _GUESS_S + _LEG_S, _GUESS_TOKEN_S
        guess_s = _GUESS_S + _USUAL_TOKENS * _GUESS_TOKEN_S
        # Weighted sums: 1, n, n·n, s, n·s; the guess at two lengths.
        self._sums = [0.0] * 5
        for tokens, seconds in ((0.0, _GUESS_S), (2 * _USUAL_TOKENS, 2 * guess_s - _GUESS_S)):
            self._add(_GUESSES, tokens, seconds)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A hand-over of so many tokens took so long."""
        self._sums = [_KEPT * each for each in self._sums]
        self._add(1.0, num_tokens, seconds)
        total, n, nn, s, ns = self._sums
        mean_n, mean_s = n / total, s / total
        variance = max(1.0, nn / total - mean_n * mean_n)
        slope = max(0.0, (ns / total - mean_n * mean_s) / variance)
        self.token_s = min(slope, mean_s / max(1.0, mean_n))
        self.base_s = mean_s - mean_n * self.token_s + _LEG_S

    def _add(self, weight: float, tokens: float, seconds: float) -> None:
        new = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [old + weight * value for old, value in zip(self._sums, new, strict=True)]
