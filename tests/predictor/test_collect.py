"""Collecting lengths of answers from an endpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.predictor.fake_endpoint import HANGS, REFUSED, FakeEndpoint, running
from vllm_tetri.cli import main
from vllm_tetri.errors import ConfigError
from vllm_tetri.predictor import endpoint as endpoint_module
from vllm_tetri.predictor.answers import read_answers

TIMEOUT_S = 30


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    monkeypatch.setattr(endpoint_module, "_BACKOFF_S", 0.01)
    with running() as fake:
        yield fake


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt": "x" * length} for length in range(1, 21)]))
    return path


def collect(endpoint: FakeEndpoint, prompts: Path, *more: str) -> int:
    words = ["predictor", "collect", str(prompts), "--url", endpoint.url]
    return main([*words, "--output", str(answers_of(prompts)), *more])


def answers_of(prompts: Path) -> Path:
    return prompts.parent / "answers.jsonl"


def test_lengths_are_kept_with_how_they_were_asked_for(
    endpoint: FakeEndpoint, prompts: Path
) -> None:
    assert collect(endpoint, prompts, "--max-tokens", "15", "--temperature", "0.3") == 0

    answers = read_answers(answers_of(prompts))
    assert {len(each.prompt): each.lengths for each in answers.asked} == {
        length: (min(length, 15),) for length in range(1, 21)
    }
    target = answers.target
    assert (target.model, target.temperature, target.max_tokens) == ("fake", 0.3, 15)
    assert (target.before, target.after) == ("<user>", "<end>")
    assert {body["temperature"] for body in endpoint.asked} == {0.3}
    assert answers_of(prompts).read_text().count('"finish":"length"') == 5


def test_second_run_asks_only_for_what_is_missing(endpoint: FakeEndpoint, prompts: Path) -> None:
    collect(endpoint, prompts, "--limit", "5", "--samples", "2")
    first = endpoint.prompts()
    endpoint.asked.clear()

    assert collect(endpoint, prompts) == 0

    assert len(first) == 10
    assert len(endpoint.asked) == 15
    assert not set(first) & set(endpoint.prompts())
    lengths = [each.lengths for each in read_answers(answers_of(prompts)).asked]
    assert sorted(map(len, lengths)) == [1] * 15 + [2] * 5


def test_line_cut_off_by_a_kill_is_asked_again(endpoint: FakeEndpoint, prompts: Path) -> None:
    collect(endpoint, prompts)
    content = answers_of(prompts).read_bytes()
    answers_of(prompts).write_bytes(content[:-20])
    endpoint.asked.clear()

    collect(endpoint, prompts)

    assert len(endpoint.asked) == 1
    assert len(read_answers(answers_of(prompts)).asked) == 20


def test_file_of_another_target_is_not_added_to(
    endpoint: FakeEndpoint, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collect(endpoint, prompts)
    before = answers_of(prompts).read_bytes()

    assert collect(endpoint, prompts, "--temperature", "0") == 2

    assert "temperature 0.7, not 0.0" in capsys.readouterr().err
    assert answers_of(prompts).read_bytes() == before


def test_busy_endpoint_is_asked_again(endpoint: FakeEndpoint, prompts: Path) -> None:
    endpoint.failures = 2

    assert collect(endpoint, prompts) == 0

    assert len(read_answers(answers_of(prompts)).asked) == 20


def test_endpoint_that_goes_away_leaves_a_file_to_go_on_from(
    endpoint: FakeEndpoint, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collect(endpoint, prompts, "--limit", "5")
    endpoint.is_gone = True

    assert collect(endpoint, prompts) == 2

    assert "the same command goes on from here" in capsys.readouterr().err
    assert len(read_answers(answers_of(prompts)).asked) == 5


def test_prompt_that_the_endpoint_refuses_is_counted(
    endpoint: FakeEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"good\n{REFUSED}\n")

    assert collect(endpoint, path) == 0

    assert "1 refused, the first with: 400 too long" in capsys.readouterr().out
    assert len(read_answers(answers_of(path)).asked) == 1


def test_nothing_but_refusals_is_a_failure(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(REFUSED)

    assert collect(endpoint, path) == 1


def test_endpoint_without_template_and_plain_prompts(endpoint: FakeEndpoint, prompts: Path) -> None:
    endpoint.has_template = False
    collect(endpoint, prompts)
    assert read_answers(answers_of(prompts)).target.before == ""

    answers_of(prompts).unlink()
    collect(endpoint, prompts, "--plain")

    assert read_answers(answers_of(prompts)).target.route == "completions"
    assert "prompt" in endpoint.asked[-1]


def test_interrupt_lets_answers_under_way_end(endpoint: FakeEndpoint, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"{HANGS} {index}" for index in range(20)))
    words = [sys.executable, "-m", "vllm_tetri.cli", "predictor", "collect", str(path)]
    words += ["--url", endpoint.url, "--output", str(answers_of(path)), "--concurrency", "3"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        assert endpoint.hung.wait(TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert any("finishing" in line for line in process.stdout)
        endpoint.may_go.set()
        said = process.stdout.read()
        assert process.wait(TIMEOUT_S) == 130
    finally:
        process.kill()
        process.communicate()

    assert "stopped after 3 answers" in said
    assert len(read_answers(answers_of(path)).asked) == 3


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (("--samples", "0"), "--samples 0: must be at least 1"),
        (("--temperature", "-1"), "--temperature -1.0: must be within 0 and 2"),
        (("--output", "/nowhere/answers.jsonl"), "there is no folder /nowhere"),
    ],
)
def test_wrong_option_is_named(
    endpoint: FakeEndpoint,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    complaint: str,
) -> None:
    assert collect(endpoint, prompts, *more) == 2

    assert complaint in capsys.readouterr().err
    assert not endpoint.asked


def test_endpoint_that_is_not_there_is_named(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeEndpoint()
    fake.url = "http://127.0.0.1:9"

    assert collect(fake, prompts) == 2

    assert "--url http://127.0.0.1:9: no answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (b'{"prompt": "an item"}\n', "line 1: not written by predictor collect"),
        (b"\xff\n", "line 1"),
    ],
)
def test_file_that_is_none_of_answers_is_named(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=complaint):
        read_answers(path)
