"""Requests of five classes from a data set in ShareGPT's format, by the paper's thresholds.

A pair is a turn of a user and the answer to it; its prompt has only that turn, as the paper's short
prompts have (a median of 18 tokens). Prompts of more than 512 tokens are heavy, and outputs of more
than 128 (TetriInfer, section 5.1); `mixed` draws from all pairs. Pairs that do not fit the window
are left out, as the paper's model has the same one. Files are the user's: none is shipped.
"""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from examples.benchmarks.client import TOKEN_IDS
from vllm_tetri.policy.lengths import HEAVY_TOKENS
from vllm_tetri.sim.workload import KINDS

HEAVY_PROMPT = 512  # tokens: more than these
_USERS, _MODELS = {"human", "user"}, {"gpt", "chatgpt", "assistant", "bing", "bard"}

Tokenize = Callable[[str], list[int]]


def class_of(prompt_tokens: int, output_tokens: int) -> str:
    """Return the class of a request by its lengths."""
    prompt = "hp" if prompt_tokens > HEAVY_PROMPT else "lp"
    return prompt + ("hd" if output_tokens > HEAVY_TOKENS else "ld")


def conversations(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the conversations of a file: JSON, a list or one; a line each; compressed; or an
    archive of such files."""
    if ".tar" in path.suffixes:
        with tarfile.open(path) as archive:
            for member in archive:
                if (file := archive.extractfile(member)) and ".json" in member.name:
                    yield from _parse(file.read())
        return
    raw = path.read_bytes()
    yield from _parse(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def _parse(raw: bytes) -> list[dict[str, Any]]:
    try:
        found = json.loads(raw)
    except json.JSONDecodeError:
        found = [json.loads(line) for line in raw.splitlines() if line.strip()]
    return found if isinstance(found, list) else [found]


def turns(conversation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a user said, and the answer to it."""
    said = conversation.get("conversations") or conversation.get("conversation") or []
    for prompt, answer in pairwise(said):
        if prompt["from"] in _USERS and answer["from"] in _MODELS:
            yield prompt["value"], answer["value"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Prompts as token ids, and lengths of their answers, by class; `mixed` has all."""

    by_class: dict[str, list[tuple[list[int], int]]]

    def __call__(self, name: str, rng: Random) -> tuple[list[int], int]:
        """Draw one. A pair may come again, so its first token is drawn anew: what a server has
        cached of it does not help."""
        prompt, output_tokens = rng.choice(self.by_class[name])
        return [rng.choice(TOKEN_IDS), *prompt[1:]], output_tokens

    def facts(self) -> dict[str, int]:
        """Count the pairs of each class."""
        return {name: len(pairs) for name, pairs in self.by_class.items()}


def read(path: Path, tokenize: Tokenize, window_tokens: int) -> Pairs:
    """Read pairs of a file.

    Raises:
        ValueError: It has no pair of some class.
    """
    found: dict[str, list[tuple[list[int], int]]] = {name: [] for name in KINDS}
    for conversation in conversations(path):
        for prompt, answer in turns(conversation):
            ids, output_tokens = tokenize(prompt), len(tokenize(answer))
            if ids and output_tokens and len(ids) + output_tokens < window_tokens:
                for name in (class_of(len(ids), output_tokens), "mixed"):
                    found[name].append((ids, output_tokens))
    if missing := [name for name, pairs in found.items() if not pairs]:
        raise ValueError(f"{path}: no pair of {', '.join(missing)} in ShareGPT's format")
    return Pairs(found)


def tokenizer(model: str) -> Tokenize:
    """Return what makes token ids of a text, without tokens at its ends."""
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(model)

    def tokenize(text: str) -> list[int]:
        ids: list[int] = known.encode(text, add_special_tokens=False, verbose=False)
        return ids

    return tokenize
