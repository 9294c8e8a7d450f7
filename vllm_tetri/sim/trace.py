"""Requests from files: recorded with their times, or only their lengths.

A `.csv` file is one of Azure's LLM inference traces, with the columns `TIMESTAMP` (a date and
time, or seconds), `ContextTokens` and `GeneratedTokens`. A `.jsonl` file is one of Mooncake's,
with `timestamp` in milliseconds, `input_length` and `output_length`. Others are ignored.
"""

from __future__ import annotations

import csv
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.workload import Arrival, Lengths

_AZURE, _MOONCAKE = ("ContextTokens", "GeneratedTokens"), ("input_length", "output_length")


def read_trace(path: Path, *, has_times: bool = True) -> list[Arrival]:
    """Read all requests of a file, the first one at 0 s; raises ConfigError if it cannot be read,
    holds something else, or is not in order of time."""
    found: list[Arrival] = []
    is_csv, first_s, newest_s = path.suffix == ".csv", 0.0, -math.inf
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file) if is_csv else map(json.loads, filter(str.strip, file))
            for row in rows:
                at_s = _seconds(row, is_csv=is_csv) if has_times else 0.0
                names = _AZURE if "ContextTokens" in row else _MOONCAKE
                prompt, output = (int(row[name]) for name in names)
                if min(prompt, output) < 1:
                    raise ValueError("lengths in tokens begin at 1")
                if not newest_s <= at_s < math.inf:
                    raise ValueError("it is earlier than the line before; sort")
                newest_s, first_s = at_s, first_s if found else at_s
                found.append((at_s - first_s, prompt, output))
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path}, row {len(found) + 1}: {error!r}") from error
    if not found:
        raise ConfigError(f"{path}: it holds no requests")
    return found


def read_lengths(path: Path) -> list[Lengths]:
    """Read only the lengths; raises ConfigError as `read_trace`."""
    return [(prompt, output) for _, prompt, output in read_trace(path, has_times=False)]


def _seconds(row: dict[str, Any], *, is_csv: bool) -> float:
    """Read the time of a row; a date and time without a zone is in UTC."""
    if not is_csv:
        return float(row["timestamp"]) / 1e3
    try:
        return float(row["TIMESTAMP"])
    except ValueError:
        moment = datetime.fromisoformat(row["TIMESTAMP"])
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
