"""What an engine's steps cost, fitted to the steps that it takes. Pure.

A step takes base + requests · each + their context · token + prompt tokens · (prompt +
context · tokens before): `StepCoefficients`. They are the least squares over recent steps,
by relative error, so that short steps count as much as long ones. Steps with and without
prompts are remembered apart: an hour of decoding does not make an engine forget what a
prompt costs. What the steps do not tell, such as the price of context while all requests
have about the same, is filled from a prior of usual proportions, scaled to this engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_tetri.types import StepCoefficients

Vector = list[float]

# Weight of what came before, at each step of the kind.
_KEPT_DECODES = 0.998
_KEPT_PROMPTS = 0.98
_KEPT_CHUNK = 0.9
# A small model on a CPU core: base 13 ms, 0.6 ms a request or prompt token. Only the
# proportions count, and only until steps tell otherwise.
_PRIOR: Vector = [0.013, 0.0006, 2.9e-6, 0.00055, 3.5e-7]
GUESS = StepCoefficients(*_PRIOR)
# The prior weighs as much as so many steps, of relative error.
_PRIOR_STEPS = 0.05
_CONFIDENT_STEPS = 30.0
# A step that takes so many times what it should says nothing of the engine.
_OUTLIER = 4.0
_LASTING_STEPS = 8
# After so many steps the fit is renewed at once, so that a first odd one does not last.
_EARLY = frozenset((1, 2, 4, 8, 16))
_ERROR_GAIN = 1 / 32


class StepFit:
    """Learns what steps cost. Owner: the engine thread; any thread may read what was
    published at the last step.

    Attributes:
        prompt_tokens_done: Prompt tokens computed so far.
        answer_tokens_done: Decodes computed so far.
        cost: The fit, all 0 before the first step; renewed by `refresh`.
    """

    def __init__(self) -> None:
        self.prompt_tokens_done = self.answer_tokens_done = 0
        self.cost = StepCoefficients()
        self._decodes = _Sums(_KEPT_DECODES)
        self._prompts = _Sums(_KEPT_PROMPTS)
        self._error = 0.0
        self._num_steps = self._num_outliers = 0
        self._decode_context = self._prompt_context = self._chunk_tokens = 0.0

    def learn(
        self,
        num_decodes: int,
        decode_context: int,
        prompt_tokens: int,
        prompt_context: float,
        seconds: float,
    ) -> None:
        """A step took so long.

        Args:
            decode_context: Tokens of context of all that decode, together.
            prompt_context: Mean tokens before a prompt token, computed earlier or with it.
        """
        self.prompt_tokens_done += prompt_tokens
        self.answer_tokens_done += num_decodes
        if seconds <= 0 or not (num_decodes or prompt_tokens):
            return
        expected_s = self.cost.step_s(num_decodes, decode_context, prompt_tokens, prompt_context)
        unit_s = seconds
        if expected_s > 0:
            # In this unit a step counts as much if it is slower than expected as if quicker.
            unit_s = expected_s
            ratio = self._plausible(seconds / expected_s)
            self._error += (abs(ratio - 1) / max(ratio, 1) - self._error) * _ERROR_GAIN
            seconds = ratio * expected_s
        features = [
            1.0, num_decodes, decode_context, prompt_tokens, prompt_tokens * prompt_context,
        ]  # fmt: skip
        (self._prompts if prompt_tokens else self._decodes).add(features, seconds, unit_s)
        self._num_steps += 1
        if num_decodes:
            self._decode_context += (decode_context / num_decodes - self._decode_context) / 64
        if prompt_tokens:
            kept = _KEPT_CHUNK if self._chunk_tokens else 0.0
            self._chunk_tokens = kept * self._chunk_tokens + (1 - kept) * prompt_tokens
            self._prompt_context = kept * self._prompt_context + (1 - kept) * prompt_context
        if self._num_steps in _EARLY:
            self.refresh()

    def _plausible(self, ratio: float) -> float:
        """Of a step's seconds to the expected ones. One that is far off is bounded; when
        nothing else comes, the engine has changed and everything is learnt anew."""
        if 1 / _OUTLIER <= ratio <= _OUTLIER:
            self._num_outliers = 0
            return ratio
        self._num_outliers += 1
        if self._num_outliers < _LASTING_STEPS:
            return min(max(ratio, 1 / _OUTLIER), _OUTLIER)
        self._num_outliers = self._num_steps = 0
        self._decodes, self._prompts = _Sums(_KEPT_DECODES), _Sums(_KEPT_PROMPTS)
        self._error = 0.0
        return ratio

    def refresh(self) -> StepCoefficients:
        """Fit anew to what was learnt; microseconds, so a few times a second."""
        count = self._decodes.count + self._prompts.count
        if count:
            known = count / (count + _CONFIDENT_STEPS)
            confidence = known * max(0.0, 1 - self._error)
            solved = _fit(self._decodes, self._prompts)
            self.cost = replace(StepCoefficients(*solved), confidence=confidence)
        return self.cost

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of usual steps with prompts, less what decodes beside them take; 0 before one."""
        tokens = self._chunk_tokens
        seconds = self.cost.step_s(0, 0, tokens, self._prompt_context)
        return tokens / seconds if seconds else 0.0  # not fitted yet

    @property
    def decode_base_s(self) -> float:
        """Of a step that decodes; 0 before the first."""
        return self.cost.base_s if self._decode_context else 0.0

    @property
    def decode_request_s(self) -> float:
        """What each request of usual context adds to that."""
        if not self._decode_context:
            return 0.0
        return self.cost.request_s + self._decode_context * self.cost.token_s


