"""The runner of `make gpu`: verdicts, limits, the table and the result file; without a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.eventually import eventually
from tests.gpu.catalogue import STEPS
from tests.gpu.install import install
from tests.gpu.pack import LIBRARIES, PINS, seal
from tests.gpu.speed import diverges

ROOT = Path(__file__).parents[2]
STEPS_OF_A_TEST = """
import subprocess, sys, time
from tests.gpu.catalogue import Skip, Step

LEFT = [sys.executable, "-c", "import time; time.sleep(600)"]

def good(device, folder):
    return {"GB/s": 3.5, "summary": f"fine on {device}"}

def wrong(device, folder):
    raise AssertionError("layer 3 differs")

def absent(device, folder):
    raise Skip("no weights here")

def hangs(device, folder):
    left = subprocess.Popen(LEFT, start_new_session=True)
    (folder / "pid").write_text(str(left.pid))
    try:
        time.sleep(600)
    finally:
        (folder / "stopped").touch()

def dies(device, folder):
    import os
    os._exit(7)

def steps(*names):
    limits = {"cuda": 60.0, "cpu": 60.0}
    plain = ("good", "wrong", "absent", "dies")
    made = {name: Step("A", name, f"own:{name}", limits) for name in plain}
    made["hangs"] = Step("A", "hangs", "own:hangs", {"cuda": 3.0, "cpu": 3.0})
    made["slow"] = Step("A", "hangs", "own:hangs", limits)
    made["gpu"] = Step("B", "gpu", "own:good", limits, "a CPU has no graphs")
    return [made[name] for name in names]
"""


def start(tmp_path: Path, *names: str, words: str = "--device cpu") -> subprocess.Popen[str]:
    """Run the named steps as the command does."""
    (tmp_path / "own.py").write_text(STEPS_OF_A_TEST)
    options = [*words.split(), "--output", str(tmp_path / "out")]
    program = f"from tests.gpu.run import main; from own import steps; \
raise SystemExit(main({options!r}, steps(*{names!r})))"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-c", program],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": path},
    )


def go(tmp_path: Path, *names: str, words: str = "--device cpu") -> tuple[int, str, Any]:
    """Exit status, output and result file of a run."""
    with start(tmp_path, *names, words=words) as running:
        output, _ = running.communicate(timeout=90)
    result = tmp_path / "out" / "results.json"
    return running.returncode, output, json.loads(result.read_text()) if result.exists() else None


def test_what_passes_and_what_is_skipped(tmp_path: Path) -> None:
    status, output, content = go(tmp_path, "good", "absent", "gpu")
    assert status == 0, output
    assert "2 SKIP" in output
    rows = {row["step"]: row for row in content["steps"]}
    assert rows["A good"]["figures"] == {"GB/s": 3.5}
    assert rows["A good"]["reason"] == "fine on cpu"
    assert rows["A absent"]["reason"] == "no weights here"
    assert rows["B gpu"]["reason"] == "a CPU has no graphs"
    assert content["conditions"]["device"]["name"].startswith("CPU")
    assert content["conditions"]["versions"]["torch"]


def test_a_failing_step_fails_the_run_and_the_next_one_runs(tmp_path: Path) -> None:
    status, output, content = go(tmp_path, "wrong", "dies", "good")
    assert status == 1
    assert [row["verdict"] for row in content["steps"]] == ["FAIL", "FAIL", "PASS"], output
    assert content["steps"][0]["reason"] == "AssertionError: layer 3 differs"
    assert "ended with 7" in content["steps"][1]["reason"]


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    status, output, content = go(tmp_path, "hangs", "good")
    assert status == 1
    assert [row["verdict"] for row in content["steps"]] == ["FAIL", "PASS"], output
    assert content["steps"][0]["reason"] == "not done in 3 s, and ended"
    left = tmp_path / "out" / "A-hangs" / "pid"
    assert not psutil.pid_exists(int(left.read_text()))
    assert left.with_name("stopped").exists()  # it could end its servers before it was killed
    assert time.monotonic() - begin_s < 60


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_shows_what_has_run(tmp_path: Path) -> None:
    left = tmp_path / "out" / "A-hangs" / "pid"
    with start(tmp_path, "good", "slow", "good") as running:
        pid = int(eventually(lambda: left.exists() and left.read_text(), timeout_s=60))
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "interrupted in A hangs" in output
    assert output.count("PASS  A good") == 2  # when it ended, and in the table
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("words", "said"),
    [("D --device cpu", "there is no stage D"), ("A --only x", "there is no step x")],
)
def test_what_does_not_exist_is_named(tmp_path: Path, words: str, said: str) -> None:
    status, output, content = go(tmp_path, "good", words=words)
    assert (status, content) == (2, None)
    assert said in output


@pytest.mark.parametrize(
    ("found", "words", "said"),
    [
        ({"count": 0, "all": 0}, "", "set DEVICE=cpu"),
        ({"count": 0, "all": 2}, "--gpu 7", "GPU 7 does not exist: this host has 2"),
        ({"count": 1, "all": 1, "free_gib": 3.0, "total_gib": 80.0, "name": "H"}, "", "3 GiB free"),
    ],
)
def test_a_device_that_will_not_do_is_one_line(
    tmp_path: Path, found: dict[str, Any], words: str, said: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import json, runpy, sys\n"
        f"if 'tests.gpu.device' in sys.orig_argv:\n"
        f"    print(json.dumps({ {'torch': '2', **found}!r})); sys.stdout.flush()\n"
        "    import os; os._exit(0)\n"
    )
    status, output, content = go(tmp_path, "good", words=f"--device cuda {words}")
    assert (status, content) == (2, None), output
    (line,) = output.strip().splitlines()
    assert line.startswith("gpu: ")
    assert said in line


def test_every_step_has_a_limit_and_can_be_named() -> None:
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    for step in STEPS:
        assert step.limit_s["cuda"] > 0
        assert step.not_on_cpu or step.limit_s["cpu"] > 0


def test_every_pin_has_a_hash() -> None:
    for pins in PINS.glob("*.txt"):
        for line in pins.read_text().splitlines():
            assert "==" in line
            assert len(line.partition(" --hash=sha256:")[2]) == 64
    assert set(LIBRARIES) == {"b", "c"}


def test_a_changed_file_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # a host without vLLM
    assert install(tmp_path, tmp_path / "scratch") is None
    part = tmp_path / ".gpu" / "a"
    part.mkdir(parents=True)
    (part / "x.whl").write_bytes(b"PK")
    seal(part, [part / "x.whl"])
    (part / "x.whl").write_bytes(b"PK and more")
    with pytest.raises(ValueError, match="not the file that was packed"):
        install(tmp_path, tmp_path / "scratch")


def output_of(tokens: list[int], top: dict[str, float]) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-1.0] * len(tokens), "top_logprobs": [top] * len(tokens)}
    return {"token_ids": tokens, "logprobs": logprobs}


def test_outputs_may_only_part_at_a_near_tie() -> None:
    tie, clear = {"a": -1.0, "b": -1.05}, {"a": -1.0, "b": -2.0}
    assert not diverges(output_of([1, 2], clear), output_of([1, 2], clear))
    assert not diverges(output_of([1, 9], tie), output_of([1, 2], tie))
    assert "token 1: 9, not 2" in diverges(output_of([1, 9], clear), output_of([1, 2], clear))
    assert "1 tokens instead of 2" in diverges(output_of([1], tie), output_of([1, 2], tie))
