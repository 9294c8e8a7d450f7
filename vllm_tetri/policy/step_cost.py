"""What steps and hand-overs of one instance cost, learnt while it serves. Pure.

A step takes base + requests · each + their context · token + prompt tokens · (prompt +
context · tokens before): `StepCoefficients`. They are the least squares over recent steps,
by relative error, so that short steps count as much as long ones. Steps with and without
prompts are kept apart: an hour of decoding does not make an engine forget what a prompt
costs. What the steps do not tell, such as the price of context while all requests have
about the same, is filled from a prior of usual proportions, scaled to this engine.
"""

from __future__ import annotations

from operator import add

from vllm_tetri.types import StepCoefficients

Vector = list[float]

_KEPT_DECODES, _KEPT_PROMPTS = 0.998, 0.98  # weight of what came before, at each step of the kind
# A small model on a CPU core: base 13 ms, 0.6 ms a request or prompt token. Only the
# proportions count, and only until steps tell otherwise.
_PRIOR: Vector = [0.013, 0.0006, 2.9e-6, 0.00055, 3.5e-7]
GUESS = StepCoefficients(*_PRIOR)
# Of what each feature is multiplied with, in the sums.
_PRODUCTS = [(i, j) for i in range(len(_PRIOR)) for j in range(i, len(_PRIOR) + 1)]
# The products by place in the sums: all, and those that are not 0 in a step without prompts.
_ALL = [(at, one, other) for at, (one, other) in enumerate(_PRODUCTS)]
_WITHOUT_PROMPTS = [each for each in _ALL if not {3, 4} & {*each[1:]}]
_PRIOR_STEPS = 0.05  # weight of the prior, in steps
_LEAST_SHARE = 1e-4  # of all columns, that one counts for where steps tell little of it
_CONFIDENT_STEPS = 30.0
_OUTLIER = 4.0  # a step that takes this many times what it should says nothing of the engine
_LASTING_STEPS = 8
_EARLY = frozenset((1, 2, 4, 8, 16))  # steps after which the fit is renewed at once
_ERROR_GAIN = 1 / 32


def context_sum(new_tokens: float, num_tokens: float) -> float:
    """Return how many tokens there are before each of the last `new_tokens` of a prompt, all of
    these numbers together."""
    return new_tokens * (num_tokens - new_tokens / 2)


class StepFit:
    """Learns what steps cost, and counts the prompt and output tokens that they computed. Owner:
    the engine thread; any thread may read. `cost` is all 0 before the first step."""

    def __init__(self) -> None:
        self.prompt_tokens_done = self.output_tokens_done = 0
        self.cost = StepCoefficients()
        self._decodes = _Sums(_KEPT_DECODES, _WITHOUT_PROMPTS)
        self._prompts = _Sums(_KEPT_PROMPTS, _ALL)
        self._error = 0.0
        self._num_steps = self._num_outliers = 0

    def learn(
        self,
        num_decodes: int,
        decode_context: int,
        prompt_tokens: int,
        prompt_context: float,
        seconds: float,
    ) -> None:
        """Record a step's seconds. `decode_context` are the tokens of context of all decodes
        together, `prompt_context` the mean tokens before a prompt token, computed earlier or with
        it."""
        self.prompt_tokens_done += prompt_tokens
        self.output_tokens_done += num_decodes
        if seconds <= 0 or not (num_decodes or prompt_tokens):
            return
        expected_s = self.cost.step_s(num_decodes, decode_context, prompt_tokens, prompt_context)
        unit_s = seconds
        if expected_s > 0:
            ratio = self._plausible(seconds / expected_s)
            self._error += (abs(ratio - 1) / max(ratio, 1) - self._error) * _ERROR_GAIN
            seconds = ratio * expected_s
            # In this unit a step counts as much if it is slower than expected as if quicker.
            unit_s = expected_s if self._num_steps else seconds
        features = [1.0, num_decodes, decode_context, prompt_tokens, prompt_tokens * prompt_context]
        (self._prompts if prompt_tokens else self._decodes).add(features, seconds, unit_s)
        self._num_steps += 1
        if self._num_steps in _EARLY:
            self.refresh()

    def _plausible(self, ratio: float) -> float:
        """Bound a step's ratio to the expected seconds. When only far-off ratios come, the engine
        has changed and everything is learnt anew."""
        if 1 / _OUTLIER <= ratio <= _OUTLIER:
            self._num_outliers = 0
            return ratio
        self._num_outliers += 1
        if self._num_outliers < _LASTING_STEPS:
            return min(max(ratio, 1 / _OUTLIER), _OUTLIER)
        self._num_outliers = self._num_steps = 0
        self._decodes = _Sums(_KEPT_DECODES, _WITHOUT_PROMPTS)
        self._prompts = _Sums(_KEPT_PROMPTS, _ALL)
        self._error = 0.0
        return ratio

    def refresh(self) -> StepCoefficients:
        """Fit anew to what was learnt; microseconds, so a few times a second."""
        count = self._decodes.count + self._prompts.count
        if count:
            known = count / (count + _CONFIDENT_STEPS)
            confidence = known * max(0.0, 1 - self._error)
            solved = _fit(self._decodes, self._prompts)
            self.cost = StepCoefficients(*[*solved, confidence])
        return self.cost


