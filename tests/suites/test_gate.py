"""The comparison of the suites, and what their `vllm` command starts."""

from __future__ import annotations

import pytest

from tests.suites.gate import compare, is_in, passed, read_allowed, table
from tests.suites.shim import command


def test_only_what_stock_passes_must_pass() -> None:
    ours = {"s": {"a.py::one": "passed", "a.py::two": "failure", "a.py::three": "failure"}}
    (row,) = compare({"s": ["a.py::one", "a.py::two"]}, ours, {})
    assert (row.stock, row.ours, row.explained, row.unexplained) == (2, 1, (), ("a.py::two",))
    assert "FAILED:  a.py::two" in table([row])


def test_a_test_that_did_not_run_is_a_difference() -> None:
    (row,) = compare({"s": ["a.py::one"]}, {"s": {}}, {})
    assert row.unexplained == ("a.py::one",)


def test_an_allowed_difference_is_shown_and_does_not_fail() -> None:
    allowed = read_allowed("# comment\na.py::two[x y]  # the reason\n")
    (row,) = compare({"s": ["a.py::two[x y]"]}, {"s": {"a.py::two[x y]": "error"}}, allowed)
    assert (row.explained, row.unexplained) == (("a.py::two[x y]",), ())


def test_a_difference_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="without a reason"):
        read_allowed("a.py::two\n")


def test_only_passed_tests_are_recorded() -> None:
    assert passed({"b": "passed", "a": "passed", "c": "skipped"}) == ["b", "a"]


def test_a_test_belongs_to_its_file_or_folder() -> None:
    assert is_in("chat/test_a.py::one", ["chat"])
    assert is_in("chat/test_a.py::one", ["chat/test_a.py"])
    assert not is_in("chat/test_ab.py::one", ["chat/test_a.py"])


def test_the_command_starts_a_cluster_with_the_options_of_the_server() -> None:
    words = ["serve", "m", "--host", "h", "--port=1", "--seed", "0"]
    words = command(words, "split", None)
    tail = words.index("--")
    assert words[:4] == ["-m", "vllm_tetri.cli", "up", "m"]
    assert {"--host", "h", "--port=1"} <= set(words[:tail])
    assert words[tail + 1 : tail + 3] == ["--seed", "0"]


def test_other_commands_and_the_recording_are_stock() -> None:
    assert "vllm_tetri.cli" not in command(["bench", "serve"], "split", None)
    assert "vllm_tetri.cli" not in command(["serve", "m"], "stock", None)
