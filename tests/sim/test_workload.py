"""Requests: lengths, arrivals and predictions."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.workload import CLASSES, draw, variation_of


@pytest.mark.parametrize("kind", CLASSES)
def test_lengths_are_of_their_class(kind: str) -> None:
    (least_prompt, most_prompt), (least_output, most_output) = CLASSES[kind]

    specs = draw(kind, 2000, 4.0, seed=1)

    assert {least_prompt <= each.prompt_tokens <= most_prompt for each in specs} == {True}
    assert {least_output <= each.output_tokens <= most_output for each in specs} == {True}
    assert max(each.prompt_tokens for each in specs) > 0.95 * most_prompt
    assert specs[-1].arrival_s == pytest.approx(500, rel=0.1)


def test_mixed_takes_every_class_as_often() -> None:
    specs = draw("mixed", 4000, 1.0, seed=1)

    heavy_prompts = fmean(each.prompt_tokens >= 512 for each in specs)
    heavy_outputs = fmean(each.output_tokens > 128 for each in specs)
    assert heavy_prompts == pytest.approx(0.5, abs=0.04)
    assert heavy_outputs == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_wrong_predictions_name_a_neighbouring_bucket(accuracy: float) -> None:
    specs = draw("hphd", 3000, 1.0, seed=1, accuracy=accuracy)

    errors = [
        int(each.predicted.median_tokens // 200) - each.output_tokens // 200
        for each in specs
        if each.predicted is not None
    ]
    assert len(errors) == 3000
    assert {abs(error) for error in errors} <= {0, 1}
    assert fmean(error == 0 for error in errors) == pytest.approx(accuracy, abs=0.03)


def test_accuracy_does_not_change_the_requests() -> None:
    def bare(accuracy: float) -> list[tuple[float, int, int]]:
        specs = draw("mixed", 50, 1.0, seed=1, accuracy=accuracy)
        return [(each.arrival_s, each.prompt_tokens, each.output_tokens) for each in specs]

    assert bare(1.0) == bare(0.3)


# -- arrivals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variation", [0.3, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_variation_that_were_asked_for(variation: float) -> None:
    specs = draw("lpld", 40_000, 5.0, seed=3, variation=variation)

    gaps = [after - before for before, after in pairwise([0.0, *(s.arrival_s for s in specs)])]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize("how", ["gamma:3", "at-once"])
def test_arrivals_do_not_change_lengths_and_predictions(how: str) -> None:
    def bare(how: str) -> list[tuple[int, int, object]]:
        specs = draw("mixed", 50, 1.0, seed=1, variation=variation_of(how), accuracy=0.5)
        return [(each.prompt_tokens, each.output_tokens, each.predicted) for each in specs]

    assert bare(how) == bare("poisson")


def test_arrivals_are_named() -> None:
    assert (variation_of("poisson"), variation_of("gamma:2.5")) == (1.0, 2.5)
    at_once = draw("mixed", 50, 2.0, seed=1, variation=variation_of("at-once"))
    assert {each.arrival_s for each in at_once} == {0.0}


@pytest.mark.parametrize("text", ["", "gamma", "gamma:x", "gamma:0", "gamma:nan", "poisson:1"])
def test_other_names_of_arrivals_are_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="gamma:3") as error:
        variation_of(text)
    assert "\n" not in str(error.value)
