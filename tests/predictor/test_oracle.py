"""Predictions from the truth."""

from __future__ import annotations

import pytest

from vllm_tetri.predictor.base import Oracle, Query
from vllm_tetri.types import Prediction


@pytest.mark.parametrize(
    ("output_tokens", "prediction"),
    [(1, Prediction((1,))), (100_000, Prediction((100_000,))), (None, None)],
)
def test_it_knows_where_the_client_fixed_the_length(
    output_tokens: int | None, prediction: Prediction | None
) -> None:
    oracle = Oracle()
    oracle.ask(Query("a", [0, 1, 2], output_tokens))
    assert oracle.poll() == [("a", prediction)]
    assert oracle.poll() == []
    assert oracle.tally.made == (prediction is not None)
