"""`vllm-tetri bench suite`: what is run, what is not run again, and what is left behind."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from vllm_tetri import cli
from vllm_tetri.bench.suite import command as suite
from vllm_tetri.bench.suite.experiments import EXPERIMENTS, chosen, jobs_of
from vllm_tetri.bench.suite.jobs import ANSWERS, JOBS, MODEL, OUTPUT, PREDICTOR, RIVAL, Job
from vllm_tetri.bench.suite.process import _end
from vllm_tetri.errors import ConfigError

KNOWN = {MODEL: "model", OUTPUT: "out", PREDICTOR: "predictor", ANSWERS: "answers.jsonl"}
# Stands for `vllm-tetri`: notes what it is asked, and does as the file `behaviour` says.
FAKE = """
import json, os, signal, sys, time
from pathlib import Path
words, here = sys.argv[1:], Path(__file__).parent
name = words[1]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
behaviour = json.loads((here / "behaviour").read_text()).get(name, "")
if behaviour == "fail":
    print("out of luck", flush=True)
    sys.exit(3)
if behaviour == "hang":
    try:
        (here / "pid").write_text(str(os.getpid()))
        while True:
            time.sleep(0.05)
    except KeyboardInterrupt:
        (here / "ended").write_text("in good order")
        sys.exit(130)
if behaviour != "nothing":
    place = Path(words[words.index("--json" if "--json" in words else "--output") + 1])
    folder = place.parent if place.suffix else place
    (folder / f"{name}.json").write_text("{}")
"""


class Stage:
    """A folder with the fake program, and what it was asked so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "fake.py"
        self.program.write_text(FAKE)
        self.behave()

    def behave(self, **behaviour: str) -> None:
        (self.folder / "behaviour").write_text(json.dumps(behaviour))

    def calls(self) -> list[list[str]]:
        """Since the last time."""
        path = self.folder / "calls"
        found = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        path.unlink(missing_ok=True)
        return found

    def names(self) -> list[str]:
        return [words[1] for words in self.calls()]

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out" / "suite.json").read_text())
        return found


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "PROGRAM", (sys.executable, str(made.program)))
    return made


def run(*words: str, only: str = "e8,e10", model: str = "a-model") -> int:
    return cli.main(["bench", "suite", model, "--quick", "--only", only, "--output", "out", *words])


# -- the registry ------------------------------------------------------------------


def test_every_experiment_has_jobs_and_every_job_an_experiment() -> None:
    assert list(EXPERIMENTS) == [f"e{number}" for number in range(1, 14)]
    assert {name for each in EXPERIMENTS.values() for name in each.jobs} == set(JOBS)


def test_the_quick_suite_is_meant_for_a_quarter_of_an_hour() -> None:
    without = [job for job in JOBS.values() if not {PREDICTOR, ANSWERS} & {*job.quick.words}]
    assert sum(job.quick.minutes for job in without) <= 15


