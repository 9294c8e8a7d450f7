"""`vllm-tetri predictor serve` with a real, if ignorant, artefact."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.predictor.tiny_artefact import make
from vllm_tetri.cli import main
from vllm_tetri.predictor.artefact import load
from vllm_tetri.predictor.base import Ask
from vllm_tetri.predictor.client import PredictorProcess, serve_command
from vllm_tetri.types import Prediction

START_S = 60.0


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("artefact"))


def test_it_predicts_what_the_artefact_says_of_the_text(artefact: Path, tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    texts = ["", "a licence", "<|start|>user\na licence<|end|>\n<|start|>assistant\n", "x" * 9000]
    model = load(artefact)
    right = model.predict([model.encode(text) for text in texts])
    process = PredictorProcess(serve_command(artefact, str(tiny_llama)), 200, 4)
    found: dict[str, Prediction | None] = {}
    try:
        deadline = time.monotonic() + START_S
        while found.get("ready") is None and time.monotonic() < deadline:
            process.ask(Ask("ready", [1]))
            found.update(process.poll())
            process.wait(0.1)
            found.update(process.poll())
        for text in texts:
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            process.ask(Ask(text, token_ids))
        while not set(texts) <= set(found) and time.monotonic() < deadline:
            found.update(process.poll())
            process.wait(0.1)
    finally:
        process.close()

    assert [found[text] for text in texts] == right


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, tokenizer: Path) -> str:
    words = ["predictor", "serve", str(folder), "--tokenizer", str(tokenizer), "--nice", "0"]
    assert main([*words, "--address", f"ipc://{folder}/socket"]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_served_is_said_in_a_line(
    artefact: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no predictor" in refusal(capsys, tmp_path, tiny_llama)
    assert "--tokenizer" in refusal(capsys, artefact, tmp_path)
    truncated = make(tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "damaged" in refusal(capsys, truncated, tiny_llama)
    words = ["predictor", "serve", str(artefact), "--tokenizer", "x", "--address", "tcp://*:1"]
    assert main(words) == 2
    assert "must be ipc://PATH" in capsys.readouterr().err
    assert main([*words[:-1], "ipc://@name"]) == 2
    assert "every user of this machine" in capsys.readouterr().err
