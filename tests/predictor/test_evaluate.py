"""Evaluation: metrics against known answers, and a whole run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.predictor import tiny_artefact
from vllm_tetri.cli import main
from vllm_tetri.predictor import guesses, scores
from vllm_tetri.predictor.artefact import read_about, write_about
from vllm_tetri.predictor.dataset import Buckets, Dataset, Example
from vllm_tetri.predictor.guesses import Guesses, Known

BUCKETS = Buckets(3, 200)
LENGTHS = (50, 100, 150, 250, 300, 500, 700, 900)


def examples(*pairs: tuple[int, int]) -> list[Example]:
    return [
        Example(str(index), f"prompt {index}", prompt, tokens, tokens)
        for index, (prompt, tokens) in enumerate(pairs)
    ]


def said(*tokens: float) -> Guesses:
    return guesses.as_answered([int(each) for each in tokens], BUCKETS)


def test_perfect_guesses_score_perfectly() -> None:
    truth = scores.truth_of_lengths(LENGTHS, BUCKETS)
    found = [
        metric(truth, said(*LENGTHS), scores.everyone(truth)) for metric in scores.METRICS.values()
    ]

    assert found == pytest.approx([1, 1, 0, 1])


def test_reversed_guesses_rank_in_reverse() -> None:
    truth = scores.truth_of_lengths(LENGTHS, BUCKETS)
    everyone = scores.everyone(truth)

    assert scores.spearman(truth, said(*LENGTHS[::-1]), everyone) == pytest.approx(-1)
    assert scores.heavy_auc(truth, said(*LENGTHS[::-1]), everyone) == 0


def test_equal_guesses_know_nothing() -> None:
    truth = scores.truth_of_lengths(LENGTHS, BUCKETS)
    everyone = scores.everyone(truth)

    assert scores.spearman(truth, said(*[100] * 8), everyone) == 0
    assert scores.heavy_auc(truth, said(*[100] * 8), everyone) == 0.5


def test_ranks_of_equal_values_are_shared() -> None:
    assert scores.ranks(np.array([10.0, 30.0, 10.0, 20.0])).tolist() == [1.5, 4, 1.5, 3]


def test_majority_guesses_the_median_of_what_is_known() -> None:
    train = examples(*[(5, length) for length in LENGTHS])

    found = guesses.majority(Known(train, BUCKETS), 2)

    assert found.buckets.tolist() == [0, 0]
    assert found.median_tokens.tolist() == [250, 250]
    assert found.mean_tokens.tolist() == pytest.approx([np.mean(LENGTHS)] * 2)


def test_certain_bucket_is_guessed_by_its_own_answers() -> None:
    train = examples(*[(5, length) for length in LENGTHS])

    found = Known(train, BUCKETS).guesses(np.array([[0.0, 0.0, 1.0]]))

    assert found.median_tokens.tolist() == [700]
    assert found.mean_tokens.tolist() == pytest.approx([700])


def test_coarser_buckets_add_up_finer_ones() -> None:
    rows = np.array([[0.1, 0.2, 0.3, 0.15, 0.25]])

    assert guesses.coarser(rows, 2).tolist() == [pytest.approx([0.3, 0.45, 0.25])]
    assert Buckets(5, 100).coarser(2) == Buckets(3, 200)
    assert [Buckets(5, 100).coarser(2).of(each) for each in (199, 200, 400, 900)] == [0, 1, 2, 2]


def test_length_of_the_prompt_is_used_where_it_tells_something() -> None:
    pairs = [(index, 900 if index >= 50 else 50) for index in range(100)]
    parts = Dataset(
        train=tuple(examples(*pairs[::2])),
        validation=tuple(examples(*pairs[1::2])),
        test=tuple(examples((3, 50), (97, 900))),
    )

    found = guesses.by_prompt_length(Known(parts.train, BUCKETS), BUCKETS, parts)

    assert found.buckets.tolist() == [0, 2]


def test_interval_holds_the_value_and_shrinks_with_more_prompts() -> None:
    rng = np.random.default_rng(0)

    def width(num: int) -> float:
        lengths = rng.integers(0, 600, num).tolist()
        guess = [length if index % 2 else 599 - length for index, length in enumerate(lengths)]
        truth = scores.truth_of_lengths(lengths, BUCKETS)
        found = scores.interval(scores.accuracy, truth, said(*guess))
        assert found.low <= found.value <= found.high
        return found.high - found.low

    assert width(1600) < width(100) / 2


def test_difference_to_oneself_is_none() -> None:
    truth = scores.truth_of_lengths(LENGTHS, BUCKETS)
    guess = said(*LENGTHS[::-1])

    found = scores.difference(scores.accuracy, truth, guess, guess)

    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_skill_is_what_is_left_of_the_majoritys_mistakes() -> None:
    assert scores.skill(0.8, 0.6) == pytest.approx(0.5)
    assert scores.skill(0.6, 0.6) == 0
    assert scores.skill(0.5, 0.6) < 0


def test_calibration_error_is_the_distance_of_confidence_and_accuracy() -> None:
    train = examples(*[(5, length) for length in LENGTHS])
    truth = scores.truth_of_lengths([50, 50, 50, 300], BUCKETS)
    sure = Known(train, BUCKETS).guesses(np.tile([0.95, 0.05, 0.0], (4, 1)))

    found = scores.reliability(truth, sure)

    assert [(each.confidence, each.accuracy, each.num) for each in found] == [(0.95, 0.75, 4)]
    assert scores.calibration_error(found) == pytest.approx(0.2)
    assert scores.reliability(truth, said(50, 50, 50, 50)) == []


def test_evaluation_says_how_far_the_predictor_is_ahead(
    answers: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    words = ["predictor", "eval", str(answers), str(trained), "--output", str(tmp_path / "e")]
    assert main(words) == 0

    shown = capsys.readouterr().out
    assert "predictor − prompt length" in shown
    found = json.loads((tmp_path / "e" / "eval.json").read_text())
    at_200, at_400 = found["granularities"]
    assert at_200["methods"]["predictor"]["num"] > 70
    assert set(at_200["methods"]) == {
        "majority",
        "prompt length",
        "predictor",
        "its median bucket",
        "target again",
    }
    assert at_200["methods"]["majority"]["skill"] == 0
    assert at_200["differences"]["prompt length"]["accuracy"]["low"] > 0
    assert at_400["buckets"] == {"num": 2, "granularity_tokens": 400}
    assert (tmp_path / "e" / "eval.svg").read_text().startswith("<?xml")


def test_predictors_that_hold_out_the_same_prompts_are_refused(
    answers: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    words = ["predictor", "eval", str(answers), str(trained), str(trained)]
    assert main([*words, "--output", str(tmp_path / "e")]) == 2

    assert "hold out the same prompts" in capsys.readouterr().err


def test_predictors_that_hold_out_other_prompts_are_tested_together(
    answers: Path, trained: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    write_about(other, replace(read_about(trained), held_out=2))

    words = ["predictor", "eval", str(answers), str(trained), str(other)]
    assert main([*words, "--output", str(tmp_path / "e")]) == 0

    found = json.loads((tmp_path / "e" / "eval.json").read_text())
    assert found["granularities"][0]["methods"]["predictor"]["num"] > 150


def test_predictor_of_another_model_is_refused(
    answers: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    other = tmp_path / "other.jsonl"
    other.write_text(answers.read_text().replace('"model":"tiny"', '"model":"large"'))

    words = ["predictor", "eval", str(other), str(trained), "--output", str(tmp_path / "e")]
    assert main(words) == 2

    assert "predicts answers of tiny" in capsys.readouterr().err


def test_prompts_of_every_length_are_predicted(tmp_path: Path) -> None:
    from vllm_tetri.predictor.artefact import load

    artefact = load(tiny_artefact.make(tmp_path, num_buckets=3))
    mixed = [
        Example(str(index), "word " * (index * 7 % 40), 5, LENGTHS[index % 8], 1)
        for index in range(70)
    ]

    rows = guesses.predicted(artefact, mixed)

    alone = [artefact.predict([artefact.encode(each.text)])[0].bucket for each in mixed]
    assert guesses.served(Known(mixed, BUCKETS), rows).buckets.tolist() == alone
