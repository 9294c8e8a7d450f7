"""Requests and figures."""

from __future__ import annotations

from statistics import fmean

import pytest

from tests.sim.builders import ask, one
from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.figures import Slo, figures
from vllm_tetri.sim.workload import CLASSES, Ask, Phase, draw, draw_phases


@pytest.mark.parametrize("kind", CLASSES)
def test_lengths_are_of_their_class(kind: str) -> None:
    (least_prompt, most_prompt), (least_answer, most_answer) = CLASSES[kind]

    asks = draw(kind, 2000, 4.0, seed=1)

    assert {least_prompt <= each.prompt_tokens <= most_prompt for each in asks} == {True}
    assert {least_answer <= each.output_tokens <= most_answer for each in asks} == {True}
    assert max(each.prompt_tokens for each in asks) > 0.95 * most_prompt
    assert asks[-1].arrival_s == pytest.approx(500, rel=0.1)


def test_mixed_takes_every_class_as_often() -> None:
    asks = draw("mixed", 4000, 1.0, seed=1)

    heavy_prompts = fmean(each.prompt_tokens >= 512 for each in asks)
    heavy_answers = fmean(each.output_tokens > 128 for each in asks)
    assert heavy_prompts == pytest.approx(0.5, abs=0.04)
    assert heavy_answers == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_wrong_predictions_name_a_neighbouring_bucket(accuracy: float) -> None:
    asks = draw("hphd", 3000, 1.0, seed=1, accuracy=accuracy)

    errors = [
        each.predicted.bucket - each.output_tokens // 200
        for each in asks
        if each.predicted is not None
    ]
    assert len(errors) == 3000
    assert {abs(error) for error in errors} <= {0, 1}
    assert fmean(error == 0 for error in errors) == pytest.approx(accuracy, abs=0.03)


def test_accuracy_does_not_change_the_requests() -> None:
    def bare(accuracy: float) -> list[tuple[float, int, int]]:
        asks = draw("mixed", 50, 1.0, seed=1, accuracy=accuracy)
        return [(each.arrival_s, each.prompt_tokens, each.output_tokens) for each in asks]

    assert bare(1.0) == bare(0.3)


def test_phases_follow_each_other() -> None:
    asks = draw_phases([Phase("hpld", 5.0, 100), Phase("lphd", 10.0, 50)], seed=1)

    first = [each for each in asks if each.arrival_s < 100]
    assert [each.id for each in asks] == list(range(len(asks)))
    assert {each.prompt_tokens >= 512 for each in first} == {True}
    assert {each.prompt_tokens < 512 for each in asks[len(first) :]} == {True}
    assert len(first) == pytest.approx(500, rel=0.15)
    assert 140 < asks[-1].arrival_s < 150


def test_requests_that_make_no_sense_are_errors() -> None:
    with pytest.raises(ConfigError, match="no kind"):
        draw("heavy", 1, 1.0, 0)
    with pytest.raises(ConfigError, match="rate"):
        draw("mixed", 1, 0.0, 0)
    with pytest.raises(ConfigError, match="at least 1"):
        draw("mixed", 0, 1.0, 0)
    with pytest.raises(ConfigError, match="accuracy"):
        draw("mixed", 1, 1.0, 0, accuracy=1.1)
    with pytest.raises(ConfigError, match="no request"):
        Ask(0, 0.0, 0, 1)
    with pytest.raises(ConfigError, match="no request arrives"):
        draw_phases([Phase("mixed", 0.001, 0.001)], 0)
    with pytest.raises(ConfigError, match="must be longer"):
        Phase("mixed", 1.0, 0.0)


# -- figures ---------------------------------------------------------------------------------


def test_figures_count_what_is_within_the_slo() -> None:
    served = simulate(one(), [ask(0, 10, 3), ask(1, 10, 2, arrival_s=10.0), ask(2, 64, 1, 20.0)])

    found = figures(served, Slo(ttft_s=1.2, tpot_s=1.1102))

    # Times per token 1.1105, 1.11 and none; the last prompt takes 1.64 s.
    assert found.good == pytest.approx(1 / 3)
    assert found.goodput == pytest.approx(1 / 21.64)
    assert found.ttft_mean_s == pytest.approx((1.1 + 1.1 + 1.64) / 3)
    assert found.itl_max_s == pytest.approx(1.111)
    assert found.itl_p50_s == pytest.approx(1.11)
    assert found.jct_mean_s == pytest.approx((3.321 + 2.21 + 1.64) / 3)
    assert found.split == 0.0


def test_figures_of_nothing_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no requests"):
        figures([], Slo(1.0, 0.1))
    with pytest.raises(ConfigError, match="above 0"):
        Slo(0.0, 0.1)
