"""Loading a predictor and asking it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.predictor import tiny_artefact
from tests.predictor.tiny_artefact import TARGET, WINDOW_TOKENS
from vllm_tetri.errors import ConfigError
from vllm_tetri.predictor.artefact import (
    ABOUT_FILE,
    WEIGHTS_FILE,
    Artefact,
    digest_of,
    load,
    median_bucket,
    read_about,
    write_about,
)


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
    assert [median_bucket(row) for row in rows] == [each.bucket for each in predictions]
    assert {(each.num_buckets, each.granularity_tokens) for each in predictions} == {(4, 200)}
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


def test_text_that_is_no_unicode_does_not_stop_it(artefact: Artefact) -> None:
    decoded = b"\xff\xfe caf\xe9".decode("utf-8", "replace")

    assert artefact.encode(decoded)


def test_folder_that_is_no_artefact_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no predictor: {ABOUT_FILE}"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"granularity_tokens": 200}', b"[]"])
def test_garbage_instead_of_its_description_is_named(damaged: Path, content: bytes) -> None:
    (damaged / ABOUT_FILE).write_bytes(content)

    with pytest.raises(ConfigError, match="not written by predictor train"):
        load(damaged)


def test_other_format_is_refused(damaged: Path) -> None:
    about = json.loads((damaged / ABOUT_FILE).read_text())
    (damaged / ABOUT_FILE).write_text(json.dumps({**about, "format": "9"}))

    with pytest.raises(ConfigError, match="'9' is not"):
        read_about(damaged)


def test_truncated_weights_are_refused(damaged: Path) -> None:
    weights = damaged / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])

    with pytest.raises(ConfigError, match="damaged"):
        load(damaged)


def test_missing_weights_are_refused(damaged: Path) -> None:
    (damaged / WEIGHTS_FILE).unlink()

    with pytest.raises(ConfigError, match="No such file"):
        load(damaged)


def test_weights_that_do_not_load_are_refused(damaged: Path) -> None:
    (damaged / WEIGHTS_FILE).write_bytes(b"no weights")
    about = read_about(damaged)
    write_about(damaged, msgspec.structs.replace(about, weights_digest=digest_of(damaged)))

    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(damaged)


def test_model_with_another_number_of_buckets_is_refused(damaged: Path) -> None:
    about = read_about(damaged)
    fewer = msgspec.structs.replace(
        about,
        num_buckets=3,
        bucket_tokens=about.bucket_tokens[:3],
        bucket_quantiles=about.bucket_quantiles[:3],
    )
    write_about(damaged, fewer)

    with pytest.raises(ConfigError, match=r"tells 4 buckets apart, predictor\.json names 3"):
        load(damaged)


def test_description_that_contradicts_itself_is_refused(damaged: Path) -> None:
    write_about(damaged, msgspec.structs.replace(read_about(damaged), num_buckets=7))

    with pytest.raises(ConfigError, match="7 buckets, but lengths of"):
        read_about(damaged)
