"""Predictions from the truth."""

from __future__ import annotations

from collections import Counter

from vllm_tetri.predictor.base import Query
from vllm_tetri.predictor.oracle import Oracle
from vllm_tetri.types import Prediction


def predict(oracle: Oracle, answer_tokens: int | None, seed: int = 0) -> Prediction | None:
    oracle.ask(Query("a", [seed, 1, 2], answer_tokens))
    ((name, prediction),) = oracle.poll()
    assert name == "a"
    assert oracle.poll() == []
    return prediction


def test_it_knows_the_bucket() -> None:
    oracle = Oracle(200, 5, 1.0)
    assert predict(oracle, 1) == Prediction(0, 5, 200)
    assert predict(oracle, 200) == Prediction(1, 5, 200)
    assert predict(oracle, 100_000) == Prediction(4, 5, 200)
    assert oracle.tally.made == 3


def test_it_does_not_guess_what_it_cannot_know() -> None:
    oracle = Oracle(200, 5, 1.0)
    assert predict(oracle, None) is None
    assert oracle.tally.made == 0


def test_it_is_right_as_often_as_asked_for_and_errs_near_the_truth() -> None:
    oracle = Oracle(200, 10, 0.75)
    found = Counter(
        prediction.bucket
        for seed in range(4000)
        if (prediction := predict(oracle, 900, seed)) is not None
    )
    assert abs(found[4] / 4000 - 0.75) < 0.03
    assert found[3] > found[2] > found[1] > found[0]
    assert found[5] > found[6] > found[7] > found[8]


def test_the_same_prompt_gets_the_same_answer() -> None:
    first, second = Oracle(200, 10, 0.3), Oracle(200, 10, 0.3)
    answers = [predict(first, 900, seed) for seed in range(50)]
    assert answers == [predict(second, 900, seed) for seed in reversed(range(50))][::-1]


def test_a_single_bucket_is_always_right() -> None:
    assert predict(Oracle(5000, 1, 0.0), 77) == Prediction(0, 1, 5000)
