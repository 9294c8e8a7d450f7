"""``vllm-tetri status``: the instances of a running cluster as a table."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

_TIMEOUT_S = 5.0
_COLUMNS = ("id", "role", "state", "age", "running", "waiting", "held", "blocks", "arena", "url")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="base URL of the router (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    url = f"{args.url.rstrip('/')}/tetri/v1/instances"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            instances = json.load(response)["instances"]
    except (urllib.error.URLError, OSError, ValueError, LookupError, TypeError) as error:
        print(f"vllm-tetri status: no router answers at {args.url}: {error}", file=sys.stderr)
        return 1
    rows = [_row(each) for each in instances]
    print(format_table(_COLUMNS, rows) if rows else "no instances")
    return 0


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart."""
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _row(instance: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(instance["id"]),
        str(instance["role"]),
        str(instance["state"]),
        f"{instance['age_s']:.1f}s",
        str(instance["running"]),
        str(instance["waiting"]),
        str(instance["held"]),
        f"{instance['blocks_used']}/{instance['blocks_total']}",
        f"{instance['arena_used_bytes'] >> 20}/{instance['arena_total_bytes'] >> 20} MiB",
        str(instance["url"]),
    )
