"""What `doctor` says of machines that lack something."""

from __future__ import annotations

import argparse

import pytest

from vllm_tetri.launch import doctor, machine
from vllm_tetri.launch.doctor import Diagnosis, examine
from vllm_tetri.launch.machine import Machine


def diagnosis(subject: str) -> Diagnosis:
    return next(found for found in examine() if found.subject == subject)


def test_everything_that_is_not_ok_comes_with_advice() -> None:
    assert all(found.advice for found in examine() if not found.is_fine)


@pytest.mark.parametrize(
    ("version", "is_fine"),
    [(None, False), ("0.1.0", False), (f"{doctor.SUPPORTED_VLLM[0]}+cpu", True)],
)
def test_vllm_is_judged_by_the_tested_versions(
    monkeypatch: pytest.MonkeyPatch, version: str | None, is_fine: bool
) -> None:
    monkeypatch.setattr(machine, "vllm_version", lambda: version)
    found = diagnosis("vllm")
    assert (found.is_fine, found.problem) == (is_fine, "FAIL")


def test_status_is_1_only_when_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Diagnosis(False, "a", "b", "c")])
    assert doctor.run(argparse.Namespace()) == 0
    monkeypatch.setattr(doctor, "examine", lambda: [Diagnosis(False, "a", "b", "do c", "FAIL")])
    assert doctor.run(argparse.Namespace()) == 1
    assert "do c" in capsys.readouterr().out


def test_port_in_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_port_free", lambda port: False)
    assert not diagnosis("ports").is_fine


def test_vllm_counts_the_gpus_of_a_gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_cpu_build", lambda: False)
    monkeypatch.setattr(machine, "vllm_version", lambda: doctor.SUPPORTED_VLLM[0])
    for gpus in (("2", "10"), ()):
        monkeypatch.setattr(machine, "inspect", lambda gpus=gpus: Machine((0,), gpus, 1))
        assert diagnosis("gpus").is_fine == bool(gpus)
