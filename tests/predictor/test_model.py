"""Loading a predictor and asking it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples.predictor.model import (
    ABOUT_FILE,
    WEIGHTS_FILE,
    Artefact,
    digest_of,
    load,
    median_bucket,
    read_about,
    write_about,
)
from tests.predictor import tiny_artefact
from tests.predictor.tiny_artefact import TARGET, WINDOW_TOKENS
from vllm_tetri.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_artefact.make(tmp_path_factory.mktemp("artefact"))


@pytest.fixture(scope="module")
def artefact(folder: Path) -> Artefact:
    return load(folder)


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_every_prompt_gets_a_bucket_and_probabilities(artefact: Artefact) -> None:
    batch = [artefact.encode(text) for text in ("short", "somewhat longer", "")]
    rows = artefact.classify(batch)
    predictions = artefact.predict(batch)
    assert [len(row) for row in rows] == [4, 4, 4]
    assert [sum(row) for row in rows] == pytest.approx([1, 1, 1])
    assert [median_bucket(row) for row in rows] == predictions
    assert artefact.classify([]) == []


@pytest.mark.parametrize(
    ("row", "bucket"),
    [([1.0, 0.0], 0), ([0.5, 0.5], 0), ([0.4, 0.3, 0.3], 1), ([0.1, 0.1, 0.8], 2), ([0.2, 0.2], 1)],
)
def test_bucket_is_that_of_the_median(row: list[float], bucket: int) -> None:
    assert median_bucket(row) == bucket


def test_padding_changes_nothing(artefact: Artefact) -> None:
    short, long = artefact.encode("short"), artefact.encode("long " * 10)
    alone = artefact.classify([short])[0]
    assert artefact.classify([short, long])[0] == pytest.approx(alone, abs=1e-5)


def test_empty_prompt_is_still_something_to_classify(artefact: Artefact) -> None:
    assert artefact.encode("") == [1, 2]


def test_long_prompt_keeps_its_beginning_and_its_end(artefact: Artefact) -> None:
    ids = artefact.encode("a" * 100 + "b" * 100_000 + "c" * 100)
    assert len(ids) == WINDOW_TOKENS
    assert ids[0] == 1
    assert ids[-1] == 2
    assert ids[1:48] == artefact.encode("a" * 47)[1:-1]
    assert ids[48:-1] == artefact.encode("c" * 15)[1:-1]


def test_chat_template_of_the_target_is_taken_off(artefact: Artefact) -> None:
    served = f"{TARGET.before}a question{TARGET.after}"
    assert artefact.encode(served) == artefact.encode("a question")


def replace_about(folder: Path, **changes: Any) -> None:
    write_about(folder, msgspec.structs.replace(read_about(folder), **changes))


def cut_weights(folder: Path) -> None:
    weights = folder / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])


def write_no_weights(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(b"no weights")
    replace_about(folder, weights_digest=digest_of(folder))


def take_one_bucket(folder: Path) -> None:
    about = read_about(folder)
    tokens, quantiles = about.bucket_tokens[:3], about.bucket_quantiles[:3]
    replace_about(folder, num_buckets=3, bucket_tokens=tokens, bucket_quantiles=quantiles)


def change_format(folder: Path) -> None:
    about = json.loads((folder / ABOUT_FILE).read_text())
    (folder / ABOUT_FILE).write_text(json.dumps({**about, "format": "9"}))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / ABOUT_FILE).unlink(), f"no predictor: {ABOUT_FILE}"),
        (change_format, "'9' is not"),
        (cut_weights, "damaged"),
        (lambda folder: (folder / WEIGHTS_FILE).unlink(), "No such file"),
        (write_no_weights, "cannot be loaded"),
        (take_one_bucket, r"has 4 buckets, predictor\.json 3"),
        (lambda folder: replace_about(folder, num_buckets=7), "7 buckets, but lengths of"),
    ],
)
def test_a_damaged_artefact_is_refused_with_its_problem(
    damaged: Path, damage: Callable[[Path], None], problem: str
) -> None:
    damage(damaged)
    with pytest.raises(ConfigError, match=problem):
        load(damaged)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"granularity_tokens": 200}', b"[]"])
def test_garbage_instead_of_its_description_is_named(damaged: Path, content: bytes) -> None:
    (damaged / ABOUT_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="not the description of a predictor"):
        load(damaged)
