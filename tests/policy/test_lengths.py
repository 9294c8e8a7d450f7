"""What answers turned out to be, and what to expect of the next one."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.types import Prediction

BUCKETS = 10


def bucket(index: int, num_buckets: int = BUCKETS, granularity_tokens: int = 200) -> Prediction:
    return Prediction(index, num_buckets, granularity_tokens)


def expected(lengths: Lengths, predicted: Prediction | None, produced: int = 0) -> int:
    return lengths.total_tokens(predicted, produced, End.EXPECTED)


def taught(predicted: Prediction | None, *answers: int) -> Lengths:
    lengths = Lengths()
    for num_tokens in answers:
        lengths.observe(predicted, num_tokens)
    return lengths


@pytest.mark.parametrize(
    ("end", "total"), [(End.LOWER, 600), (End.EXPECTED, 700), (End.UPPER, 800)]
)
def test_ends_of_a_bucket_before_anything_was_seen(end: End, total: int) -> None:
    assert Lengths().total_tokens(bucket(3), 0, end) == total
    assert Lengths().total_tokens(bucket(3), 599, end) == total


def test_what_is_expected_grows_with_what_is_there() -> None:
    assert expected(Lengths(), bucket(3), 700) == pytest.approx(750, abs=1)


@pytest.mark.parametrize(("end", "total"), [(End.LOWER, 901), (End.UPPER, 1000)])
def test_an_outlived_bucket_is_left_for_the_one_that_the_answer_is_in(end: End, total: int) -> None:
    assert Lengths().total_tokens(bucket(3), 900, end) == total


def test_an_outlived_bucket_is_expected_to_end_in_the_middle_of_what_is_left() -> None:
    assert expected(Lengths(), bucket(3), 900) == pytest.approx(950, abs=1)


def test_the_last_bucket_is_open() -> None:
    last = bucket(BUCKETS - 1)
    assert Lengths().total_tokens(last, 0, End.LOWER) == 1800
    assert Lengths().total_tokens(last, 0, End.UPPER) == expected(Lengths(), last) == 2000
    assert expected(Lengths(), last, 5000) == 5200


@pytest.mark.parametrize("end", End)
def test_without_a_prediction_every_end_is_the_mean_of_all_answers(end: End) -> None:
    assert Lengths().total_tokens(None, 0, end) == 200
    lengths = Lengths()
    for index in range(400):
        lengths.observe(bucket(index % BUCKETS), 50)
    assert lengths.total_tokens(None, 0, end) == pytest.approx(50, abs=15)


def test_a_bucket_learns_what_its_answers_were() -> None:
    """All too long: the predictor says 1000 to 1200 where answers have 100."""
    lengths = taught(bucket(5), *[100] * 200)
    assert expected(lengths, bucket(5)) == pytest.approx(120, abs=10)
    assert expected(lengths, bucket(4)) == 900


def test_only_answers_that_lived_as_long_count() -> None:
    lengths = taught(bucket(0), *[30, 1030] * 200)
    assert expected(lengths, bucket(0)) == pytest.approx(530, abs=15)
    assert expected(lengths, bucket(0), 60) == pytest.approx(1030, abs=25)


def test_answers_beyond_all_buckets_are_learnt_too() -> None:
    lengths = taught(bucket(9), *[6000] * 300)
    assert expected(lengths, bucket(9)) == pytest.approx(6000, rel=0.05)
    assert expected(lengths, bucket(9), 3000) > 6000


def test_old_answers_are_forgotten() -> None:
    lengths = taught(bucket(2), *[500] * 3000, *[30] * 3000)
    assert expected(lengths, bucket(2)) < 100


def test_an_answer_without_tokens_teaches_nothing() -> None:
    assert taught(bucket(2), 0).state() == Lengths().state()


def test_another_granularity_goes_to_the_bucket_of_its_lower_end() -> None:
    fine = bucket(12, num_buckets=40, granularity_tokens=100)  # 1200 to 1300
    lengths = taught(fine, *[1250] * 500)
    assert expected(lengths, bucket(6)) == pytest.approx(1250, abs=15)
    assert lengths.total_tokens(fine, 0, End.UPPER) == 1300
    beyond = bucket(39, num_buckets=40, granularity_tokens=100)
    assert expected(lengths, beyond) == expected(lengths, bucket(9))


observations = st.lists(
    st.tuples(st.none() | st.integers(0, BUCKETS - 1).map(bucket), st.integers(0, 9000)),
    max_size=60,
)


@given(
    observations,
    st.none() | st.integers(0, BUCKETS - 1).map(bucket),
    st.integers(0, 9000),
    st.sampled_from(End),
)
def test_more_is_always_expected_than_is_there(
    seen: list[tuple[Prediction | None, int]], predicted: Prediction | None, produced: int, end: End
) -> None:
    lengths = Lengths()
    for each, num_tokens in seen:
        lengths.observe(each, num_tokens)
    assert lengths.total_tokens(predicted, produced, end) > produced


@given(observations, st.integers(1, 500), st.integers(1, 12))
def test_a_state_is_plain_values_and_comes_back_whole(
    seen: list[tuple[Prediction | None, int]], granularity: int, num_buckets: int
) -> None:
    lengths = Lengths(granularity, num_buckets)
    for each, num_tokens in seen:
        lengths.observe(each, num_tokens)
    again = Lengths.from_state(json.loads(json.dumps(lengths.state())))
    assert again.state() == lengths.state()
    for produced in (0, 70, 700, 7000):
        assert expected(again, bucket(0), produced) == expected(lengths, bucket(0), produced)


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(taught(bucket(1), 5, 500).state()))
    change(state)
    return state


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        "{}",
        {},
        broken(lambda state: state.update(num_buckets=11)),
        broken(lambda state: state.update(num_buckets="10")),
        broken(lambda state: state.update(num_buckets=10**12)),
        broken(lambda state: state.update(granularity_tokens=0)),
        broken(lambda state: state.update(granularity_tokens="200")),
        broken(lambda state: state.update(rows=None)),
        broken(lambda state: state["rows"].pop()),
        broken(lambda state: state["rows"][0].pop()),
        broken(lambda state: state.update(all="x" * len(state["all"]))),
        broken(lambda state: state["all"].__setitem__(0, -1)),
        broken(lambda state: state["all"].__setitem__(0, None)),
        broken(lambda state: state["all"].__setitem__(0, float("nan"))),
        broken(lambda state: state["all"].__setitem__(0, float("inf"))),
    ],
)
def test_garbage_is_no_state(state: object) -> None:
    with pytest.raises(ValueError):
        Lengths.from_state(state)


@pytest.mark.parametrize("kind", ["too long", "too short", "random", "inverted"])
def test_whatever_the_predictor_says_the_mean_is_right_after_some_answers(kind: str) -> None:
    rng = Random(0)
    lengths = Lengths()
    errors = []
    for count in range(3000):
        actual = rng.choice([rng.randint(1, 60), rng.randint(700, 1100)])
        said = {
            "too long": min(9, actual * 10 // 200),
            "too short": actual // 2000,
            "random": rng.randrange(BUCKETS),
            "inverted": max(0, 9 - actual // 200),
        }[kind]
        if count > 1000:
            errors.append(expected(lengths, bucket(said)) - actual)
        lengths.observe(bucket(said), actual)
    assert abs(fmean(errors)) < 30
