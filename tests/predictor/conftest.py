"""A small data set and a predictor trained on it, shared by tests of training and evaluation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.predictor import tiny_artefact
from tests.predictor.tiny_artefact import TARGET
from vllm_tetri.cli import main
from vllm_tetri.predictor.answers import Answer, AnswersFile
from vllm_tetri.predictor.prompts import key_of


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts that say how long their answer will be, and are as long as any other."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    with AnswersFile(path, TARGET) as file:
        for index in range(400):
            is_long = index % 2 == 0
            text = f"{'LLLL' if is_long else 'ssss'} {index:04}"
            for sample in range(1 + (index % 5 == 0)):
                tokens = rng.randint(420, 800) if is_long else rng.randint(10, 190)
                file.add(
                    Answer(
                        key=key_of(text),
                        source="made",
                        prompt=text,
                        prompt_tokens=9,
                        sample=sample,
                        tokens=tokens,
                        finish="stop",
                    )
                )
    return path


@pytest.fixture(scope="session")
def trained(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    base = tiny_artefact.make_base(tmp_path_factory.mktemp("base"))
    torch.set_num_threads(1)  # so little work is slower on more
    words = ["predictor", "train", str(answers), "--output", str(folder), "--base", str(base)]
    assert main([*words, "--learning-rate", "0.02"]) == 0
    return folder
