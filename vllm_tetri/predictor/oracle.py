"""Predictions from the truth, right as often as asked for: for experiments.

The true length is known where the client fixed it: `ignore_eos` with `max_tokens`. With
probability 1 - accuracy another bucket is named, each step away from the true one half as likely
as the step before. A prompt always gets the same prediction: policies see the same mistakes.
"""

from __future__ import annotations

import zlib
from array import array
from random import Random

from vllm_tetri.predictor.base import Query, Tally
from vllm_tetri.types import Prediction


class Oracle:
    """A `Predictor` that knows; `accuracy` is the share of prompts with the true bucket."""

    def __init__(self, granularity_tokens: int, num_buckets: int, accuracy: float) -> None:
        self._granularity_tokens = granularity_tokens
        self._num_buckets = num_buckets
        self._accuracy = accuracy
        self._known: list[tuple[str, Prediction | None]] = []
        self.tally = Tally()

    def ask(self, query: Query) -> None:
        prediction = None
        if query.output_tokens is not None:
            rng = Random(zlib.crc32(array("q", query.token_ids).tobytes()))
            prediction = self._predict(query.output_tokens, rng)
            self.tally.made += 1
        self._known.append((query.name, prediction))

    def _predict(self, output_tokens: int, rng: Random) -> Prediction:
        last = self._num_buckets - 1
        bucket = min(output_tokens // self._granularity_tokens, last)
        if last > 0 and rng.random() >= self._accuracy:
            others = [other for other in range(self._num_buckets) if other != bucket]
            weights = [0.5 ** abs(other - bucket) for other in others]
            bucket = rng.choices(others, weights)[0]
        return Prediction(bucket, self._num_buckets, self._granularity_tokens)

    def withdraw(self, name: str) -> None:
        """Do nothing: `poll` has the prediction at once."""

    def poll(self) -> list[tuple[str, Prediction | None]]:
        known, self._known = self._known, []
        return known

    def wait(self, timeout_s: float) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
