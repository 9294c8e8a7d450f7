"""The few rules of language that can be checked: docs/glossary.md has the words themselves.

Rules hold for the package, its examples and the comments of the C++ core: docstrings, comments,
log lines and error texts.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vllm_tetri"
SOURCES = sorted(
    [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi"), *(ROOT / "examples").rglob("*.py")]
)
NATIVE = sorted([*(ROOT / "csrc").rglob("*.cc"), *(ROOT / "csrc").rglob("*.h")])

# A docstring or message is a sentence with a subject, or an imperative.
HEADLESS = re.compile(r"(Of|The same|Those|Who|Whose)\b")
# Requests, threads and instances are no persons.
PERSONS = re.compile(r"\b(nobody|somebody|everybody|whoever)\b", re.IGNORECASE)


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string literal, the parts of f-strings included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def docstrings_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def problems_of(source: str) -> list[str]:
    """What breaks a rule in a Python source, one line each."""
    headless = [
        f"{line}: begins without a subject: {text.splitlines()[0]!r}"
        for line, text in [*docstrings_of(source), *_paragraph_starts(source)]
        if HEADLESS.match(text)
    ]
    persons = [
        f"{line}: {found[0]!r} is a word for persons"
        for line, text in [*texts_of(source), *comments_of(source)]
        if (found := PERSONS.search(text))
    ]
    return headless + persons


def _paragraph_starts(source: str) -> Iterator[tuple[int, str]]:
    """The descriptions in `Attributes:` and `Args:` sections: `name: Text.`"""
    for line, text in docstrings_of(source):
        for found in re.finditer(r"^ {4}\w[\w, ]*: (.+)$", text, re.MULTILINE):
            yield line, found[1]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_speaks_plain_technical_english(path: Path) -> None:
    assert problems_of(path.read_text()) == []


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_native_file_has_no_words_for_persons(path: Path) -> None:
    assert PERSONS.findall(path.read_text()) == []


def test_no_class_name_is_defined_twice_in_the_package() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""Of one request."""',
        'class A:\n    """Those with room."""',
        'def f() -> None:\n    """Do it.\n\n    Args:\n        x: Of a step.\n    """',
        'raise ValueError("nobody waits")',
        "x = 1  # whoever asks",
    ],
)
def test_a_broken_rule_is_found(source: str) -> None:
    assert problems_of(source)
