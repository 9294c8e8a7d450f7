"""What `doctor` says of machines that lack something."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from vllm_tetri.launch import doctor, machine
from vllm_tetri.launch.doctor import Finding, Verdict, examine


def finding(subject: str) -> Finding:
    return next(found for found in examine() if found.subject == subject)


def test_everything_that_is_not_ok_comes_with_advice() -> None:
    assert all(found.advice for found in examine() if found.verdict is not Verdict.OK)


@pytest.mark.parametrize(
    ("version", "verdict"),
    [(None, Verdict.FAIL), ("0.1.0", Verdict.FAIL), (f"{doctor.SUPPORTED_VLLM[0]}+cpu", "OK")],
)
def test_vllm_is_judged_by_the_tested_versions(
    monkeypatch: pytest.MonkeyPatch, version: str | None, verdict: str
) -> None:
    monkeypatch.setattr(doctor, "vllm_version", lambda: version)

    assert finding("vllm").verdict == verdict


def test_status_is_1_only_when_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("a", Verdict.WARN, "b", "c")])
    assert doctor.run(argparse.Namespace()) == 0

    monkeypatch.setattr(doctor, "examine", lambda: [Finding("a", Verdict.FAIL, "b", "do c")])
    assert doctor.run(argparse.Namespace()) == 1
    assert "do c" in capsys.readouterr().out


def test_port_in_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_port_free", lambda port: False)

    assert finding("ports").verdict is Verdict.WARN


def test_gpus_are_counted_by_device_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    assert machine.gpus(tmp_path) == ("2", "10")


def test_visible_devices_limit_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")

    assert machine.gpus(tmp_path) == ("3", "1")