class _Sums:
    """Weighted sums of products of features, and of features and times, over steps that
    are weighted by 1 / unit²; the older the less."""

    def __init__(self, kept: float) -> None:
        size = len(_PRIOR)
        self._kept = kept
        self.count = 0.0
        self.squares = [[0.0] * (row + 1) for row in range(size)]  # lower triangle
        self.products = [0.0] * size

    def add(self, features: Sequence[float], seconds: float, unit_s: float) -> None:
        kept = self._kept
        self.count = kept * self.count + 1
        # In the unit of the prior, so that all of a kind are about 1.
        scaled = [each * prior / unit_s for each, prior in zip(features, _PRIOR, strict=True)]
        value = seconds / unit_s
        for row, (one, sums) in enumerate(zip(scaled, self.squares, strict=True)):
            for column in range(row + 1):
                sums[column] = kept * sums[column] + one * scaled[column]
            self.products[row] = kept * self.products[row] + one * value


def _fit(decodes: _Sums, prompts: _Sums) -> Vector:
    """The coefficients, none below 0."""
    size = range(len(_PRIOR))
    products = [decodes.products[row] + prompts.products[row] for row in size]
    squares = [
        [
            decodes.squares[max(i, j)][min(i, j)] + prompts.squares[max(i, j)][min(i, j)]
            for j in size
        ]
        for i in size
    ]
    # How much slower or quicker than the prior the engine is, all in all.
    scale = sum(products) / max(1e-12, sum(map(sum, squares)))
    ridge = (
        _PRIOR_STEPS
        * max(1e-9, sum(squares[row][row] for row in size))
        / max(1.0, decodes.count + prompts.count)
    )
    active = list(size)
    while True:
        solved = _solve(
            [[squares[i][j] + (ridge if i == j else 0.0) for j in active] for i in active],
            [products[i] + ridge * scale for i in active],
        )
        worst = min(range(len(active)), key=solved.__getitem__)
        if solved[worst] >= 0:
            break
        del active[worst]
    found = [0.0] * len(_PRIOR)
    for index, value in zip(active, solved, strict=True):
        found[index] = value * _PRIOR[index]
    return found


def _solve(matrix: list[Vector], right: Vector) -> Vector:
    """Of a symmetric positive definite matrix, in place."""
    size = len(right)
    for row in range(size):
        for below in range(row + 1, size):
            factor = matrix[below][row] / matrix[row][row]
            right[below] -= factor * right[row]
            matrix[below] = [
                a - factor * b for a, b in zip(matrix[below], matrix[row], strict=True)
            ]
    found = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(matrix[row][column] * found[column] for column in range(row + 1, size))
        found[row] = (right[row] - rest) / matrix[row][row]
    return found
