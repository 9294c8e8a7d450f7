"""The page about papers says what is there: every name on it is looked up."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.papers import DOCS, PAGE, RESULTS, STATES, page, read
from vllm_tetri import cli
from vllm_tetri.engine.plugin import add_options

ROOT = Path(__file__).parent.parent
SYSTEMS = read()
ROWS = [row for system in SYSTEMS for row in system["mechanism"]]
KEYS = {"what", "section", "state", "note", "code", "test", "figure"}
# What a row must have besides, by its state.
NEEDED = {
    **{state: {"code", "test"} for state in STATES},
    "option": {"code", "test", "note"},
    "other way": {"code", "test", "note"},
    "vLLM": set(),
    "left out": {"note", "figure"},
    "not built": {"note"},
}


def names_in(body: Iterable[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module or class defines, by name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id: node for each in targets if isinstance(each, ast.Name)}
    return found


@cache
def defined(path: Path) -> dict[str, ast.stmt]:
    """What a file defines, by name."""
    return names_in(ast.parse(path.read_text()).body)


def is_there(code: str) -> bool:
    """Whether `module:symbol`, or a C++ source, exists."""
    module, _, symbol = code.partition(":")
    if not symbol:
        return code.startswith("csrc/") and (ROOT / code).is_file()
    path = ROOT / f"{module.replace('.', '/')}.py"
    names = defined(path) if path.is_file() else {}
    for name in symbol.split("."):
        node = names.get(name)
        names = names_in(node.body) if isinstance(node, ast.ClassDef) else {}
        if node is None:
            return False
    return True


def flags() -> set[str]:
    """All options of commands, and ours of `vllm serve`."""
    serve = argparse.ArgumentParser(add_help=False)
    add_options(serve)
    parsers = [serve, *(cli.parser_of(command)[0] for command in cli.COMMANDS)]
    return {flag for each in parsers for flag in re.findall(r"--[a-z-]+", each.format_help())}


def test_the_page_is_what_the_data_gives() -> None:
    assert PAGE.read_text() == page(SYSTEMS), "run python -m tests.papers"


@pytest.mark.parametrize("row", ROWS, ids=[row["what"] for row in ROWS])
def test_what_a_row_names_exists(row: dict[str, str]) -> None:
    assert KEYS >= row.keys() >= {"what", "section", "state"} | NEEDED[row["state"]]
    if "code" in row:
        assert is_there(row["code"]), row["code"]
    if "test" in row:
        file, _, name = row["test"].partition("::")
        assert name in defined(ROOT / file), row["test"]
    if "figure" in row:
        file = row["figure"].partition("#")[0]
        assert ((DOCS if file.endswith(".md") else ROOT / RESULTS) / file).is_file(), file


def test_every_mechanism_stands_once() -> None:
    for system in SYSTEMS:
        names = [row["what"] for row in system["mechanism"]]
        assert len(names) == len(set(names)), system["name"]


def test_every_option_that_a_row_names_exists() -> None:
    named = {flag for row in ROWS for flag in re.findall(r"--[a-z-]+", row.get("note", ""))}
    assert named - flags() == set()


def test_names_that_do_not_exist_are_noticed() -> None:
    assert is_there("vllm_tetri.policy.queue:PromptQueue.head")
    for code in ("vllm_tetri.policy.queue:PromptQueue.gone", "vllm_tetri.gone:A", "csrc/gone.cc"):
        assert not is_there(code)
