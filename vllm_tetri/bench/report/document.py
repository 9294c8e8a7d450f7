"""What a report consists of, before it is HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; `name` is what links within the page point to."""

    level: int
    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. What stands between backquotes is code."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """The first `num_text` columns are text, the others numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text: int = 1


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG file, and what is told about it."""

    path: Path
    caption: str


@dataclass(frozen=True, slots=True)
class Folded:
    """A table that can be folded away."""

    summary: str
    table: Table
    is_open: bool = False


Block = Heading | Text | Items | Table | Picture | Folded


@dataclass(frozen=True, slots=True)
class Document:
    """A page."""

    title: str
    blocks: Sequence[Block]
