"""Prompts out of the files that people have them in.

A source is a file or a folder of files. ``.json`` holds a list of items, one item, or one per
line; ``.jsonl`` one item per line; any other file one prompt per line. An item is a text, or an
object of a known data set (`READERS`). The prompt of a conversation is its first user turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_tetri.errors import ConfigError

_ITEM_FILES = {".json", ".jsonl"}


class Prompt(NamedTuple):
    """One prompt and the name of the source it came from."""

    text: str
    source: str

    @property
    def key(self) -> str:
        """Names the text in files."""
        return key_of(self.text)


def key_of(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_prompts(
    paths: Iterable[Path], *, per_source: int | None = None, seed: int = 0
) -> list[Prompt]:
    """Different prompts of all sources in random order, so that any beginning of the list is a
    fair sample. The order depends only on texts, sources and seed: it stays when a source grows.

    At most `per_source` prompts of each are drawn. ConfigError if a source holds none.
    """
    chosen: dict[str, Prompt] = {}
    for path in paths:
        texts = {text for file in _files(path) for text in _texts(file) if text.strip()}
        if not texts:
            raise ConfigError(f"{path}: no prompt in it; known fields: {', '.join(READERS)}")
        # Not in the order of the result: the few that are drawn of many would all come first.
        drawn = sorted(texts, key=lambda text: key_of(f"{seed} draw {text}"))
        for text in drawn[:per_source]:
            chosen.setdefault(text, Prompt(text, path.stem))
    return [chosen[text] for text in sorted(chosen, key=lambda text: key_of(f"{seed} {text}"))]


def _files(path: Path) -> Sequence[Path]:
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.suffix in _ITEM_FILES)
    return [path]


def _texts(path: Path) -> Iterable[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if path.suffix not in _ITEM_FILES:
        return content.split("\n")
    try:
        try:
            items = json.loads(content)
        except ValueError:  # one item per line, which some data sets name .json, too
            items = [json.loads(line) for line in content.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    return map(prompt_of, items if isinstance(items, list) else [items])


def prompt_of(item: Any) -> str:
    """Return the prompt of an item, empty where it has none."""
    if isinstance(item, str):
        return item
    if isinstance(item, Mapping):
        for field, read in READERS.items():
            if field in item:
                return read(item)
    return ""


def _field(field: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda item: _content(item[field])


def _instruction(item: Mapping[str, Any]) -> str:
    parts = (_content(item["instruction"]), _content(item.get("input")))
    return "\n\n".join(part for part in parts if part.strip())


def _turns(field: str, speaker: str, said: str) -> Callable[[Mapping[str, Any]], str]:
    def first(item: Mapping[str, Any]) -> str:
        for turn in item[field] if isinstance(item[field], list) else []:
            if isinstance(turn, Mapping) and turn.get(speaker) in ("human", "user"):
                return _content(turn.get(said))
        return ""

    return first


def _content(value: Any) -> str:
    """A text, or the text parts of an OpenAI message."""
    if isinstance(value, list):
        parts = (part.get("text") for part in value if isinstance(part, Mapping))
        return "\n".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else ""


READERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "conversations": _turns("conversations", "from", "value"),  # ShareGPT
    "messages": _turns("messages", "role", "content"),  # OpenAI
    "prompt": _field("prompt"),
    "instruction": _instruction,  # Alpaca, alpaca_eval
    "user_query": _field("user_query"),  # HaluEval
}
