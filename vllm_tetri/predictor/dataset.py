"""Answers as examples to learn from: buckets, labels, and who is held out.

Bucket k is [k·g, (k+1)·g) tokens (paper section 3.3.2, TI-LP-2); the last one is open
and begins no later than where answers were cut, so that a cut answer's bucket is known.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import StrEnum

from vllm_tetri.errors import ConfigError
from vllm_tetri.predictor.answers import Answers, Asked
from vllm_tetri.predictor.prompts import key_of

# Few answers lie in the open bucket, but enough to learn from.
_OPEN_PART = 0.05
QUARTERS = 4  # any of them may be the one that is held out
_QUARTER_PERCENT = 100 // QUARTERS
_VALIDATION_PERCENT = 10
_SALT = "split 1"  # another one draws another split


class Split(StrEnum):
    """What a prompt is used for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Buckets:
    """``num`` length buckets, ``granularity_tokens`` wide, the last one open.

    Raises:
        ValueError: Fewer than one bucket, or an empty one.
    """

    num: int
    granularity_tokens: int

    def __post_init__(self) -> None:
        if self.num < 1 or self.granularity_tokens < 1:
            raise ValueError(f"no buckets: {self}")

    def of(self, tokens: float) -> int:
        """The bucket of an answer."""
        return min(int(tokens // self.granularity_tokens), self.num - 1)

    def coarser(self, factor: int) -> Buckets:
        """Each of these covers `factor` of the others; the last one stays open."""
        return Buckets(-(-self.num // factor), self.granularity_tokens * factor)

    def names(self) -> list[str]:
        """``0-199``, ``200-399``, ``400+``."""
        starts = [index * self.granularity_tokens for index in range(self.num)]
        closed = [f"{start}-{start + self.granularity_tokens - 1}" for start in starts[:-1]]
        return [*closed, f"{starts[-1]}+"]


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt.

    Attributes:
        key: Its digest.
        text: What the predictor reads.
        prompt_tokens: Length as the target counts it.
        tokens: Length of one answer, the first that was collected: the truth that a
            prediction is measured against, as noisy as a real request's.
        median_tokens: Of all answers: what is learnt.
    """

    key: str
    text: str
    prompt_tokens: int
    tokens: int
    median_tokens: float


@dataclass(frozen=True, slots=True)
class Dataset:
    """Examples by what they are used for."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


def split_of(key: str, held_out: int = 0) -> Split:
    """By the prompt alone: the same in every run, and when answers are added.

    Args:
        held_out: The quarter of all prompts that is for testing. Training once per
            quarter tests every prompt by a predictor that has not seen it.
    """
    place = int(key_of(f"{_SALT} {key}"), 16) % 100
    behind = (place - held_out * _QUARTER_PERCENT) % 100
    if behind < _QUARTER_PERCENT:
        return Split.TEST
    is_near = behind < _QUARTER_PERCENT + _VALIDATION_PERCENT
    return Split.VALIDATION if is_near else Split.TRAIN


def dataset(answers: Answers, held_out: int = 0) -> Dataset:
    """Split by prompt.

    Raises:
        ConfigError: A part of the split is empty.
    """
    parts: dict[Split, list[Example]] = {split: [] for split in Split}
    for asked in answers.asked:
        parts[split_of(asked.key, held_out)].append(_example(asked))
    empty = [split for split, examples in parts.items() if not examples]
    if empty:
        raise ConfigError(
            f"{len(answers.asked)} prompts leave nothing for {', '.join(empty)}; collect more"
        )
    return Dataset(*(tuple(parts[split]) for split in Split))


def buckets_for(answers: Answers, granularity_tokens: int) -> Buckets:
    """As many buckets as these answers fill, the same whichever part is held out.

    Raises:
        ConfigError: The answers, or where they were cut, leave a single bucket.
    """
    lengths = sorted(statistics.median(asked.lengths) for asked in answers.asked)
    long = lengths[int(len(lengths) * (1 - _OPEN_PART))]
    last = int(min(long, answers.target.max_tokens) // granularity_tokens)
    if last < 1:
        raise ConfigError(
            f"granularity {granularity_tokens}: all answers fall into one bucket; 95 % of them "
            f"are no longer than {long:.0f} tokens, cut at {answers.target.max_tokens}"
        )
    return Buckets(last + 1, granularity_tokens)


def repeated(answers: Answers) -> list[tuple[int, int]]:
    """Two answers to the same prompt, in tokens, for every prompt that has two."""
    pairs = (asked.lengths[:2] for asked in answers.asked if len(asked.lengths) > 1)
    return [(first, second) for first, second in pairs]


def _example(asked: Asked) -> Example:
    return Example(
        key=asked.key,
        text=asked.prompt,
        prompt_tokens=asked.prompt_tokens,
        tokens=asked.lengths[0],
        median_tokens=statistics.median(asked.lengths),
    )