class _Sums:
    """Weighted sums of products of features, and in the last column of features and times, over
    steps that are weighted by 1 / unit²; the older the less. Of products that occur twice only one
    is kept: each step pays for this."""

    def __init__(self, kept: float, products: list[tuple[int, int, int]]) -> None:
        self._kept, self._products = kept, products
        self.count = 0.0
        self.sums = [0.0] * len(_PRODUCTS)

    def add(self, features: Vector, seconds: float, unit_s: float) -> None:
        kept, sums = self._kept, self.sums
        self.count = kept * self.count + 1
        # In the unit of the prior, so that all of a kind are about 1.
        columns = [each * prior / unit_s for each, prior in zip(features, _PRIOR, strict=True)]
        columns.append(seconds / unit_s)
        for at, one, other in self._products:
            sums[at] = kept * sums[at] + columns[one] * columns[other]


def _fit(decodes: _Sums, prompts: _Sums) -> Vector:
    """Return the coefficients, none below 0."""
    sums = dict(zip(_PRODUCTS, map(add, decodes.sums, prompts.sums), strict=True))
    size = len(_PRIOR)
    rows = [[sums[min(i, j), max(i, j)] for j in range(size + 1)] for i in range(size)]
    # How much slower or quicker than the prior the engine is, all in all.
    scale = sum(row[-1] for row in rows) / max(1e-12, sum(sum(row[:-1]) for row in rows))
    trace = max(1e-9, sum(row[index] for index, row in enumerate(rows)))
    share = _PRIOR_STEPS / max(1.0, decodes.count + prompts.count)
    for index, row in enumerate(rows):
        # Each by its own size: on a GPU one column may be a hundred times another, which the
        # prior of a CPU must not outweigh.
        ridge = share * max(row[index], _LEAST_SHARE * trace)
        row[index] += ridge
        row[-1] += ridge * scale
    active = list(range(len(rows)))
    while True:
        solved = _solve([[rows[i][j] for j in (*active, -1)] for i in active])
        worst = min(range(len(active)), key=solved.__getitem__)
        if solved[worst] >= 0:
            break
        del active[worst]
    found = dict(zip(active, solved, strict=True))
    return [found.get(index, 0.0) * prior for index, prior in enumerate(_PRIOR)]


def _solve(rows: list[Vector]) -> Vector:
    """Solve with a symmetric positive definite matrix, whose right side is the last column."""
    for index, pivot in enumerate(rows):
        pivot[:] = [each / pivot[index] for each in pivot]
        for row in rows:
            if row is not pivot:
                factor = row[index]
                row[:] = [a - factor * b for a, b in zip(row, pivot, strict=True)]
    return [row[-1] for row in rows]


# What a transfer does not show: a second HTTP request, a copy, a first step over KV that no
# cache has seen.
_DECODE_REQUEST_S = 0.006
_KEPT = 0.98  # weight of what came before, at each hand-over
# The first guess, with the weight of two hand-overs: a step until it is noticed, shared memory.
_GUESS_S, _GUESS_TOKEN_S = 0.005, 1e-6
_USUAL_TOKENS = 500.0
# What the writes of 16 parts take on the engine's thread (examples/benchmarks/layers.py).
_BY_LAYER_S = 0.002


class HandoverFit:
    """Learns seconds from the end of a prompt to that of its transfer as base + prompt tokens ·
    `token_s`; `base_s` includes what the request itself needs to go on elsewhere. What travels
    while the prompt is computed takes none. Owner: the engine thread; any thread may read."""

    def __init__(self) -> None:
        self.base_s, self.token_s = _GUESS_S + _DECODE_REQUEST_S, _GUESS_TOKEN_S
        # Weighted sums: 1, n, n·n, s, n·s; the guess at two lengths.
        self._sums = [0.0] * 5
        for tokens in (0.0, 2 * _USUAL_TOKENS):
            self._add(tokens, _GUESS_S + tokens * _GUESS_TOKEN_S)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record the tokens and seconds of a hand-over."""
        self._add(num_tokens, seconds, _KEPT)
        total, n, nn, s, ns = self._sums
        mean_n, mean_s = n / total, s / total
        variance = max(1.0, nn / total - mean_n * mean_n)
        slope = max(0.0, (ns / total - mean_n * mean_s) / variance)
        self.token_s = min(slope, mean_s / max(1.0, mean_n))
        self.base_s = mean_s - mean_n * self.token_s + _DECODE_REQUEST_S

    def pays_by_layer(self, num_tokens: int) -> bool:
        """Whether sending a last chunk layer by layer, while it is computed, saves more of its
        transfer than the additional writes delay the step."""
        return num_tokens * self.token_s > _BY_LAYER_S

    def _add(self, tokens: float, seconds: float, kept: float = 1.0) -> None:
        new = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [kept * old + value for old, value in zip(self._sums, new, strict=True)]
