"""How large things may become. A change that raises a number here says in its message why."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_tetri.cli import COMMANDS as ALL_COMMANDS
from vllm_tetri.config import options

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vllm_tetri"

# Most lines of Python (and of stubs, C++ and headers) below a path. When all that is planned is in,
# the package may have 26,000; docs/adr/0012-one-road.md has what the review of November 2026 asked
# for, 20,500, and `git log -p` of this file what came since.
FOLDERS = {
    "vllm_tetri": 33_738,
    "vllm_tetri/policy": 4_651,
    "vllm_tetri/control": 1_401,
    "vllm_tetri/transport": 2_140,
    "vllm_tetri/engine": 6_949,
    "vllm_tetri/router": 8_799,
    "vllm_tetri/predictor": 485,
    "vllm_tetri/launch": 2_109,
    "vllm_tetri/sim": 3_758,
    "examples/benchmarks": 9_807,
    "examples/predictor": 1_891,
    "csrc": 8_167,
    "tests": 52_951,
}
MODULES = {"vllm_tetri/router": 35, "vllm_tetri/engine": 27, "vllm_tetri/policy": 24}
FILE_LINES = 400
FUNCTION_LINES = 60
CONSTRUCTOR_PARAMETERS = 8
SERVE_OPTIONS = 26
COMMANDS = 16
COMMANDS_IN_HELP = 15
DOC_PAGES = 17

DOC_WORDS = 36_944
ARCHITECTURE_WORDS = 900

SUFFIXES = {".py", ".pyi", ".cc", ".h"}


def sources(folder: str) -> list[Path]:
    """Source files below a folder, without caches."""
    return [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_keeps_its_budget(folder: str) -> None:
    assert sum(map(lines_of, sources(folder))) <= FOLDERS[folder]


@pytest.mark.parametrize("folder", MODULES)
def test_a_folder_has_few_modules(folder: str) -> None:
    names = [path.name for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
    assert len(names) <= MODULES[folder], names


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines_of(path)
        for path in PACKAGE.rglob("*.py")
        if lines_of(path) > FILE_LINES
    }
    assert long == {}


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(PACKAGE)}:{node.name}": size
        for path in PACKAGE.rglob("*.py")
        for node in functions_of(path)
        if (size := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    }
    assert long == {}


def test_constructors_take_few_parameters() -> None:
    wide = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}": count
        for path in PACKAGE.rglob("*.py")
        for node in functions_of(path)
        if node.name == "__init__"
        and (count := len(node.args.args) + len(node.args.kwonlyargs) - 1) > CONSTRUCTOR_PARAMETERS
    }
    assert wide == {}


def test_docs_stay_readable() -> None:
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(pages) <= DOC_PAGES
    words = sum(len(page.read_text().split()) for page in [*pages, ROOT / "README.md"])
    assert words <= DOC_WORDS


def test_the_architecture_fits_one_sitting() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().split()) <= ARCHITECTURE_WORDS


def test_every_module_that_the_docs_name_exists() -> None:
    named = {
        found
        for page in (ROOT / "docs").glob("*.md")
        for found in re.findall(
            r"`((?:vllm_tetri|csrc|examples|tests)/[\w./-]+)`", page.read_text()
        )
    }
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_command_line_stays_small() -> None:
    assert len(ALL_COMMANDS) <= COMMANDS
    assert sum(bool(command.group) for command in ALL_COMMANDS) <= COMMANDS_IN_HELP
    assert len(options()) + 1 <= SERVE_OPTIONS  # --tetri-config is no field
