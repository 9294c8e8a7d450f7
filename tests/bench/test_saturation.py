"""`vllm-tetri bench saturation` with a stand-in for the instance."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.bench.fake_instance import PROFILE
from tests.launch.fakes import is_alive
from vllm_tetri import cli
from vllm_tetri.bench import saturation
from vllm_tetri.engine.profile import read_file

FAKE = Path(__file__).parent / "fake_instance.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("vllm_tetri.launch.plan.SERVE", (sys.executable, str(FAKE)))
    monkeypatch.setattr("vllm_tetri.bench.saturation.require_vllm", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("PYTHONPATH", str(FAKE.parent.parent.parent))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def bench(*words: str) -> int:
    return cli.main(["bench", "saturation", "/models/fake", *words])


def test_numbers_are_printed_drawn_and_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--output", str(folder / "out.svg"), "--", "--max-model-len", "1024") == 0
    shown = capsys.readouterr().out
    assert "fake on abacus" in shown
    assert "measuring" in shown
    assert "chunks of 384 tokens" in shown
    assert "█" in shown
    picture = (folder / "out.svg").read_text()
    for text in ("chunk of 384", "requests per step", "tokens per step", "context of 512 tokens"):
        assert text in picture
    assert read_file(folder / "out.json").profile == PROFILE
    assert json.loads((folder / "out.json").read_text())["conditions"]["device"] == "abacus"


def test_nothing_is_left_behind(folder: Path) -> None:
    assert bench("--output", str(folder / "out.png")) == 0
    assert (folder / "out.png").read_bytes()[:4] == b"\x89PNG"
    pids = [int(word) for word in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(map(is_alive, pids))
    assert list((folder / "temporary").iterdir()) == []


def test_the_instance_measures_every_kind_of_step(folder: Path) -> None:
    assert bench("--output", str(folder / "out.svg"), "--", "--dtype", "x") == 0
    argv = (folder / "pids.argv").read_text()
    for words in ("/models/fake", "--role both", "--tetri-tbt-slo 1", "--dtype x"):
        assert words in argv


def test_it_takes_as_many_cores_as_it_is_told() -> None:
    everything = saturation.machine_with(None)
    assert len(saturation.machine_with(1).cores) == 1
    assert set(saturation.machine_with(1).cores) <= set(everything.cores)


def test_an_instance_that_ends_is_quoted(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DIES", "1")
    assert bench("--output", str(folder / "out.svg")) == 2
    assert "no such model" in capsys.readouterr().err
    assert not (folder / "out.svg").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--output", "picture.pdf"), ".svg or .png"),
        (("--output", "/no/such/folder/x.svg"), "there is no folder"),
        (("--cores", "0"), "--cores 0: must be between 1 and"),
        (("--cores", "99999"), "must be between 1 and"),
        (("--", "--port", "1"), "--port cannot be given"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    complaint: str,
) -> None:
    monkeypatch.chdir(folder)
    assert bench(*words) == 2
    assert complaint in capsys.readouterr().err
    assert not (folder / "pids").exists()


def test_without_matplotlib_it_says_how_to_get_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("--output", str(folder / "out.svg")) == 2
    assert "pip install 'vllm-tetri[bench]'" in capsys.readouterr().err
    assert not (folder / "pids").exists()
