"""The tables of an overload, and its numbers as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tetri.bench.overload.figures import (
    AS_NORMAL,
    Row,
    back_s,
    promise_of_lives,
    promises_of_answers,
    promises_of_memory,
    row,
)
from vllm_tetri.bench.overload.run import AFTER_S, CAPACITY_S, NORMAL_S, RAMP_S, Plan, Seen
from vllm_tetri.bench.overload.turn import End, Reply
from vllm_tetri.bench.promise import Promise, show_promises

_KEYS = ("greedy client", "modest client")
_QUEUES = ("in_flight", "running", "waiting", "queued_prefill_tokens")


def rows(plan: Plan, seen: Seen) -> list[Row]:
    """One row per part of the run, and of the overload one per client."""
    assert seen.closed is not None
    assert seen.normal is not None
    assert seen.overload is not None
    replies, end_s = seen.overload.replies, plan.seconds
    found = [
        row("as much as it can", seen.closed.replies, RAMP_S, RAMP_S + CAPACITY_S),
        row("normal", seen.normal.replies, 0.0, NORMAL_S),
        row("overload", replies, 0.0, end_s),
    ]
    for place in range(len(plan.keys)):
        own = [each for each in replies if each.whose == place]
        found.append(row(f"- {_KEYS[place]}", own, 0.0, end_s))
    return [*found, row("after it", replies, end_s, end_s + AFTER_S)]


def promises(plan: Plan, seen: Seen, found: list[Row]) -> list[Promise]:
    """Everything that a cluster should have kept."""
    assert seen.overload is not None
    assert seen.rest is not None
    by_name = {each.name: each for each in found}
    waited_s = back_s(
        seen.overload.replies,
        plan.seconds,
        plan.seconds + AFTER_S,
        normal_s=AS_NORMAL * by_name["normal"].first_p99_s,
    )
    during_s = seen.overload.started_s + plan.seconds
    groups = [each.groups for each in seen.samples if each.at_s <= during_s]
    every = [each.groups for each in seen.samples]
    at_rest = "; ".join(seen.unrested) or "everything"
    ended = "; ".join(seen.unended) or "nothing is left"
    return [
        *promises_of_answers(
            _replies(seen),
            by_name["overload"],
            seen.capacity,
            waited_s,
            num_after=by_name["after it"].sent,
        ),
        *promises_of_memory(seen.rest.groups, groups),
        promise_of_lives(seen.rest.groups, every),
        Promise("everything comes to rest", not seen.unrested, at_rest),
        Promise("the end leaves nothing", not seen.unended, ended),
    ]


def plain(plan: Plan, seen: Seen, conditions: dict[str, Any]) -> dict[str, Any]:
    """All of it, for JSON."""
    assert seen.overload is not None
    found = rows(plan, seen)
    started_s = seen.overload.started_s
    late_s = [each.late_s for each in seen.overload.replies]
    return {
        "conditions": conditions,
        "capacity": seen.capacity,
        "rows": [asdict(each) for each in found],
        "promises": [asdict(each) for each in promises(plan, seen, found)],
        "client": {
            "cores": seen.overload.cpu_s / seen.overload.took_s,
            "longest_late_s": max(late_s, default=0.0),
        },
        "words": dict(words(seen).most_common()),
        "samples": [
            {
                "at_s": each.at_s - started_s,
                "groups": {name: asdict(usage) for name, usage in each.groups.items()},
                "instances": {
                    name: {key: line.get(key) for key in _QUEUES}
                    for name, line in each.rows.items()
                },
            }
            for each in seen.samples
        ],
        "replies": [
            [each.at_s, each.end, each.first_s, each.done_s, each.whose]
            for each in seen.overload.replies
        ],
    }


def words(seen: Seen) -> Counter[str]:
    """What went wrong, and how often."""
    return Counter(each.words for each in _replies(seen) if each.end is End.BAD)


def show(console: Console, plan: Plan, seen: Seen) -> bool:
    """Print the tables; whether every promise was kept."""
    assert seen.overload is not None
    found = rows(plan, seen)
    table = Table(title="what was asked, and what became of it")
    heads = ("a second", "sent", "served", "refused", "bad", "served a second")
    times = ("first token s", "last token s", "refusal s", "come again in s")
    for head in ("", *heads, *times):
        table.add_column(head, justify="right" if head else "left")
    for each in found:
        counts = (each.sent, each.served, each.refused, each.bad)
        table.add_row(
            each.name,
            f"{each.sent / each.seconds:.1f}",
            *(f"{count:,}" for count in counts),
            f"{each.served_per_s:.2f}",
            _pair(each.first_p50_s, each.first_p99_s),
            _pair(each.done_p50_s, each.done_p99_s),
            _pair(each.refusal_p50_s, each.refusal_p99_s),
            f"{each.again_p50_s:.0f}" if each.refused else "–",
        )
    console.print(table)
    console.print("times: median · p99")
    is_kept = show_promises(console, promises(plan, seen, found), words(seen))
    cores = seen.overload.cpu_s / seen.overload.took_s
    latest_s = max((each.late_s for each in seen.overload.replies), default=0.0)
    console.print(f"the client took {cores:.2f} cores, and was late by {latest_s:.2f} s at most")
    return is_kept


def _replies(seen: Seen) -> list[Reply]:
    turns = (seen.closed, seen.normal, seen.overload)
    return [each for turn in turns if turn is not None for each in turn.replies]


def _pair(median_s: float, p99_s: float) -> str:
    return f"{median_s:.3f} · {p99_s:.3f}" if p99_s else "–"
