"""Lengths of prompts: from a file, or drawn from a distribution."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random

from vllm_tetri.errors import ConfigError

# Like first prompts of ShareGPT conversations: most are short, a few are very long.
MEDIAN_TOKENS = 200
SIGMA = 1.2
LONGEST_TOKENS = 2000
BUILT_IN = f"log-normal, median {MEDIAN_TOKENS}, sigma {SIGMA}, at most {LONGEST_TOKENS} tokens"

# Names under which public traces keep the length of a prompt.
_COLUMNS = (
    "num_prefill_tokens",
    "prompt_tokens",
    "num_prompt_tokens",
    "input_tokens",
    "input_length",
    "ContextTokens",
    "prompt_len",
)


def read_lengths(path: Path) -> list[int]:
    """Prompt lengths, in tokens, of a CSV file with a column of them, or one per line.

    Raises:
        ConfigError: It cannot be read, is empty, or a length is no positive number.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [(reader.line_num, row) for reader in [csv.reader(file)] for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--lengths {path}: {error}") from error
    rows = [(number, row) for number, row in rows if any(cell.strip() for cell in row)]
    if rows and not _is_number(rows[0][1][0]):
        column = _column(path, rows[0][1])
        rows = rows[1:]
    else:
        column = 0
    if not rows:
        raise ConfigError(f"--lengths {path}: it holds no lengths")
    return [_length(path, number, row, column) for number, row in rows]


def drawn_lengths(count: int, rng: Random) -> list[int]:
    """The built-in distribution, described by `BUILT_IN`."""
    draws = (rng.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA) for _ in range(count))
    return [min(max(round(draw), 1), LONGEST_TOKENS) for draw in draws]


def sample(
    known: Sequence[int] | None, count: int, rng: Random, *, scale: float, longest: int
) -> list[int]:
    """Lengths of `count` prompts.

    Args:
        known: Lengths to draw from, each at most once as far as they go; None
            for the built-in distribution.
        scale: Factor for each.
        longest: What a model's window allows, in tokens; longer ones are cut.
    """
    if known is None:
        lengths = drawn_lengths(count, rng)
    elif len(known) >= count:
        lengths = rng.sample(known, count)
    else:
        lengths = rng.choices(known, k=count)
    return [min(max(round(length * scale), 1), longest) for length in lengths]


def _column(path: Path, head: Sequence[str]) -> int:
    names = [name.strip() for name in head]
    for name in _COLUMNS:
        if name in names:
            return names.index(name)
    raise ConfigError(
        f"--lengths {path}: no column of prompt lengths among {', '.join(names)}; "
        f"known names: {', '.join(_COLUMNS)}"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _length(path: Path, number: int, row: Sequence[str], column: int) -> int:
    text = row[column].strip() if column < len(row) else ""
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"--lengths {path}, line {number}: {text!r} is no prompt length; "
            "write a whole number of tokens, at least 1"
        )
    return int(text)
