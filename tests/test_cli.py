"""The `vllm-tetri` command."""

from __future__ import annotations

import importlib
import subprocess

import pytest

from vllm_tetri import __version__, cli

LISTED = [command for command in cli.COMMANDS if command.group]


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_command_explains_itself(
    command: cli.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command.name.split(), "--help"])
    assert end.value.code == 0
    assert command.example in capsys.readouterr().out


def test_the_overview_groups_the_commands_that_users_need(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert len(output.splitlines()) <= 40
    for command in cli.COMMANDS:
        assert (f"  {command.name:<11} {command.summary}\n" in output) is bool(command.group)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["statu"], "unknown command 'statu'; did you mean 'status'?"),
        (["fly"], "unknown command 'fly'; vllm-tetri --help lists them"),
        (["predictor", "fly"], "unknown command 'predictor'; vllm-tetri --help lists them"),
        (["up", "model", "--mode=split", "--prefill=0", "--decode=0"], "no instance to start"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_error_is_one_line_with_a_hint(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETRI_SECRET_FILE", "")  # `up` names one to its children
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"vllm-tetri: {hint}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        (["sim", "--help"], 0, "vllm-tetri sim plan"),  # a command names its sub-commands
        (["router", "--max-inflight", "3"], 2, "did you mean --max-in-flight?"),
        (["up", "model", "--tensor-parallel-size", "2"], 2, "`vllm serve` follow a bare --"),
        (["router", "--xyzzy", "3"], 2, "see vllm-tetri router"),
        (["router", "--max_in_flight=a_b"], 2, "--max-in-flight: 'a_b' is not"),
        (["router", "--max_in_flight", '--a {"b_c": 1}'], 2, """'--a {"b_c": 1}' is not"""),
    ],
)
def test_options_are_explained(
    words: list[str], status: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == status
    assert shown in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["sim", "doctor"])
def test_ctrl_c_ends_a_command_without_a_traceback(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    (command,) = (each for each in cli.COMMANDS if each.name == name)
    monkeypatch.setattr(importlib.import_module(command.module), "run", interrupted)
    assert cli.main(name.split()) == 130
    assert capsys.readouterr().err == ""


def test_the_completion_script_knows_commands_and_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert all(command.name in script for command in LISTED)
    assert "--max-in-flight" in script


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vllm-tetri {__version__}\n"
