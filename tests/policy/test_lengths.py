"""What answers turned out to be, and what to expect of the next one."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from math import exp
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.types import NUM_LENGTHS, Prediction

BUCKETS = 10


def bucket(index: int) -> Prediction:
    return Prediction.of_bucket(index, 200)


def expected(lengths: Lengths, predicted: Prediction | None, produced: int = 0) -> int:
    return lengths.total_tokens(predicted, produced, End.EXPECTED)


def taught(predicted: Prediction | None, *outputs: int, route: str = "") -> Lengths:
    lengths = Lengths()
    for num_tokens in outputs:
        lengths.observe(predicted, num_tokens, route)
    return lengths


def heavy(lengths: Lengths, predicted: Prediction | None, produced: int = 0) -> float:
    return lengths.outlook(predicted, produced)[1]


@pytest.mark.parametrize(
    ("end", "total"), [(End.LOWER, 600), (End.EXPECTED, 700), (End.UPPER, 800)]
)
def test_ends_of_a_prediction_before_anything_was_seen(end: End, total: int) -> None:
    assert Lengths().total_tokens(bucket(3), 0, end) == total
    if end is not End.EXPECTED:
        assert Lengths().total_tokens(bucket(3), 599, end) == total


def test_what_is_expected_grows_with_what_is_there() -> None:
    assert expected(Lengths(), bucket(3), 700) == pytest.approx(750, abs=12)


def test_a_known_length_stays_as_it_is() -> None:
    known, lengths = Prediction((150,)), taught(bucket(5), *[100] * 200)
    assert [lengths.total_tokens(known, 0, end) for end in End] == [150] * 3
    assert (heavy(lengths, known), heavy(lengths, Prediction((128,)))) == (1, 0)


def test_an_output_that_outlives_its_prediction_is_as_any_that_had_as_many_tokens() -> None:
    lengths = taught(None, *[1000] * 500)
    assert expected(lengths, bucket(0), 400) == pytest.approx(1000, abs=20)
    assert lengths.total_tokens(bucket(0), 400, End.UPPER) == expected(lengths, bucket(0), 400)
    assert lengths.total_tokens(bucket(0), 400, End.LOWER) == 401


@pytest.mark.parametrize("end", End)
def test_without_a_prediction_every_end_is_the_mean_of_all_outputs(end: End) -> None:
    assert Lengths().total_tokens(None, 0, end) == 200
    lengths = Lengths()
    for index in range(400):
        lengths.observe(bucket(index % BUCKETS), 50)
    assert lengths.total_tokens(None, 0, end) == pytest.approx(50, abs=15)


def test_routes_have_lengths_of_their_own_once_they_had_some_outputs() -> None:
    lengths = taught(None, *[40] * 300, route="a")
    for _ in range(20):
        lengths.observe(None, 800, "b")
    assert lengths.total_tokens(None, 0, End.EXPECTED, "b") < 200
    for _ in range(100):
        lengths.observe(None, 800, "b")
    for route, tokens in (("a", 40), ("b", 800)):
        found = lengths.total_tokens(None, 0, End.EXPECTED, route)
        assert found == pytest.approx(tokens, rel=0.1)
    assert lengths.outlook(None, 0, "a")[1] < 0.1 < 0.9 < lengths.outlook(None, 0, "b")[1]
    for number in range(1000):
        lengths.observe(None, 7, str(number))
    assert len(lengths.state()["routes"]) <= 32  # type: ignore[arg-type]


def test_a_new_route_takes_the_place_of_the_one_that_was_used_least_recently() -> None:
    lengths = Lengths()
    for number in range(32):
        for _ in range(40):
            lengths.observe(None, 500, str(number))
    for _ in range(40):
        lengths.observe(None, 10, "new")
    assert lengths.total_tokens(None, 0, End.EXPECTED, "new") < 50
    assert len(lengths.state()["routes"]) == 32  # type: ignore[arg-type]


def test_outputs_that_a_limit_cuts_do_not_make_predictions_too_short() -> None:
    lengths, rng, limit = Lengths(), Random(5), 400
    sums = [0.0, 0.0]
    for number in range(3000):
        mean = rng.gauss(5.5, 0.7)
        said = Prediction(tuple(sorted(exp(rng.gauss(mean, 0.9)) for _ in range(NUM_LENGTHS))))
        whole = exp(rng.gauss(mean, 0.9))
        actual = max(1, round(min(whole, limit)))
        if number >= 1000:
            sums[0] += lengths.total_tokens(said, 0, End.EXPECTED, "", limit)
            sums[1] += actual
        is_cut = whole > limit and lengths.total_tokens(said, 0, End.EXPECTED) > limit
        lengths.observe(said, actual, "", limit, is_cut=is_cut)
    assert sums[0] == pytest.approx(sums[1], rel=0.1)


def test_a_predictor_that_is_always_off_by_a_factor_is_corrected() -> None:
    """Too long: it says 1000 to 1200 where outputs have 100."""
    lengths = taught(bucket(5), *[100] * 400)
    assert expected(lengths, bucket(5)) == pytest.approx(100, abs=50)
    assert heavy(lengths, bucket(5)) < 0.5
    lengths = taught(bucket(1), *[2400] * 2000)
    assert expected(lengths, bucket(1)) == pytest.approx(2400, rel=0.2)


def test_how_likely_a_long_output_is() -> None:
    assert heavy(Lengths(), bucket(0)) == pytest.approx(0.4)  # of 0 to 200 tokens
    assert heavy(Lengths(), bucket(0), 100) == pytest.approx(0.8)
    assert heavy(Lengths(), bucket(1)) == 1
    lengths = taught(None, *[30, 230] * 200)
    assert heavy(lengths, None) == pytest.approx(0.5, abs=0.01)
    assert heavy(lengths, None, 60) == pytest.approx(1, abs=0.02)
    assert heavy(lengths, None, 500) == 1


def test_only_outputs_that_lived_as_long_count() -> None:
    lengths = taught(None, *[30, 1030] * 200)
    assert expected(lengths, None) == pytest.approx(530, abs=15)
    assert expected(lengths, None, 60) == pytest.approx(1030, abs=25)


def test_outputs_beyond_the_histogram_are_learnt_too() -> None:
    lengths = taught(None, *[30_000] * 300)
    assert expected(lengths, None) == pytest.approx(30_000, rel=0.05)
    assert expected(lengths, None, 20_000) > 30_000


def test_old_outputs_are_forgotten() -> None:
    lengths = taught(bucket(2), *[500] * 3000, *[30] * 6000)
    assert expected(lengths, bucket(2)) < 100
    assert expected(lengths, None) < 100


def test_an_output_without_tokens_teaches_nothing() -> None:
    assert taught(bucket(2), 0).state() == Lengths().state()


def sure(rng: Random, spread: float) -> tuple[Prediction, float]:
    """A prediction, and the output's length, which is as wide as that times `spread`."""
    middle = rng.uniform(30, 800)
    steps = [rng.normalvariate(0, 0.5) for _ in range(400)]
    lengths = tuple(middle * exp(each) for each in sorted(steps)[20::40])
    return Prediction(lengths), middle * exp(rng.normalvariate(0, 0.5 * spread))


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
def test_nine_of_ten_outputs_are_between_the_ends_even_when_traffic_shifts(spread: float) -> None:
    """Whatever the predictor says: after some outputs it is too bold, or too careful."""
    rng, lengths, inside = Random(3), Lengths(), 0
    for number in range(1500):
        predicted, length = sure(rng, 1.0 if number < 500 else spread)
        if number >= 700:
            ends = (lengths.total_tokens(predicted, 0, end) for end in (End.LOWER, End.UPPER))
            inside += next(ends) <= length <= next(ends)
        lengths.observe(predicted, round(length))
    assert inside / 800 == pytest.approx(0.9, abs=0.03)
    assert lengths.coverage == pytest.approx(0.9, abs=0.06)


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


