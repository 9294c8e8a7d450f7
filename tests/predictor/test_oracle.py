"""Predictions from the truth."""

from __future__ import annotations

import pytest

from vllm_tetri.predictor.base import Oracle, Query
from vllm_tetri.types import Prediction


@pytest.mark.parametrize(
    ("output_tokens", "prediction"),
    [
        (1, Prediction(0, 5, 200)),
        (200, Prediction(1, 5, 200)),
        (100_000, Prediction(4, 5, 200)),
        (None, None),
    ],
)
def test_it_knows_the_bucket_where_the_client_fixed_the_length(
    output_tokens: int | None, prediction: Prediction | None
) -> None:
    oracle = Oracle(200, 5)
    oracle.ask(Query("a", [0, 1, 2], output_tokens))
    assert oracle.poll() == [("a", prediction)]
    assert oracle.poll() == []
    assert oracle.tally.made == (prediction is not None)
