"""The file between `collect` and `train`, and what is learnt from it: examples and buckets.

JSON lines, only ever appended to. The first line is a `Target`, every other one an `Output`. A
last line without its end was cut off by a kill and does not count.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from examples.predictor.model import TARGET_FORMAT, Target
from examples.predictor.prompts import key_of
from vllm_tetri.errors import ConfigError

QUARTERS = 4  # any of them may be the one that is held out
_VALIDATION_PERCENT = 10
_OPEN_PART = 0.05  # of the outputs in the open bucket: few, but enough to learn from
_SALT = "split 1"  # another one draws another split
Line = TypeVar("Line", Target, "Output")


class Output(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One output of the target model, without its text."""

    key: str  # of the prompt
    source: str  # of the prompt
    prompt: str
    prompt_tokens: int  # as the target counts them, with the chat template
    sample: int  # number of this output among those of the prompt, from 0
    tokens: int
    finish: str  # the endpoint's finish reason; ``length`` means cut at max_tokens


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with the lengths of all its outputs, of which the median is learnt."""

    key: str
    text: str
    prompt_tokens: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Length of the first output, which stands for a real request."""
        return self.lengths[0]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The content of a file; `digest` names it."""

    target: Target
    examples: tuple[Example, ...]
    digest: str

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Two lengths for every prompt that was asked twice."""
        return [
            (each.lengths[0], each.lengths[1]) for each in self.examples if len(each.lengths) > 1
        ]


@dataclass(frozen=True, slots=True)
class Buckets:
    """``num`` length buckets, ``width`` tokens wide, the last one open (paper section 3.3.2)."""

    num: int
    width: int

    def of(self, tokens: float) -> int:
        """Return the bucket of an output."""
        return min(int(tokens // self.width), self.num - 1)

    def coarser(self, factor: int) -> Buckets:
        """Each of these covers `factor` of the others; the last one stays open."""
        return Buckets(-(-self.num // factor), self.width * factor)


class Split(NamedTuple):
    """Examples by their use."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


def read_outputs(path: Path) -> Outputs:
    """Read a whole file, grouped by prompt; ConfigError if it holds no outputs."""
    lines, _ = _whole_lines(path)
    if len(lines) < 2:
        raise ConfigError(f"{path}: it holds no outputs; collect.py writes such files")
    target = _decode(lines[0], Target, f"{path}, line 1")
    found: dict[str, dict[int, Output]] = {}
    for number, line in enumerate(lines[1:], 2):
        output = _decode(line, Output, f"{path}, line {number}")
        found.setdefault(output.key, {})[output.sample] = output
    examples = []
    for key in sorted(found):
        ordered = [found[key][sample] for sample in sorted(found[key])]
        lengths = tuple(each.tokens for each in ordered)
        examples.append(Example(key, ordered[0].prompt, ordered[0].prompt_tokens, lengths))
    digest = hashlib.sha256(b"\n".join(sorted(lines))).hexdigest()[:16]
    return Outputs(target, tuple(examples), digest)


def open_outputs(path: Path, target: Target) -> tuple[BinaryIO, set[tuple[str, int]]]:
    """Open a file to append to, and return the keys and samples that it has; ConfigError if it
    holds outputs of another target."""
    lines, end = _whole_lines(path) if path.exists() else ([], 0)
    if lines and (held := _decode(lines[0], Target, f"{path}, line 1")) != target:
        raise ConfigError(f"{path} is of {held}, not of {target}; name another --output")
    outputs = (_decode(line, Output, f"{path}, line {n}") for n, line in enumerate(lines[1:], 2))
    done = {(each.key, each.sample) for each in outputs}
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    file.truncate(end)
    if not lines:
        append(file, target)
    return file, done


def append(file: BinaryIO, value: Target | Output) -> None:
    """Write one line; it is in the file when this returns."""
    file.write(msgspec.json.encode(value) + b"\n")


def split(examples: Sequence[Example], held_out: int = 0) -> Split:
    """Split by prompt: 65 % to learn from, 10 % to choose by, a quarter held out.

    It depends on the prompt alone, so it stays when outputs are added; training once per quarter
    tests every prompt by a predictor that has not seen it. ConfigError if a part is empty.
    """
    parts: tuple[list[Example], ...] = ([], [], [])
    for each in examples:
        place = int(key_of(f"{_SALT} {each.key}"), 16) % 100
        place = (place - held_out * 100 // QUARTERS) % 100 - 100 // QUARTERS
        parts[2 if place < 0 else 1 if place < _VALIDATION_PERCENT else 0].append(each)
    if not all(parts):
        raise ConfigError(f"{len(examples)} prompts are too few to split; collect more")
    return Split(*map(tuple, parts))


def buckets_for(outputs: Outputs, width: int) -> Buckets:
    """Return the buckets that these outputs fill; ConfigError if all fall into one."""
    lengths = sorted(statistics.median(each.lengths) for each in outputs.examples)
    long = lengths[int(len(lengths) * (1 - _OPEN_PART))]
    last = int(min(long, outputs.target.max_tokens) // width)
    if last < 1:
        raise ConfigError(
            f"--granularity {width}: 95 % of the outputs have at most {long:.0f} tokens, so all "
            "fall into one bucket; choose a smaller one"
        )
    return Buckets(last + 1, width)


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    """Complete lines, and where the last of them ends, in bytes."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    end = content.rfind(b"\n") + 1
    return content[:end].splitlines(), end


def _decode(line: bytes, kind: type[Line], place: str) -> Line:
    try:
        found = msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: not written by collect.py: {error}") from error
    if isinstance(found, Target) and found.format != TARGET_FORMAT:
        raise ConfigError(f"{place}: {found.format!r} is not {TARGET_FORMAT!r}")
    return found
