"""Five classes of requests from a data set in ShareGPT's format."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from examples.benchmarks import sharegpt
from examples.benchmarks.classes import CLASSES, PLAIN, schedule

LENGTHS = {"lpld": (512, 128), "lphd": (3, 129), "hpld": (513, 128), "hphd": (513, 129)}


def said(kind: str, tokens: int) -> dict[str, str]:
    return {"from": kind, "value": " ".join(["word"] * tokens)}


def tokenize(text: str) -> list[int]:
    return [1000] * len(text.split())


CONVERSATIONS = [
    # A turn without an answer, and an answer to nothing, are no pairs.
    {"conversations": [said("gpt", 5), said("human", p), said("gpt", out), said("human", 7)]}
    for p, out in LENGTHS.values()
]


@pytest.fixture(params=["list.json", "lines.jsonl", "list.json.gz", "archive.tar.gz"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    raw = json.dumps(CONVERSATIONS).encode()
    if path.suffix == ".jsonl":
        raw = "\n".join(map(json.dumps, CONVERSATIONS)).encode()
    if ".tar" in path.name:
        with tarfile.open(path, "w:gz") as archive:
            for place, each in enumerate(CONVERSATIONS):
                content = json.dumps(each).encode()
                member = tarfile.TarInfo(f"{place}.json")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return path
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def test_pairs_of_any_form_are_classed_by_the_papers_thresholds(file: Path) -> None:
    pairs = sharegpt.read(file, tokenize, 2048)
    assert pairs.facts() == {**dict.fromkeys(PLAIN, 1), "mixed": 4}
    for name, lengths in LENGTHS.items():
        prompt, output_tokens = pairs(name, Random(0))
        assert (len(prompt), output_tokens) == lengths


def test_requests_of_a_class_are_drawn_from_its_pairs_only(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps(CONVERSATIONS))
    pairs = sharegpt.read(path, tokenize, 2048)
    for name in CLASSES:
        requests = schedule(name, 50, 2.0, "seed", pairs)
        assert requests == schedule(name, 50, 2.0, "seed", pairs)
        classes = Counter(
            sharegpt.class_of(len(each.prompt), each.output_tokens) for each in requests
        )
        assert set(classes) == (set(PLAIN) if name == "mixed" else {name})
        # The same prompt comes again, and no prefix cache has it.
        assert len({each.prompt[0] for each in requests}) > 25
        assert all(set(each.prompt[1:]) == {1000} for each in requests)


def test_what_does_not_fit_the_window_is_left_out_and_a_class_without_pairs_is_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps(CONVERSATIONS))
    with pytest.raises(ValueError, match="no pair of lpld, hpld, hphd"):
        sharegpt.read(path, tokenize, 600)
    path.write_text('[{"text": "another format"}]')
    with pytest.raises(ValueError, match="ShareGPT"):
        sharegpt.read(path, tokenize, 2048)
