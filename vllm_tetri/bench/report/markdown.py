"""A report as Markdown."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_tetri.bench.report.document import (
    Block,
    Document,
    Folded,
    Heading,
    Items,
    Picture,
    Table,
)


def markdown(document: Document, folder: Path) -> str:
    """The page; pictures are named from `folder` on, where it will be."""
    parts = [f"# {document.title}", *(_block(each, folder) for each in document.blocks)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, folder: Path) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Items(texts):
            return "\n".join(f"- {text}" for text in texts)
        case Table():
            return _table(block)
        case Picture(path, caption):
            return f"![{caption}]({os.path.relpath(path, folder)})"
        case Folded(summary, table):
            return f"{summary}:\n\n{_table(table)}"
        case _:
            return block.text


def _table(table: Table) -> str:
    right = len(table.heads) - table.num_text
    rule = ["---"] * table.num_text + ["--:"] * right
    rows = [table.heads, rule, *table.rows]
    return "\n".join("| " + " | ".join(_cell(each) for each in row) + " |" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
