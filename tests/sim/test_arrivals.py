"""How requests follow each other."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.arrivals import AT_ONCE, POISSON, Arrivals, arrivals
from vllm_tetri.sim.workload import Ask, draw


def gaps(asks: list[Ask]) -> list[float]:
    times = [0.0, *(each.arrival_s for each in asks)]
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("variation", [0.3, 1.0, 2.0, 4.0])
def test_bursts_have_the_rate_and_the_variation_that_were_asked_for(variation: float) -> None:
    found = gaps(draw("lpld", 40_000, 5.0, seed=3, arrivals=Arrivals(variation)))

    assert fmean(found) == pytest.approx(0.2, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(variation, rel=0.05)


def test_poisson_is_what_comes_without_asking() -> None:
    assert draw("mixed", 50, 2.0, seed=1, arrivals=POISSON) == draw("mixed", 50, 2.0, seed=1)


def test_all_can_come_at_once() -> None:
    assert {each.arrival_s for each in draw("mixed", 50, 2.0, seed=1, arrivals=AT_ONCE)} == {0.0}


@pytest.mark.parametrize("how", [Arrivals(3.0), AT_ONCE])
def test_requests_are_the_same_however_they_come(how: Arrivals) -> None:
    def bare(how: Arrivals) -> list[tuple[int, int, object]]:
        asks = draw("mixed", 50, 1.0, seed=1, arrivals=how, accuracy=0.5)
        return [(each.prompt_tokens, each.output_tokens, each.predicted) for each in asks]

    assert bare(how) == bare(POISSON)


def test_names() -> None:
    assert arrivals("poisson") == POISSON
    assert arrivals("gamma:2.5") == Arrivals(2.5)
    assert arrivals("at-once") == AT_ONCE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gamma",
        "gamma:",
        "gamma:x",
        "gamma:0",
        "gamma:-1",
        "gamma:nan",
        "gamma:inf",
        "poisson:1",
    ],
)
def test_other_names_are_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"gamma:3|above 0") as error:
        arrivals(text)
    assert "\n" not in str(error.value)
