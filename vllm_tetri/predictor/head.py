"""The length head: a linear map from the served model's own hidden state to the log of the length.

EGTP (arXiv 2602.11812) and ProD train networks on that state offline; this is a ridge regression
over the newest outputs, solved anew as they end, which errs less with hundreds of them
(docs/predictor.md). Each residual is that of the map without its own output, in closed form; the
distribution of a length is its score and the residuals.

An output that was cut off counts as the mean of the lengths that it could have had.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.types import NUM_LENGTHS, Prediction

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

LEVELS = (np.arange(NUM_LENGTHS) + 0.5) / NUM_LENGTHS
_MOST_LOG, _MOST_NUMBER = 16.0, 1e30  # of a length, and of a map
_LEAST_SAMPLES = 32  # below, it predicts nothing
_MOST_SAMPLES, _MOST_BYTES = 1024, 32 << 20
_NEW_PART = 0.05  # of the samples, before the map is solved anew
_PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0)  # the one with the smallest residuals is taken
_CUT_ROUNDS = 2
_BOUND = 8.0  # of a scaled dimension: states have outliers


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The map, and how far off it was."""

    mean: Floats  # of the states, (width,)
    scale: Floats
    slopes: Floats
    spread: Floats  # the logarithm of the usual length, and quantiles of what to add to a score
    num_samples: int

    @property
    def usual_tokens(self) -> float:
        """Return the median of the lengths, which needs no state."""
        return float(np.exp(self.spread[0]))

    def predict(self, state: Floats) -> Prediction:
        """Return the distribution of the length of an output whose prompt has this state."""
        score = float(_scaled(state, self.mean, self.scale) @ self.slopes)
        return Prediction(tuple(np.exp(np.minimum(score + self.spread[1:], _MOST_LOG)).tolist()))

    def pack(self) -> bytes:
        """Return the numbers of the map; see `unpack`."""
        parts = [np.array([self.num_samples]), self.spread, self.mean, self.scale, self.slopes]
        return np.concatenate(parts, dtype=np.float32).tobytes()

    @classmethod
    def unpack(cls, packed: bytes, width: int) -> Weights:
        """Return what `pack` made; ValueError if it is something else, or for other states."""
        numbers = np.frombuffer(packed, np.float32)
        is_ours = len(numbers) == 2 + NUM_LENGTHS + 3 * width and numbers[0] >= 1
        if not (is_ours and (abs(numbers) < _MOST_NUMBER).all()):
            raise ValueError("no map of hidden states like those here")
        spread, rest = numbers[1 : 2 + NUM_LENGTHS], numbers[2 + NUM_LENGTHS :]
        if (np.diff(spread[1:]) < 0).any():
            raise ValueError("quantiles that do not ascend")
        mean, scale, slopes = rest.reshape(3, width)
        return cls(mean, scale, slopes, spread, int(numbers[0]))


class Learner:
    """Samples of one model, and the `weights` that follow from them. Owner: one thread; `weights`
    may be read by any."""

    weights: Weights | None = None  # until there are samples

    def __init__(self, width: int) -> None:
        self.width = width
        most = min(_MOST_SAMPLES, max(_LEAST_SAMPLES, _MOST_BYTES // (2 * width)))
        self._states = np.zeros((most, width), np.float16)
        self._tokens = np.zeros(most)
        self._is_cut = np.zeros(most, np.bool_)
        self._next = self.num_samples = self._num_new = 0

    def add(self, state: Floats, num_tokens: int, *, is_cut: bool = False) -> None:
        """Keep the state of a prompt, and how long its output was, in place of the oldest one; a
        state that is not finite is left out."""
        if state.shape != (self.width,) or not np.isfinite(state).all():
            return
        index = self._next
        self._states[index] = np.clip(state, -60_000, 60_000)
        self._tokens[index] = max(1, num_tokens)
        self._is_cut[index] = is_cut
        self._next = (index + 1) % len(self._tokens)
        self.num_samples = min(self.num_samples + 1, len(self._tokens))
        self._num_new += 1

    def refresh(self) -> None:
        """Publish the `weights` of the samples if there are enough, and enough new ones."""
        count = self.num_samples
        if count < _LEAST_SAMPLES or self._num_new <= _NEW_PART * count:
            return
        self._num_new = 0
        states, tokens = self._states[:count].astype(np.float32), self._tokens[:count]
        deviation = states.std(axis=0)
        # Few samples say little of the scale of one dimension.
        scale = (1 / np.maximum(deviation, np.median(deviation) / 4 + 1e-6)).astype(np.float32)
        mean = states.mean(axis=0)
        scaled = _scaled(states, mean, scale)
        spectrum = np.linalg.eigh((scaled @ scaled.T / self.width).astype(np.float64))
        logs = np.log(tokens)
        dual, residuals = _solve(spectrum, logs)
        for _ in range(_CUT_ROUNDS if self._is_cut[:count].any() else 0):
            logs = _completed(np.log(tokens), self._is_cut[:count], logs - residuals, residuals)
            dual, residuals = _solve(spectrum, logs)
        slopes = (scaled.T @ dual / self.width).astype(np.float32)
        if not np.isfinite(slopes).all():
            raise np.linalg.LinAlgError("no finite map")
        quantiles = logs.mean() + np.quantile(residuals, LEVELS)
        spread = np.array([np.log(np.median(tokens)), *quantiles], np.float32)
        self.weights = Weights(mean, scale, slopes, spread, count)


def _scaled(states: Floats, mean: Floats, scale: Floats) -> Floats:
    """Return bounded states of about one in every dimension."""
    return np.clip((states - mean) * scale, -_BOUND, _BOUND).astype(np.float32)


def _solve(spectrum: tuple[Doubles, Doubles], logs: Doubles) -> tuple[Doubles, Doubles]:
    """Return the dual weights of the samples and their residuals without themselves, (n,), for the
    penalty that makes these the smallest."""
    values, vectors = spectrum
    turned = vectors.T @ (logs - logs.mean())
    found = []
    for penalty in _PENALTIES:
        inverse = 1 / (values + penalty)
        dual = vectors @ (turned * inverse)
        residuals = dual / (vectors**2 @ inverse)
        found.append((float((residuals**2).mean()), dual, residuals))
    _, dual, residuals = min(found, key=lambda each: each[0])
    return dual, residuals


def _completed(
    logs: Doubles, is_cut: NDArray[np.bool_], scores: Doubles, errors: Doubles
) -> Doubles:
    """Return lengths in which one that was cut is the mean of what it could have been: of its score
    and the residuals that make it longer than it was."""
    completed = logs.copy()
    for index in np.flatnonzero(is_cut):
        longer = errors[errors > logs[index] - scores[index]]
        if len(longer):
            completed[index] = scores[index] + longer.mean()
    return completed
