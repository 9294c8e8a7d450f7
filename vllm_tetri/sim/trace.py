"""Requests out of files: recorded with their times, or only their lengths.

Two public layouts are known. A `.csv` file is one of Azure's LLM inference traces: columns
`TIMESTAMP` (a date and time, or seconds), `ContextTokens` and `GeneratedTokens`. A `.jsonl`
file is one of Mooncake's: `timestamp` in milliseconds, `input_length` and `output_length`.
Other columns and fields are ignored.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.workload import Ask, Lengths, Predictor

LENGTHS = ("ContextTokens", "GeneratedTokens")
_COLUMNS = ("TIMESTAMP", *LENGTHS)
_FIELDS = ("timestamp", "input_length", "output_length")
_MS = 1e-3
_MOST_DIGITS = 9

_Row = tuple[int, list[str]]
"""A line's number, and what is written there in the columns that were asked for."""


class Recorded(NamedTuple):
    """A request of a trace; seconds since the first one."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[Recorded]:
    """All requests of a file, in order of time; the first one comes at 0 s.

    Raises:
        ConfigError: It cannot be read, holds something else, or is not in order of time.
    """
    readers: dict[str, tuple[Callable[[Path], Iterator[_Row]], Callable[[str], float]]] = {
        ".csv": (_csv_trace, _csv_time_s),
        ".jsonl": (_jsonl_trace, _jsonl_time_s),
    }
    if path.suffix not in readers:
        raise ConfigError(f"{path}: a trace is a *.csv or *.jsonl file (docs/simulator.md)")
    rows_of, time_of = readers[path.suffix]
    found: list[Recorded] = []
    first_s = newest_s = -math.inf
    try:
        for line, (when, prompt, answer) in rows_of(path):
            at_s = _time(path, line, when, time_of)
            if at_s < newest_s:
                raise ConfigError(f"{path}, line {line}: it is earlier than the line before; sort")
            newest_s = at_s
            first_s = at_s if not found else first_s
            found.append(Recorded(at_s - first_s, *_lengths(path, line, prompt, answer)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not found:
        raise ConfigError(f"{path}: it holds no requests")
    return found


def read_lengths(path: Path) -> list[Lengths]:
    """Lengths of a CSV file with the columns `ContextTokens` and `GeneratedTokens`.

    Raises:
        ConfigError: It cannot be read, or a line holds something else.
    """
    try:
        found = [_lengths(path, line, *texts) for line, texts in _csv(path, LENGTHS)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}") from error
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
) -> list[Ask]:
    """The first requests of a trace, at their times.

    Args:
        speed: 2 lets everything come in half the time, and so at twice the rate.
        most: How many; None for all.
        accuracy: Share of answers whose bucket is predicted rightly.
        seed: Of wrong predictions.

    Raises:
        ConfigError: A number makes no sense.
    """
    if not 0 < speed < math.inf:
        raise ConfigError(f"a trace at {speed:g} times its speed: must be above 0")
    if most is not None and most < 1:
        raise ConfigError(f"{most} requests: must be at least 1")
    predictions = Predictor(accuracy, seed)
    return [
        Ask(
            number,
            each.at_s / speed,
            each.prompt_tokens,
            each.output_tokens,
            predictions.of(each.output_tokens),
        )
        for number, each in enumerate(recorded[:most])
    ]


def _csv(path: Path, columns: Sequence[str]) -> Iterator[_Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(f"{path}, line 1: no column {' and no '.join(missing)}")
        for row in reader:
            yield reader.line_num, [(row[name] or "").strip() for name in columns]


def _csv_trace(path: Path) -> Iterator[_Row]:
    return _csv(path, _COLUMNS)


def _jsonl_trace(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{path}, line {line}: no JSON: {error}") from error
            missing = [name for name in _FIELDS if not isinstance(row, dict) or name not in row]
            if missing:
                raise ConfigError(f"{path}, line {line}: no {' and no '.join(missing)}")
            yield line, [json.dumps(row[name]) for name in _FIELDS]


def _csv_time_s(text: str) -> float:
    """Seconds, or a date and time; one without a zone is of UTC."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return (moment - (_EPOCH if moment.tzinfo is None else _UTC_EPOCH)).total_seconds()


_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00")
_UTC_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


def _jsonl_time_s(text: str) -> float:
    return float(text) * _MS


def _time(path: Path, line: int, text: str, time_of: Callable[[str], float]) -> float:
    try:
        at_s = time_of(text)
    except ValueError:
        at_s = math.nan
    if not math.isfinite(at_s):
        raise ConfigError(f"{path}, line {line}: {text!r} is no time")
    return at_s


def _lengths(path: Path, line: int, prompt: str, answer: str) -> Lengths:
    for text in (prompt, answer):
        if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
            raise ConfigError(
                f"{path}, line {line}: {[prompt, answer]} are no lengths; write whole tokens from 1"
            )
    return int(prompt), int(answer)
