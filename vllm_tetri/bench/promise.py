"""What a cluster promises when it is broken or swamped, and whether it was kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

BROKEN = 1  # status of a command that saw a promise broken
_MARKS = {True: "kept", False: "BROKEN", None: "too short to say"}
_WORDS = 5  # of what went wrong, the most frequent


@dataclass(frozen=True, slots=True)
class Promise:
    """Something that a cluster should keep.

    Attributes:
        is_kept: None where too little was seen to say so.
        found: What was seen, in words.
    """

    text: str
    is_kept: bool | None
    found: str


def show_promises(console: Console, promises: Sequence[Promise], wrong: Counter[str]) -> bool:
    """Print them as a table, and what went wrong most often; whether none was broken."""
    table = Table()
    for head in ("promise", "", "found"):
        table.add_column(head)
    for each in promises:
        table.add_row(each.text, _MARKS[each.is_kept], each.found)
    console.print(table)
    for text, number in wrong.most_common(_WORDS):
        console.print(f"{number} × {text}", markup=False)
    return all(each.is_kept is not False for each in promises)