@given(observations)
def test_a_state_is_plain_values_and_comes_back_whole(
    seen: list[tuple[Prediction | None, int]],
) -> None:
    lengths = Lengths()
    for number, (each, num_tokens) in enumerate(seen):
        lengths.observe(each, num_tokens, "ab"[number % 2])
    again = Lengths.from_state(json.loads(json.dumps(lengths.state())))
    assert again.state() == lengths.state()
    for produced, end in product((0, 70, 700, 7000), End):
        same = (each.total_tokens(bucket(0), produced, end) for each in (again, lengths))
        assert next(same) == next(same)


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
        broken(lambda state: state.update(routes=None)),
        broken(lambda state: state.update(routes={str(each): state["all"] for each in range(99)})),
        broken(lambda state: state["routes"][""].pop()),
        broken(lambda state: state["sums"].pop()),
        broken(lambda state: state["sums"].__setitem__(0, -1)),
        broken(lambda state: state["sums"].__setitem__(0, float("nan"))),
        broken(lambda state: state.update(ends=[0, float("nan")])),
        broken(lambda state: state.update(ends=[0])),
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


@pytest.mark.parametrize("kind", ["too long", "too short", "random"])
def test_whatever_the_predictor_says_the_mean_is_right_after_some_outputs(kind: str) -> None:
    rng = Random(0)
    lengths = Lengths()
    errors = []
    for count in range(3000):
        actual = rng.choice([rng.randint(1, 60), rng.randint(700, 1100)])
        said = {
            "too long": min(9, actual * 10 // 200),
            "too short": actual // 2000,
            "random": rng.randrange(BUCKETS),
        }[kind]
        if count > 1000:
            errors.append(expected(lengths, bucket(said)) - actual)
        lengths.observe(bucket(said), actual)
    assert abs(fmean(errors)) < 60


@pytest.mark.parametrize("lengths", [(), (1.0, 2.0), (3.0,) * 9 + (2.0,), (float("nan"),), (-1.0,)])
def test_what_is_no_distribution_is_refused(lengths: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="no ascending lengths"):
        Prediction(lengths)