@pytest.mark.parametrize("is_quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("job", JOBS.values(), ids=lambda job: job.name)
def test_every_command_takes_its_options(job: Job, is_quick: bool) -> None:
    words = job.line(is_quick, {**KNOWN, RIVAL: "/bin/true"}, [])
    command = next((each for each in cli.COMMANDS if each.name == " ".join(words[:2])), None)
    assert command is not None
    own = words[2 : words.index("--")] if "--" in words else words[2:]
    assert command.tail or "--" not in words
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(command.module).add_arguments(parser)
    parser.parse_args(own)


def test_a_rival_and_options_of_vllm_go_where_they_are_of_use() -> None:
    modes = JOBS["modes"]
    with_rival = modes.line(False, {**KNOWN, RIVAL: "/r"}, ["--dtype", "float32"])
    assert with_rival[with_rival.index("--rival") + 1] == "/r"
    assert with_rival[-3:] == ["--", "--dtype", "float32"]
    assert "--rival" not in modes.line(False, KNOWN, [])
    # A small model keeps a pace there: what it computes is not the user's matter.
    assert "--dtype" not in JOBS["flip"].line(False, KNOWN, ["--dtype", "float32"])


def test_experiments_are_chosen_by_either_name() -> None:
    assert [each.name for each in chosen("e5-admission,e2")] == ["e2", "e5"]
    assert len(chosen(None)) == 13
    with pytest.raises(ConfigError, match="e14"):
        chosen("e2,e14")


def test_a_shared_job_runs_once() -> None:
    names = [job.name for job in jobs_of(chosen("e1,e11,e12,e13"))]
    assert sorted(names) == ["modes", "paper"]


# -- running -----------------------------------------------------------------------


def test_everything_is_run_and_recorded(stage: Stage) -> None:
    assert run() == 0
    assert stage.names() == ["transfer", "saturation", "handover"]
    found = stage.record()
    assert found["conditions"]["model"] == "a-model"
    assert found["conditions"]["variant"] == "quick"
    assert {"device", "cores", "vllm", "vllm_tetri", "python"} <= set(found["conditions"])
    assert {name: done["status"] for name, done in found["jobs"].items()} == {
        "transfer": "done", "saturation": "done", "handover": "done",
    }  # fmt: skip
    assert all(done["took_s"] >= 0 for done in found["jobs"].values())


def test_what_is_done_is_not_done_again(stage: Stage) -> None:
    assert run(only="e10") == 0
    stage.calls()
    assert run() == 0
    assert stage.names() == ["saturation"]
    assert run() == 0
    assert stage.names() == []


def test_a_result_that_was_deleted_is_made_again(stage: Stage) -> None:
    assert run() == 0
    stage.calls()
    (stage.folder / "out" / "transfer" / "transfer.json").unlink()
    assert run() == 0
    assert stage.names() == ["transfer"]


@pytest.mark.parametrize("behaviour", ["fail", "nothing"])
def test_one_that_fails_does_not_stop_the_others(
    stage: Stage, behaviour: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.behave(saturation=behaviour)
    assert run() == 1
    assert stage.names() == ["transfer", "saturation", "handover"]
    shown = capsys.readouterr().out
    assert "saturation failed" in shown
    assert ("out of luck" in shown) == (behaviour == "fail")
    assert stage.record()["jobs"]["saturation"]["status"] == "failed"
    stage.behave()
    assert run() == 0
    assert stage.names() == ["saturation"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["bench", "suite", "other", "--quick"], "model"),
        (["bench", "suite", "a-model"], "variant"),
        (["bench", "suite", "a-model", "--quick", "--", "--dtype", "float32"], "options"),
    ],
)
def test_a_changed_condition_is_one_line(
    stage: Stage, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    stage.calls()
    capsys.readouterr()
    words[3:3] = ["--output", "out", "--only", "e8"]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"made with {named}" in error
    assert "--output" in error
    assert stage.calls() == []


def test_another_device_is_a_changed_condition(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    monkeypatch.setattr("vllm_tetri.bench.setting.device", lambda: "another one")
    assert run() == 2
    assert "not another one" in capsys.readouterr().err


def test_a_changed_command_runs_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(only="e10") == 0
    stage.calls()
    path = stage.folder / "out" / "suite.json"
    found = stage.record()
    found["jobs"]["transfer"]["command"].append("--streams")
    path.write_text(json.dumps(found))
    assert run(only="e10") == 0
    assert stage.names() == ["transfer"]


def test_a_result_of_another_command_is_no_basis_to_go_on_from(stage: Stage) -> None:
    assert run(only="e10") == 0
    result = stage.folder / "out" / "transfer" / "transfer.json"
    stage.behave(transfer="fail")
    found = stage.record()
    found["jobs"]["transfer"]["status"] = "failed"
    path = stage.folder / "out" / "suite.json"
    path.write_text(json.dumps(found))
    assert run(only="e10") == 1
    assert result.exists()  # of the same command
    found["jobs"]["transfer"]["command"].append("--streams")
    path.write_text(json.dumps(found))
    assert run(only="e10") == 1
    assert not result.exists()


def test_a_retrained_predictor_runs_again(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    trained = stage.folder / "trained"
    trained.mkdir()
    (trained / "weights").write_text("1")
    words = ("--predictor", str(trained))
    assert run(*words, only="e3") == 0
    assert stage.names() == ["predictor"]
    assert run(*words, only="e3") == 0
    assert stage.names() == []
    (trained / "weights").write_text("22")
    assert run(*words, only="e3") == 0
    assert stage.names() == ["predictor"]
    assert "predictor: a file that it reads has changed" in capsys.readouterr().out


def test_another_model_of_the_same_name_runs_again_where_it_is_read(stage: Stage) -> None:
    (stage.folder / "model").mkdir()
    config = stage.folder / "model" / "config.json"
    config.write_text("{}")
    assert run(model="model") == 0
    stage.calls()
    config.write_text("{ }")
    assert run(model="model") == 0
    assert stage.names() == ["saturation", "handover"]


def test_a_rival_is_missed_where_it_is_of_use_and_only_adds(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    rival = ("--rival", sys.executable)
    full = ["bench", "suite", "a-model", "--only", "e12", "--output", "out"]
    assert cli.main(full) == 0
    assert capsys.readouterr().out.count("modes: without --rival") == 1
    stage.behave(modes="fail")
    assert cli.main([*full, *rival]) == 1
    assert "without --rival" not in capsys.readouterr().out
    assert (stage.folder / "out" / "modes" / "modes.json").exists()  # to go on from
    words = ["bench", "suite", "a-model", "--quick", "--only", "e8", "--output", "other"]
    assert cli.main([*words, *rival]) == 0
    assert "--rival has no effect with --quick" in capsys.readouterr().out


def test_results_do_not_depend_on_how_the_folder_is_called(stage: Stage) -> None:
    assert run(only="e8") == 0
    stage.calls()
    words = ["bench", "suite", "a-model", "--quick", "--only", "e8"]
    assert cli.main([*words, "--output", str(stage.folder / "out")]) == 0
    assert stage.calls() == []


def test_what_is_missing_for_a_job_is_said(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(only="e3,e4") == 0
    shown = capsys.readouterr().out
    assert "predictor: left out, it needs --predictor" in shown
    assert "lengths: left out, it needs --predictor and --answers" in shown
    assert stage.calls() == []


def test_a_broken_record_is_one_line(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    (stage.folder / "out").mkdir()
    (stage.folder / "out" / "suite.json").write_text('{"format": 1')
    assert run() == 2
    error = capsys.readouterr().err
    assert "suite.json" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["bench", "suite"], "MODEL"),
        (["bench", "suite", "m", "--only", "e99"], "e99"),
        (["bench", "suite", "m", "--predictor", "nowhere"], "--predictor nowhere"),
        (["bench", "suite", "m", "--rival", "nowhere"], "--rival nowhere"),
    ],
)
def test_wrong_options_are_one_line(
    stage: Stage, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert stage.calls() == []


def test_the_list_needs_no_model(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "suite", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(each.title in shown for each in EXPERIMENTS.values())


# -- the end -----------------------------------------------------------------------


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Stubborn:
    """A child that does not end until Ctrl-C was pressed three times."""

    pid = 1 << 30  # nobody's
    is_told = False

    def wait(self, timeout: float | None = None) -> int:
        if not self.is_told:
            raise KeyboardInterrupt  # the second
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    def terminate(self) -> None:
        self.is_told = True


def test_a_third_interrupt_changes_nothing() -> None:
    child = Stubborn()
    before = signal.getsignal(signal.SIGINT)
    try:
        _end(cast("subprocess.Popen[bytes]", child))
    except KeyboardInterrupt:
        pytest.fail("it left the child to itself")
    assert child.is_told
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda each: each.name)
def test_nothing_outlives_the_suite(stage: Stage, number: signal.Signals) -> None:
    stage.behave(saturation="hang")
    program = (
        "import sys; from vllm_tetri import cli; "
        "from vllm_tetri.bench.suite import command as suite; "
        f"suite.PROGRAM = (sys.executable, {str(stage.program)!r}); "
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    words = ["bench", "suite", "a-model", "--quick", "--only", "e8,e10", "--output", "out"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        cwd=stage.folder,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent)},
        start_new_session=True,
    )
    try:
        pid_file = stage.folder / "pid"
        until(lambda: pid_file.exists() and pid_file.read_text() != "")
        pid = int(pid_file.read_text())
        process.send_signal(number)
        shown, _ = process.communicate(timeout=60)
        until(lambda: not psutil.pid_exists(pid))
    finally:
        process.kill()
        process.wait()
    assert stage.record()["jobs"]["saturation"]["status"] == "interrupted"
    assert stage.names() == ["transfer", "saturation"]
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "goes on" in shown
        assert (stage.folder / "ended").read_text() == "in good order"
    stage.behave()
    assert run() == 0
    assert stage.names() == ["saturation", "handover"]
