"""Requests from files: recorded with their times, or only their lengths.

A `.csv` file is one of Azure's LLM inference traces, with the columns `TIMESTAMP` (a date and
time, or seconds), `ContextTokens` and `GeneratedTokens`. A `.jsonl` file is one of Mooncake's,
with `timestamp` in milliseconds, `input_length` and `output_length`. Others are ignored.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Container, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.workload import Lengths, NoisyPredictor, RequestSpec

LENGTHS = ("ContextTokens", "GeneratedTokens")
_COLUMNS = ("TIMESTAMP", *LENGTHS)
_FIELDS = ("timestamp", "input_length", "output_length")
_MOST_DIGITS = 9


class Recorded(NamedTuple):
    """A request of a trace; seconds since the first one."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[Recorded]:
    """Read all requests of a file, the first one at 0 s; raises ConfigError if it cannot be read,
    holds something else, or is not in order of time."""
    if path.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"{path}: a trace is a *.csv or *.jsonl file (docs/simulator.md)")
    columns = _COLUMNS if path.suffix == ".csv" else _FIELDS
    found: list[Recorded] = []
    first_s = newest_s = -math.inf
    for where, (when, *lengths) in _rows(path, columns):
        try:
            at_s = _seconds(when) if path.suffix == ".csv" else float(when) / 1e3
        except ValueError:
            at_s = math.nan
        if not math.isfinite(at_s):
            raise ConfigError(f"{where}: {when!r} is no time")
        if at_s < newest_s:
            raise ConfigError(f"{where}: it is earlier than the line before; sort")
        newest_s = at_s
        first_s = first_s if found else at_s
        found.append(Recorded(at_s - first_s, *_lengths(where, lengths)))
    if not found:
        raise ConfigError(f"{path}: it holds no requests")
    return found


def read_lengths(path: Path) -> list[Lengths]:
    """Read a CSV file with the columns `ContextTokens` and `GeneratedTokens`; raises ConfigError
    if it cannot be read, or a line holds something else."""
    found = [_lengths(where, texts) for where, texts in _rows(path, LENGTHS)]
    if not found:
        raise ConfigError(f"{path}: it holds no lengths")
    return found


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
    predict = NoisyPredictor(accuracy, seed).of
    return [
        RequestSpec(number, at_s / speed, prompt, output, predict(output))
        for number, (at_s, prompt, output) in enumerate(recorded[:most])
    ]


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of every line and its texts in these columns; raises ConfigError if the file
    cannot be read, or lacks a column."""
    where = f"{path}, line 1"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            if path.suffix == ".jsonl":
                for line, text in enumerate(file, start=1):
                    where = f"{path}, line {line}"
                    if text.strip():
                        row = json.loads(text)
                        _check(where, row if isinstance(row, dict) else (), columns)
                        yield where, [json.dumps(row[name]) for name in columns]
                return
            reader = csv.DictReader(file)
            _check(where, reader.fieldnames or (), columns)
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                yield where, [(row[name] or "").strip() for name in columns]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}") from error


def _check(where: str, names: Container[str], columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in names]
    if missing:
        raise ConfigError(f"{where}: no column {' and no '.join(missing)}")


def _seconds(text: str) -> float:
    """Read seconds, or a date and time; one without a zone is in UTC."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _lengths(where: str, texts: Sequence[str]) -> Lengths:
    for text in texts:
        if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
            raise ConfigError(f"{where}: {list(texts)} are no lengths; write whole tokens from 1")
    return int(texts[0]), int(texts[1])
