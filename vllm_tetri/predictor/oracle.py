"""Predictions from the truth, right as often as asked for: for experiments.

The true length is known where the client fixed it: `ignore_eos` with `max_tokens`.
With probability 1 - accuracy another bucket is named, each step away from the true
one half as likely as the step before. The same prompt always gets the same answer, so
that policies can be compared on the same mistakes.
"""

from __future__ import annotations

import zlib
from array import array
from random import Random

from vllm_tetri.predictor.base import Ask, Tally
from vllm_tetri.types import Prediction


class Oracle:
    """A `Predictor` that knows.

    Args:
        granularity_tokens: Width of a bucket.
        num_buckets: The last one is open.
        accuracy: Share of prompts whose bucket is the true one.
    """

    def __init__(self, granularity_tokens: int, num_buckets: int, accuracy: float) -> None:
        self._granularity_tokens = granularity_tokens
        self._num_buckets = num_buckets
        self._accuracy = accuracy
        self._known: list[tuple[str, Prediction | None]] = []
        self.tally = Tally()

    def ask(self, ask: Ask) -> None:
        prediction = None
        if ask.answer_tokens is not None:
            rng = Random(zlib.crc32(array("q", ask.token_ids).tobytes()))
            prediction = self._predict(ask.answer_tokens, rng)
            self.tally.made += 1
        self._known.append((ask.name, prediction))

    def _predict(self, answer_tokens: int, rng: Random) -> Prediction:
        last = self._num_buckets - 1
        bucket = min(answer_tokens // self._granularity_tokens, last)
        if last > 0 and rng.random() >= self._accuracy:
            others = [other for other in range(self._num_buckets) if other != bucket]
            weights = [0.5 ** abs(other - bucket) for other in others]
            bucket = rng.choices(others, weights)[0]
        return Prediction(bucket, self._num_buckets, self._granularity_tokens)

    def withdraw(self, name: str) -> None:
        """It answers at once."""

    def poll(self) -> list[tuple[str, Prediction | None]]:
        known, self._known = self._known, []
        return known

    def wait(self, timeout_s: float) -> None:
        """There is never anything to wait for."""

    def close(self) -> None:
        """It holds nothing."""
