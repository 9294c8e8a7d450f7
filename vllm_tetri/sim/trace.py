"""Requests from files: recorded with their times, or only their lengths.

A `.csv` file is one of Azure's LLM inference traces, with the columns `TIMESTAMP` (a date and
time, or seconds), `ContextTokens` and `GeneratedTokens`. A `.jsonl` file is one of Mooncake's,
with `timestamp` in milliseconds, `input_length` and `output_length`. Others are ignored.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.workload import Lengths, RequestSpec, predictor

_AZURE, _MOONCAKE = ("ContextTokens", "GeneratedTokens"), ("input_length", "output_length")


class Recorded(NamedTuple):
    """A request of a trace; seconds since the first one."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[Recorded]:
    """Read all requests of a file, the first one at 0 s; raises ConfigError if it cannot be read,
    holds something else, or is not in order of time."""
    found: list[Recorded] = []
    first_s = newest_s = -math.inf
    for where, row in _rows(path):
        try:
            is_date = path.suffix == ".csv"
            at_s = _seconds(row["TIMESTAMP"]) if is_date else float(row["timestamp"]) / 1e3
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: no time: {error}") from error
        if not newest_s <= at_s < math.inf:
            raise ConfigError(f"{where}: it is earlier than the line before; sort")
        newest_s, first_s = at_s, first_s if found else at_s
        found.append(Recorded(at_s - first_s, *_lengths(where, row)))
    return found


def read_lengths(path: Path) -> list[Lengths]:
    """Read only the lengths; raises ConfigError if the file cannot be read, or a line holds
    something else."""
    return [_lengths(where, row) for where, row in _rows(path)]


def replay(
    recorded: Sequence[Recorded],
    *,
    speed: float = 1.0,
    most: int | None = None,
    accuracy: float = 1.0,
    seed: int = 0,
) -> list[RequestSpec]:
    """Return the first `most` requests of a trace, at their times divided by `speed`, with a share
    of right predictions; raises ConfigError if a number is out of range."""
    if not 0 < speed < math.inf:
        raise ConfigError(f"a trace at {speed:g} times its speed: must be above 0")
    if most is not None and most < 1:
        raise ConfigError(f"{most} requests: must be at least 1")
    predict = predictor(accuracy, seed)
    return [
        RequestSpec(number, at_s / speed, prompt, output, predict(output))
        for number, (at_s, prompt, output) in enumerate(recorded[:most])
    ]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of every line and what it holds; raises ConfigError if the file cannot be
    read, or holds nothing."""
    number = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            is_csv = path.suffix == ".csv"
            rows = csv.DictReader(file) if is_csv else map(json.loads, filter(str.strip, file))
            for number, row in enumerate(rows, start=1):
                yield f"{path}, row {number}", row
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path}, after row {number}: {error}") from error
    if not number:
        raise ConfigError(f"{path}: it holds no requests")


def _seconds(text: str) -> float:
    """Read seconds, or a date and time; one without a zone is in UTC."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _lengths(where: str, row: dict[str, Any]) -> Lengths:
    try:
        names = _AZURE if "ContextTokens" in row else _MOONCAKE
        prompt, output = (int(row[name]) for name in names)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: no lengths in tokens: {error}") from error
    if min(prompt, output) < 1:
        raise ConfigError(f"{where}: no lengths in tokens: they begin at 1")
    return prompt, output
