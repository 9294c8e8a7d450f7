"""The tables of a soak, and its numbers as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench.promise import Promise, show_promises
from vllm_tetri.bench.soak.silence import Gaps, Spread, gaps
from vllm_tetri.bench.soak.tally import (
    End,
    Row,
    promise_of_audits,
    promises_of_answers,
    rows,
)
from vllm_tetri.bench.soak.usage import promises_of_usage, trends
from vllm_tetri.bench.soak.watch import Rest, Seen


def promises(seen: Seen) -> list[Promise]:
    """Everything that a cluster should have kept."""
    ended = "; ".join(seen.unended) or "nothing is left"
    return [
        *promises_of_answers(seen.asked, seen.faults),
        promise_of_audits(seen.leftovers),
        promise_of_rests(seen.rests),
        *promises_of_usage(seen.samples),
        Promise("the end leaves nothing", not seen.unended, ended),
    ]


def promise_of_rests(rests: Sequence[Rest]) -> Promise:
    """Each time that clients paused."""
    missed = [
        f"behind {each.faults} faults: {', '.join(each.missed)}" for each in rests if each.missed
    ]
    longest_s = max((each.took_s for each in rests), default=0.0)
    found = f"everything, {len(rests)} times, within {longest_s:.0f} s"
    text = "everything comes back and comes to rest"
    return Promise(text, bool(rests) and not missed, "; ".join(missed) or found)


def plain(seen: Seen, conditions: dict[str, Any]) -> dict[str, Any]:
    """All of it, for JSON."""
    found = rows(seen.asked, seen.faults)
    start_s = seen.faults[0].at_s if seen.faults else 0.0
    return {
        "conditions": conditions,
        "rows": [asdict(each) for each in found],
        "gaps": [asdict(each) for each in gaps(seen.asked, seen.faults, seen.resumed)],
        "promises": [asdict(each) for each in promises(seen)],
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
        "under_faults_s": seen.under_faults_s,
        "rests": [asdict(each) for each in seen.rests],
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
    console.print(_table(rows(seen.asked, seen.faults), seen))
    console.print(_gap_table(gaps(seen.asked, seen.faults, seen.resumed)))
    return show_promises(console, promises(seen), words(seen))


def _table(found: Sequence[Row], seen: Seen) -> Table:
    times = f"{len(seen.faults)} faults in {seen.under_faults_s / 60:.1f} minutes"
    table = Table(title=f"what the cluster kept: {times}, and {len(seen.rests)} rests")
    heads = ("faults", "good", "lost", "errors", "wrong", "left", "asked again")
    for head in ("", *heads, "longest gap s", "back after s"):
        table.add_column(head, justify="right" if head else "left")
    for row in found:
        numbers = (row.faults, row.good, row.lost, row.errors, row.wrong, row.left, row.again)
        table.add_row(
            row.name, *(f"{each:,}" for each in numbers), f"{row.gap_s:.1f}", _seconds(row.whole_s)
        )
    return table


def _gap_table(found: Sequence[Gaps]) -> Table:
    table = Table(title="longest silence of streams that had begun, seconds")
    table.add_column("")
    for name in ("under way", "resumed"):
        for head in (name, "p50", "p99", "longest"):
            table.add_column(head, justify="right")
    for each in found:
        table.add_row(each.name, *_spread(each.under_way), *_spread(each.resumed))
    return table


def _spread(found: Spread) -> list[str]:
    values = (found.p50_s, found.p99_s, found.longest_s)
    return [f"{found.number:,}", *(f"{each:.2f}" if found.number else "–" for each in values)]


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value else "–"
