"""What is run, and what is not run again."""

from __future__ import annotations

import json
import sys

import pytest

from tests.bench.suite.stage import Stage, run
from vllm_tetri import cli
from vllm_tetri.bench.suite.experiments import EXPERIMENTS


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
