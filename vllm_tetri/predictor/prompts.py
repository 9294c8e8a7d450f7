"""Prompts out of the files that people have them in.

A source is a file or a folder of files; by the ending of a name:

- ``.json``: a list of items, one item, or one per line;
- ``.jsonl``: one item per line;
- anything else: one prompt per line.

An item is a text, or an object with one of the fields of `_readers`. Of a
conversation the first user turn is the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tetri.errors import ConfigError

_ITEM_FILES = {".json", ".jsonl"}
_USERS = {"human", "user"}
_KEY_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and the name of the source it came from."""

    text: str
    source: str

    @property
    def key(self) -> str:
        """Names the text in files: equal texts, equal keys."""
        return key_of(self.text)


@dataclass(frozen=True, slots=True)
class Source:
    """What a file or folder held; ``num_empty`` items had no prompt."""

    name: str
    texts: tuple[str, ...]
    num_empty: int


def key_of(text: str) -> str:
    """A short digest of a prompt."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_KEY_DIGITS]


def read_source(path: Path) -> Source:
    """All prompts of a file or folder, in its order.

    Raises:
        ConfigError: It cannot be read, is not UTF-8 or JSON, or holds no prompt; names
            the file and the place.
    """
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in _ITEM_FILES)
    else:
        files = [path]
    texts: list[str] = []
    num_empty = 0
    for file in files:
        for text in _texts(file):
            if text.strip():
                texts.append(text)
            else:
                num_empty += 1
    if not texts:
        raise ConfigError(f"{path}: no prompt in it; known fields: {', '.join(_readers)}")
    return Source(path.stem, tuple(texts), num_empty)


def mixed(sources: Sequence[Source], *, per_source: int | None, seed: int) -> list[Prompt]:
    """Different prompts of all sources in random order, so that any beginning of the
    list is a fair sample of the whole.

    The place of a prompt depends on nothing but its text, its source and the seed: the
    order of what is there stays when a source grows.

    Args:
        per_source: At most so many prompts of each source, drawn at random.
    """
    chosen: dict[str, Prompt] = {}
    for source in sources:
        # Not in the order of the result: the few that are drawn of many would all come first.
        drawn = sorted(set(source.texts), key=lambda text: key_of(f"{seed} draw {text}"))
        for text in drawn[:per_source]:
            chosen.setdefault(text, Prompt(text, source.name))
    return [chosen[text] for text in sorted(chosen, key=lambda text: key_of(f"{seed} {text}"))]


def _texts(path: Path) -> Iterable[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if path.suffix not in _ITEM_FILES:
        yield from (line for line in content.splitlines() if line.strip())
    elif path.suffix == ".json" and not _is_lines(content):
        items = _parse(content, str(path))
        yield from map(_text_of, items if isinstance(items, list) else [items])
    else:
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                yield _text_of(_parse(line, f"{path}, line {number}"))


def _is_lines(content: str) -> bool:
    """Whether the first of several lines is an item: some name such files .json."""
    first, _, rest = content.partition("\n")
    try:
        return bool(rest.strip()) and isinstance(json.loads(first), Mapping)
    except (ValueError, RecursionError):
        return False


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error


def _text_of(item: Any) -> str:
    """The prompt of an item, empty where it has none."""
    if isinstance(item, str):
        return item
    if isinstance(item, Mapping):
        for field, read in _readers.items():
            if field in item:
                return read(item)
    return ""


def _of_field(field: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda item: _content(item[field])


def _of_instruction(item: Mapping[str, Any]) -> str:
    """Alpaca: an instruction, and maybe what it is about."""
    parts = (_content(item["instruction"]), _content(item.get("input")))
    return "\n\n".join(part for part in parts if part.strip())


def _of_turns(field: str, speaker: str, said: str) -> Callable[[Mapping[str, Any]], str]:
    def first(item: Mapping[str, Any]) -> str:
        turns = item[field] if isinstance(item[field], list) else []
        for turn in turns:
            if isinstance(turn, Mapping) and turn.get(speaker) in _USERS:
                return _content(turn.get(said))
        return ""

    return first


def _content(value: Any) -> str:
    """A text, or the text parts of an OpenAI message."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = (part.get("text") for part in value if isinstance(part, Mapping))
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


_readers: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "conversations": _of_turns("conversations", "from", "value"),  # ShareGPT
    "messages": _of_turns("messages", "role", "content"),  # OpenAI
    "prompt": _of_field("prompt"),
    "instruction": _of_instruction,  # Alpaca, alpaca_eval
    "user_query": _of_field("user_query"),  # HaluEval
}
