"""``vllm-tetri status``: the instances of a running cluster as a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from vllm_tetri.router import admin

Row = dict[str, Any]

COLUMNS: dict[str, Callable[[Row], str]] = {
    "id": lambda row: str(row["id"]),
    "role": lambda row: str(row["role"]),
    "state": lambda row: str(row["state"]),
    "age": lambda row: f"{row['age_s']:.1f}s",
    "in flight": lambda row: str(row["in_flight"]),
    "running": lambda row: str(row["running"]),
    "waiting": lambda row: str(row["waiting"]),
    "held": lambda row: str(row["held"]),
    "heavy:light": lambda row: f"{row['heavy']}:{row['light']}",
    "prompt tokens": lambda row: str(row["queued_prefill_tokens"]),
    "blocks": lambda row: _blocks(row),
    "arena": lambda row: f"{row['arena_used_bytes'] >> 20}/{row['arena_total_bytes'] >> 20} MiB",
    "step": lambda row: f"{row['step_s'] * 1000:.0f}ms" if row["step_s"] else "-",
    "url": lambda row: str(row["url"]),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    admin.add_url(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    try:
        answer = admin.instances(args.url)
        rows = answer["instances"]
        text = table_of(rows) + flips_of(rows, answer["watcher"]) if rows else "no instances"
    except (admin.AdminError, LookupError, TypeError) as error:
        print(f"vllm-tetri status: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


def table_of(rows: Sequence[Row]) -> str:
    """What ``GET /tetri/v1/instances`` says, by role and name."""
    ordered = sorted(rows, key=lambda row: (row["role"], row["id"]))
    return format_table(
        tuple(COLUMNS), [[show(row) for show in COLUMNS.values()] for row in ordered]
    )


def flips_of(rows: Sequence[Row], watcher: str) -> str:
    """The newest flip of each, the latest first, and what the watcher says."""
    newest = sorted(
        (row["flip"]["age_s"], f"  {row['id']} {words_of(row['flip'])}")
        for row in rows
        if row["flip"] is not None
    )
    lines = ["", "flips:", *(line for _, line in newest)] if newest else []
    return "\n".join(["", *lines, f"flip policy: {watcher}"])


def words_of(flip: Row) -> str:
    """One flip, as a line has it."""
    way, when = f"{flip['source']} → {flip['target']}", f"{flip['age_s']:.0f} s ago"
    match flip["stage"]:
        case _ if not flip["is_heard"]:
            what = f"ordered {flip['age_s']:.1f} s ago, not heard yet"
        case "draining":
            what = f"draining for {flip['age_s']:.1f} s"
        case "switching":
            what = "at its next step"
        case "done":
            took = [f"drained in {flip['drain_s']:.2f} s"] if flip["drain_s"] else []
            took += [f"committed in {flip['commit_s'] * 1000:.1f} ms"] if flip["commit_s"] else []
            what = ", ".join([f"done {when}", *took])
        case _:
            what = f"rolled back {when}: {flip['problem']}"
    return f"{way}: {what} ({flip['reason']})"


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart."""
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _blocks(row: Row) -> str:
    """Used, what is reserved on top for what runs, and all."""
    reserved = f"+{row['reserved_blocks']}" if row["reserved_blocks"] else ""
    return f"{row['blocks_used']}{reserved}/{row['blocks_total']}"
