"""What `doctor` says of machines that lack something."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from vllm_tetri import TESTED_VLLM
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch import doctor, machine
from vllm_tetri.launch.doctor import Diagnosis, examine
from vllm_tetri.launch.machine import ServeOptions


def diagnosis(subject: str) -> Diagnosis:
    return next(found for found in examine() if found.subject == subject)


def test_everything_that_is_not_ok_comes_with_advice() -> None:
    assert all(found.advice for found in examine() if not found.is_fine)


@pytest.fixture(autouse=True)
def fitting_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is not asked, which takes seconds: `test_machine.py` does."""
    monkeypatch.setattr(machine, "ask_vllm", lambda: ServeOptions(frozenset()))


@pytest.mark.parametrize(
    ("version", "is_fine", "problem"),
    [(None, False, "FAIL"), (f"{TESTED_VLLM[0]}.2+cpu", True, "WARN"), ("0.99.0", False, "WARN")],
)
def test_vllm_is_judged_by_the_tested_versions(
    monkeypatch: pytest.MonkeyPatch, version: str | None, is_fine: bool, problem: str
) -> None:
    monkeypatch.setattr(machine, "vllm_version", lambda: version)
    found = diagnosis("vllm")
    assert (found.is_fine, found.problem) == (is_fine, problem)


def test_a_vllm_that_refuses_a_role_fails_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> ServeOptions:
        raise ConfigError("--role does not fit vLLM 0.99.0: Request.priority is missing")

    monkeypatch.setattr(machine, "vllm_version", lambda: "0.99.0")
    monkeypatch.setattr(machine, "ask_vllm", refuse)
    found = diagnosis("vllm")
    assert (found.problem, "Request.priority is missing" in found.advice) == ("FAIL", True)


def test_status_is_1_only_when_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = argparse.Namespace(model=None)
    monkeypatch.setattr(doctor, "examine", lambda: [Diagnosis(False, "a", "b", "c")])
    assert doctor.run(plain) == 0
    monkeypatch.setattr(doctor, "examine", lambda: [Diagnosis(False, "a", "b", "do c", "FAIL")])
    assert doctor.run(plain) == 1
    assert "do c" in capsys.readouterr().out


def test_port_in_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_port_free", lambda port: False)
    assert not diagnosis("ports").is_fine


def test_vllm_counts_the_gpus_of_a_gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_cpu_build", lambda: False)
    monkeypatch.setattr(machine, "vllm_version", lambda: TESTED_VLLM[0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,10")
    for platform, num_gpus, is_fine, words in (
        ("cuda", 2, True, "2, 10 (cuda)"),
        ("rocm", 2, False, "every instance serves alone"),
        ("xpu", 2, False, "every instance serves alone"),
        ("cuda", 1, False, "CUDA_VISIBLE_DEVICES=2,10 names 2 GPUs, and vLLM can use 1"),
    ):
        answer = ServeOptions(frozenset(), num_gpus=num_gpus, platform=platform)
        monkeypatch.setattr(machine, "ask_vllm", lambda answer=answer: answer)
        found = diagnosis("gpus")
        assert found.is_fine == is_fine
        assert words in (found.fact if is_fine else found.advice)


@pytest.mark.parametrize(
    ("answer", "is_fine", "words"),
    [
        ("", True, "KV of m travels"),
        ("it is multimodal", False, "none of m, since it is multi"),
        (None, False, "not known before m is loaded"),
    ],
)
def test_a_model_is_told_to_be_handed_over_or_not(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str | None,
    is_fine: bool,
    words: str,
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(machine, "ask", lambda *given: [asked.append(given), answer][1])
    monkeypatch.setattr(doctor, "examine", list)
    assert doctor.run(argparse.Namespace(model="m", tail=["--enable-lora"])) == 0
    assert asked == [("vllm_tetri.engine.identity", ["--model", "m", "--enable-lora"])]
    out = capsys.readouterr().out
    assert words in out
    assert out.startswith("OK" if is_fine else "WARN")


def test_options_that_vllm_refuses_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("after --: unrecognized arguments: --x")

    monkeypatch.setattr(machine, "ask", refuse)
    found = doctor.hand_over("m", ["--x"])
    assert (found.problem, found.advice) == ("FAIL", "after --: unrecognized arguments: --x")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "alone"), [((), ""), (("--runner", "pooling"), "it generates no text")]
)
def test_vllm_is_asked_without_loading_weights(
    tiny_llama: Path, tmp_path: Path, words: tuple[str, ...], alone: str
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama / name, tmp_path)
    assert machine.ask("vllm_tetri.engine.identity", ["--model", str(tmp_path), *words]) == alone
