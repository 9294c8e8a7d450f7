"""A predictor that says again what others said, for experiments whose clients fix the lengths.

`write` makes a folder for `--tetri-predictor`. Of a prompt it says what was said before one whose
output was as long; which one, if several were, follows from the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_tetri.predictor.base import Oracle, Query
from vllm_tetri.types import Prediction

FILE = "said.json"


def write(folder: Path, said: Mapping[int, Iterable[Prediction]]) -> None:
    """Write a predictor that knows what was said of outputs by their tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {tokens: [each.lengths for each in found] for tokens, found in said.items()}
    (folder / FILE).write_bytes(msgspec.json.encode(rows))
    (folder / "predictor.py").write_text(
        f"import sys\n\nsys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from examples.predictor.replay import check, make  # noqa: E402, F401\n"
    )


def check(folder: Path) -> str:
    """Return what names the predictor in caches."""
    return hashlib.sha256((folder / FILE).read_bytes()).hexdigest()[:16]


def make(folder: Path, tokenizer: str, cores: tuple[int, ...]) -> Replay:
    """Start the predictor of a folder."""
    return Replay((folder / FILE).read_bytes())


class Replay(Oracle):
    """Knows what was said, instead of the length."""

    def __init__(self, rows: bytes) -> None:
        super().__init__()
        self._said: Any = msgspec.json.decode(rows, type=dict[int, list[tuple[float, ...]]])

    def ask(self, query: Query) -> None:
        found = self._said.get(query.output_tokens, ())
        said = Prediction(found[sum(query.token_ids) % len(found)]) if found else None
        self._known.append((query.name, said))
        self.tally.made += said is not None
