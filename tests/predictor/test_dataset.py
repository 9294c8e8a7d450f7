"""Buckets, labels and the split."""

from __future__ import annotations

import pytest

from tests.predictor.tiny_artefact import TARGET
from vllm_tetri.errors import ConfigError
from vllm_tetri.predictor.answers import Answers, Asked
from vllm_tetri.predictor.dataset import (
    QUARTERS,
    Buckets,
    Split,
    buckets_for,
    dataset,
    repeated,
    split_of,
)
from vllm_tetri.predictor.prompts import key_of


def answers_of(*lengths: tuple[int, ...]) -> Answers:
    asked = (
        Asked(key_of(str(index)), "a", f"prompt {index}", 5, each)
        for index, each in enumerate(lengths)
    )
    return Answers(TARGET, tuple(asked), "digest")


def test_buckets_are_half_open_and_the_last_is_open() -> None:
    buckets = Buckets(3, 200)

    assert [buckets.of(tokens) for tokens in (0, 199, 200, 399, 400, 5000)] == [0, 0, 1, 1, 2, 2]
    assert buckets.names() == ["0-199", "200-399", "400+"]


def test_last_bucket_holds_at_least_one_answer_in_twenty() -> None:
    buckets = buckets_for(answers_of(*((tokens,) for tokens in range(1000))), 200)

    assert buckets == Buckets(5, 200)


def test_last_bucket_begins_before_answers_are_cut() -> None:
    buckets = buckets_for(answers_of(*[(TARGET.max_tokens,)] * 100), 300)

    assert buckets == Buckets(4, 300)
    assert buckets.of(TARGET.max_tokens) == 3


def test_answers_of_one_bucket_are_refused() -> None:
    with pytest.raises(ConfigError, match="granularity 400"):
        buckets_for(answers_of(*((tokens,) for tokens in range(100))), 400)


def test_label_is_the_median_and_the_truth_one_answer() -> None:
    parts = dataset(answers_of(*[(100, 300, 800)] * 200))

    assert {example.median_tokens for example in parts.train} == {300}
    assert {example.tokens for example in parts.test} == {100}


def test_split_is_by_prompt_and_of_the_stated_sizes() -> None:
    parts = dataset(answers_of(*[(100,)] * 2000))

    sizes = [len(part) for part in (parts.train, parts.validation, parts.test)]
    assert sum(sizes) == 2000
    assert sizes == pytest.approx([1300, 200, 500], rel=0.15)
    assert {split_of(example.key) for example in parts.test} == {Split.TEST}


def test_every_prompt_is_held_out_by_one_quarter() -> None:
    answers = answers_of(*[(100,)] * 1000)

    held_out = [dataset(answers, quarter).test for quarter in range(QUARTERS)]

    keys = [example.key for part in held_out for example in part]
    assert sorted(keys) == sorted(asked.key for asked in answers.asked)


def test_too_few_prompts_to_split_are_refused() -> None:
    with pytest.raises(ConfigError, match="collect more"):
        dataset(answers_of((1,), (2,)))


def test_pairs_come_from_prompts_that_were_asked_twice() -> None:
    assert sorted(repeated(answers_of((1,), (2, 3), (4, 5, 6)))) == [(2, 3), (4, 5)]
