"""The one table of a soak, and its numbers as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench.soak.run import Seen
from vllm_tetri.bench.soak.tally import (
    End,
    Promise,
    Row,
    promise_of_audits,
    promises_of_answers,
    rows,
)
from vllm_tetri.bench.soak.usage import promises_of_usage, trends

_MARKS = {True: "kept", False: "BROKEN", None: "too short to say"}
_WORDS = 5  # of what went wrong, the most frequent


def promises(seen: Seen, found: Sequence[Row]) -> list[Promise]:
    """Everything that a cluster should have kept."""
    at_rest = "; ".join(seen.unrested) or "everything"
    ended = "; ".join(seen.unended) or "nothing is left"
    return [
        *promises_of_answers(found),
        promise_of_audits(seen.leftovers),
        Promise("everything comes back and comes to rest", not seen.unrested, at_rest),
        *promises_of_usage(seen.samples),
        Promise("the end leaves nothing", not seen.unended, ended),
    ]


def plain(seen: Seen, conditions: dict[str, Any]) -> dict[str, Any]:
    """All of it, for JSON."""
    found = rows(seen.asked, seen.faults)
    start_s = seen.faults[0].at_s if seen.faults else 0.0
    return {
        "conditions": conditions,
        "rows": [asdict(each) for each in found],
        "promises": [asdict(each) for each in promises(seen, found)],
        "trends": [asdict(each) for each in trends(seen.samples)],
        "faults": [
            {
                "kind": each.kind.value,
                "victim": each.victim,
                "at_s": each.at_s - start_s,
                "whole_s": None if each.whole_s is None else each.whole_s - each.at_s,
            }
            for each in seen.faults
        ],
        "words": dict(words(seen).most_common()),
        "leftovers": sorted(seen.leftovers.stayed),
        "brief_leftovers": sorted(seen.leftovers.brief - seen.leftovers.stayed),
    }


def words(seen: Seen) -> Counter[str]:
    """What went wrong, and how often."""
    bad = (End.LOST, End.ERROR, End.WRONG)
    return Counter(f"{each.end}: {each.words}" for each in seen.asked if each.end in bad)


def show(console: Console, seen: Seen) -> bool:
    """Print the table; whether every promise was kept."""
    found = rows(seen.asked, seen.faults)
    kept = promises(seen, found)
    table = Table(title="what the cluster kept")
    heads = ("faults", "good", "lost", "errors", "wrong", "left", "asked again")
    for head in ("", *heads, "longest gap s", "back after s"):
        table.add_column(head, justify="right" if head else "left")
    for row in found:
        numbers = (row.faults, row.good, row.lost, row.errors, row.wrong, row.left, row.again)
        table.add_row(
            row.name, *(f"{each:,}" for each in numbers), f"{row.gap_s:.1f}", _seconds(row.whole_s)
        )
    console.print(table)
    verdicts = Table()
    for head in ("promise", "", "found"):
        verdicts.add_column(head)
    for each in kept:
        verdicts.add_row(each.text, _MARKS[each.is_kept], each.found)
    console.print(verdicts)
    for text, number in words(seen).most_common(_WORDS):
        console.print(f"{number} × {text}", markup=False)
    return all(each.is_kept is not False for each in kept)


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value else "–"
