"""What `doctor` says of machines that lack something."""

from __future__ import annotations

import argparse

import pytest

from vllm_tetri.launch import doctor
from vllm_tetri.launch.doctor import Diagnosis, examine
from vllm_tetri.launch.machine import Machine


def diagnosis(subject: str) -> Diagnosis:
    return next(found for found in examine() if found.subject == subject)


def test_everything_that_is_not_ok_comes_with_advice() -> None:
    assert all(found.advice for found in examine() if found.severity != "OK")


@pytest.mark.parametrize(
    ("version", "severity"),
    [(None, "FAIL"), ("0.1.0", "FAIL"), (f"{doctor.SUPPORTED_VLLM[0]}+cpu", "OK")],
)
def test_vllm_is_judged_by_the_tested_versions(
    monkeypatch: pytest.MonkeyPatch, version: str | None, severity: str
) -> None:
    monkeypatch.setattr(doctor, "vllm_version", lambda: version)
    assert diagnosis("vllm").severity == severity


def test_status_is_1_only_when_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Diagnosis("a", "b", "WARN", "c")])
    assert doctor.run(argparse.Namespace()) == 0
    monkeypatch.setattr(doctor, "examine", lambda: [Diagnosis("a", "b", "FAIL", "do c")])
    assert doctor.run(argparse.Namespace()) == 1
    assert "do c" in capsys.readouterr().out


def test_port_in_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_port_free", lambda port: False)
    assert diagnosis("ports").severity == "WARN"


def test_vllm_counts_the_gpus_of_a_gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_cpu_build", lambda: False)
    monkeypatch.setattr(doctor, "vllm_version", lambda: doctor.SUPPORTED_VLLM[0])
    for gpus, severity in ((("2", "10"), "OK"), ((), "WARN")):
        monkeypatch.setattr(doctor, "inspect", lambda gpus=gpus: Machine((0,), gpus, 1))
        assert diagnosis("gpus").severity == severity
