"""The `vllm-tetri` command."""

from __future__ import annotations

import importlib

import pytest

from vllm_tetri import __version__, cli


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_command_explains_itself(
    command: cli.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(command.module)
    assert callable(module.run)

    with pytest.raises(SystemExit) as end:
        cli.main([*command.name.split(), "--help"])

    assert end.value.code == 0
    assert command.example in capsys.readouterr().out


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0

    output = capsys.readouterr().out
    assert all(command.summary in output for command in cli.COMMANDS)


@pytest.mark.parametrize("words", [["fly"], ["bench", "fly"], ["bench", "--fly"]], ids=" ".join)
def test_unknown_command_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert repr(" ".join(words)) in error


@pytest.mark.parametrize(("words", "status"), [(["bench"], 2), (["bench", "--help"], 0)])
def test_commands_of_two_words_are_listed_by_the_first(
    words: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == status

    output = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert (command.summary in output) is command.name.startswith("bench ")


def test_an_error_of_ours_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "model", "--mode=split", "--prefill=0", "--decode=0"]) == 2

    error = capsys.readouterr().err
    assert error.startswith("vllm-tetri: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["bench decisions", "sim", "bench suite"])
def test_ctrl_c_ends_a_command_without_a_traceback(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    (command,) = (each for each in cli.COMMANDS if each.name == name)
    monkeypatch.setattr(importlib.import_module(command.module), "run", interrupted)

    assert cli.main(name.split()) == 130

    assert capsys.readouterr().err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0

    assert capsys.readouterr().out == f"vllm-tetri {__version__}\n"
