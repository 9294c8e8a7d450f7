"""The file between `collect` and `train`: how long a model's answers to prompts were.

JSON lines, only ever appended to. The first line is a `Target`, every other one an
`Answer`. A last line without its end was cut off by a kill and does not count.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from vllm_tetri.errors import ConfigError

FORMAT = "vllm-tetri answers 1"
_Line = TypeVar("_Line", "Target", "Answer")


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose answers these are, and how they were asked for.

    Attributes:
        model: Name under which the endpoint serves the model.
        route: Path that was asked, for example ``chat/completions``.
        temperature: Of sampling.
        max_tokens: Where an answer was cut, in tokens.
        before: What the chat template puts in front of a single user turn.
        after: What it puts behind it. Both empty where the endpoint does not tell.
        format: Version of the file.
    """

    model: str
    route: str
    temperature: float
    max_tokens: int
    before: str = ""
    after: str = ""
    format: str = FORMAT


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer, without its text.

    Attributes:
        key: Of the prompt, `prompts.key_of`.
        source: Where the prompt came from.
        prompt: Its text.
        prompt_tokens: Its length as the target counts it, with the chat template.
        sample: The how manieth answer to this prompt, from 0.
        tokens: Length of the answer.
        finish: The endpoint's finish reason; ``length`` means cut at max_tokens.
    """

    key: str
    source: str
    prompt: str
    prompt_tokens: int
    sample: int
    tokens: int
    finish: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt with all its answers, in the order of their samples."""

    key: str
    source: str
    prompt: str
    prompt_tokens: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """What an answers file holds; ``digest`` names its content."""

    target: Target
    asked: tuple[Asked, ...]
    digest: str


def read_answers(path: Path) -> Answers:
    """Everything in a file, grouped by prompt, prompts in the order of their keys.

    Raises:
        ConfigError: It cannot be read, is no answers file or holds no answer; names
            the line.
    """
    content, _ = _whole_lines(path)
    if not content:
        raise ConfigError(f"{path}: empty; vllm-tetri predictor collect writes such files")
    target = _decode(content[0], Target, f"{path}, line 1")
    if target.format != FORMAT:
        raise ConfigError(f"{path}: {target.format!r} is not {FORMAT!r}")
    found: dict[str, dict[int, Answer]] = {}
    for number, line in enumerate(content[1:], 2):
        answer = _decode(line, Answer, f"{path}, line {number}")
        found.setdefault(answer.key, {})[answer.sample] = answer
    if not found:
        raise ConfigError(f"{path}: it holds no answers")
    digest = hashlib.sha256(b"\n".join(sorted(content))).hexdigest()[:16]
    return Answers(target, tuple(_asked(found[key]) for key in sorted(found)), digest)


class AnswersFile:
    """An answers file that is written to; use it as a context.

    Raises:
        ConfigError: The file belongs to another target, is damaged, or cannot be written.
    """

    def __init__(self, path: Path, target: Target) -> None:
        self.done: set[tuple[str, int]] = set()
        lines, num_bytes = _whole_lines(path) if path.exists() else ([], 0)
        if lines:
            _require_same(path, _decode(lines[0], Target, f"{path}, line 1"), target)
        for number, line in enumerate(lines[1:], 2):
            answer = _decode(line, Answer, f"{path}, line {number}")
            self.done.add((answer.key, answer.sample))
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        self._file.truncate(num_bytes)
        if not lines:
            self._write(target)

    def add(self, answer: Answer) -> None:
        """Append one answer; it is in the file when this returns."""
        self._write(answer)
        self.done.add((answer.key, answer.sample))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, value: Target | Answer) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")
        self._file.flush()


def _asked(answers: dict[int, Answer]) -> Asked:
    ordered = [answers[sample] for sample in sorted(answers)]
    first = ordered[0]
    lengths = tuple(answer.tokens for answer in ordered)
    return Asked(first.key, first.source, first.prompt, first.prompt_tokens, lengths)


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    """Complete lines, and where the last of them ends, in bytes."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    end = content.rfind(b"\n") + 1
    return content[:end].splitlines(), end


def _decode(line: bytes, kind: type[_Line], place: str) -> _Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: not written by predictor collect: {error}") from error


def _require_same(path: Path, old: Target, new: Target) -> None:
    for field in Target.__struct_fields__:
        was, wanted = getattr(old, field), getattr(new, field)
        if was != wanted:
            raise ConfigError(
                f"{path} holds answers with {field} {was!r}, not {wanted!r}; "
                "one file is for one target: choose another --output"
            )
