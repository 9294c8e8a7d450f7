"""Predictions from the truth: for experiments.

The true length is known where the client fixed it: `ignore_eos` with `max_tokens`.
"""

from __future__ import annotations

from vllm_tetri.predictor.base import Query, Tally
from vllm_tetri.types import Prediction


class Oracle:
    """A `Predictor` that knows."""

    def __init__(self, granularity_tokens: int, num_buckets: int) -> None:
        self._granularity_tokens, self._num_buckets = granularity_tokens, num_buckets
        self._known: list[tuple[str, Prediction | None]] = []
        self.tally = Tally()

    def ask(self, query: Query) -> None:
        prediction = None
        if query.output_tokens is not None:
            bucket = min(query.output_tokens // self._granularity_tokens, self._num_buckets - 1)
            prediction = Prediction(bucket, self._num_buckets, self._granularity_tokens)
            self.tally.made += 1
        self._known.append((query.name, prediction))

    def withdraw(self, name: str) -> None:
        """Do nothing: `poll` has the prediction at once."""

    def poll(self) -> list[tuple[str, Prediction | None]]:
        known, self._known = self._known, []
        return known

    def wait(self, timeout_s: float) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
