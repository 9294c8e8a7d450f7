"""A real instance measures itself before its first request, and remembers it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import MODEL, SERVE, Process, answers, free_port
from tests.tiny_model import tiny_model
from vllm_tetri.engine.profile import read_file

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ANSWER_TOKENS = 8


class Measuring(Process):
    """One instance of role both with an SLO, so that it measures all kinds of steps."""

    def __init__(self, folder: Path, name: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            ["vllm.entrypoints.cli.main", "serve", str(tiny_model()), "--port", str(self.port),
             *SERVE, "--role", "both", "--tetri-tbt-slo", "0.2",
             "--tetri-control", f"tcp://127.0.0.1:{free_port()}"],
            folder / f"{name}.log",
            TETRI_CACHE=str(folder / "cache"),
        )  # fmt: skip

    def says(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")


def profiles(folder: Path) -> list[Path]:
    return list(folder.glob("cache/profiles/*"))


def test_ctrl_c_ends_an_instance_that_measures(tmp_path: Path) -> None:
    instance = Measuring(tmp_path, "stopped")
    instance.wait_for(lambda: instance.says("measuring what steps"), "measuring")
    below = instance.tree()
    instance.stop()
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive
    assert all(path.suffix == ".json" for path in profiles(tmp_path))


def test_it_measures_once_and_serves_requests_that_came_meanwhile(tmp_path: Path) -> None:
    first = Measuring(tmp_path, "first")
    try:
        first.wait_for(lambda: answers(f"{first.url}/health"), "the instance")
        text = complete(first.url)
        assert first.says("measuring what steps")
    finally:
        first.stop()
    (path,) = profiles(tmp_path)
    found = read_file(path)
    assert found.profile.curve
    assert found.profile.decodes
    assert found.profile.chunk_tokens % 128 == 0  # blocks of vLLM's CPU backend
    assert found.conditions["model"] == str(tiny_model())

    again = Measuring(tmp_path, "again")
    try:
        again.wait_for(lambda: answers(f"{again.url}/health"), "the instance")
        assert complete(again.url) == text
        assert again.says("profile from")
        assert not again.says("measuring what steps")
    finally:
        again.stop()


def complete(url: str) -> str:
    body = {"model": MODEL, "prompt": "work", "max_tokens": ANSWER_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        content = json.load(answer)
    assert content["usage"]["completion_tokens"] == ANSWER_TOKENS
    text: str = content["choices"][0]["text"]
    return text
