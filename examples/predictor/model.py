"""A trained predictor: a folder with a classifier, its tokenizer and ``predictor.json``.

The latter holds an `About`; the rest is as transformers saves it, so any sequence classifier will
do. torch and transformers are imported when one is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from vllm_tetri.errors import ConfigError, UnsupportedError

FORMAT = "vllm-tetri predictor 1"
TARGET_FORMAT = "vllm-tetri answers 1"
ABOUT_FILE = "predictor.json"
WEIGHTS_FILE = "model.safetensors"
# Of a long prompt the beginning and the end are read: an instruction stands at either.
_TAIL_PART = 0.25
_MOST_CHARACTERS = 16  # per token: text beyond it is not even tokenised


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model whose outputs these are, and how they were asked for."""

    model: str  # name under which the endpoint serves it
    route: str  # path that was asked, for example ``chat/completions``
    temperature: float
    max_tokens: int  # where an output was cut
    before: str = ""  # text of the chat template before a single user turn, where it is known
    after: str = ""  # and after it
    format: str = TARGET_FORMAT


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a predictor."""

    target: Target
    base_model: str  # that was fine-tuned
    granularity_tokens: int  # width of a bucket
    num_buckets: int  # the last one is open
    window_tokens: int  # longest input; of longer prompts the middle is left out
    held_out: int  # quarter of the prompts that it has not seen
    bucket_tokens: tuple[float, ...]  # mean length of the training outputs in each bucket
    bucket_quantiles: tuple[tuple[float, float, float], ...]  # their 10, 50 and 90 % quantiles
    num_prompts: dict[str, int]  # by part of the split
    data_digest: str  # of the outputs that it was trained on
    weights_digest: str  # of the weights: names this predictor in caches
    versions: dict[str, str]  # of the packages that made it
    validation: dict[str, float]  # metrics on the validation part
    format: str = FORMAT


class Artefact:
    """A predictor in memory; one thread at a time may use it."""

    def __init__(self, about: About, model: Any, tokenizer: Any) -> None:
        self.about = about
        self._model = model
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The predictor's token ids of one prompt: at least one, at most the window. The target's
        chat template around it, with special tokens, is taken off."""
        target = self.about.target
        bare = text.removeprefix(target.before).removesuffix(target.after)
        return encode(self._tokenizer, bare, self.about.window_tokens)

    def classify(self, batch: Sequence[Sequence[int]]) -> list[list[float]]:
        """Probabilities of the buckets for every encoded prompt, in one padded forward pass."""
        import torch

        if not batch:
            return []
        padded = self._tokenizer.pad(
            {"input_ids": [list(ids) for ids in batch]}, padding=True, return_tensors="pt"
        )
        with torch.inference_mode():
            logits = self._model(**padded).logits.float()
        rows: list[list[float]] = torch.softmax(logits, dim=-1).tolist()
        return rows

    def predict(self, batch: Sequence[Sequence[int]]) -> list[int]:
        """The bucket of the median length for every encoded prompt.

        The likeliest bucket is nearly always the commonest of all, and tells a scheduler next to
        nothing (docs/predictor.md).
        """
        return [median_bucket(row) for row in self.classify(batch)]


def median_bucket(probabilities: Sequence[float]) -> int:
    """The bucket at which the probabilities, added up, reach one half."""
    halves = (bucket for bucket, total in enumerate(accumulate(probabilities)) if total >= 0.5)
    return next(halves, len(probabilities) - 1)


def load(folder: Path, *, num_threads: int = 1) -> Artefact:
    """Read a predictor from its folder, for the CPU; sets torch's threads in this process.
    ConfigError if it is missing, damaged, or not what `About` describes; UnsupportedError without
    torch or transformers."""
    about = require_whole(folder)
    try:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise UnsupportedError(
            "a predictor needs torch and transformers: pip install '.[predictor]' in the clone"
        ) from error
    logging.disable_progress_bar()
    torch.set_num_threads(num_threads)
    try:
        model = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged file provokes in there
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"{folder}: cannot be loaded: {type(error).__name__}: {text}") from error
    if (num := model.config.num_labels) != about.num_buckets:
        problem = f"the model has {num} buckets, {ABOUT_FILE} {about.num_buckets}"
        raise ConfigError(f"{folder}: {problem}")
    return Artefact(about, model.float().eval(), tokenizer)


def read_about(folder: Path) -> About:
    """Read only the description; ConfigError if there is none or it contradicts itself."""
    path = folder / ABOUT_FILE
    try:
        about = msgspec.json.decode(path.read_bytes(), type=About)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{folder}: no predictor: {ABOUT_FILE}: {why}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not the description of a predictor: {error}") from error
    if about.format != FORMAT:
        raise ConfigError(f"{path}: {about.format!r} is not {FORMAT!r}")
    lengths = {len(about.bucket_tokens), len(about.bucket_quantiles)}
    least = min(about.granularity_tokens, about.window_tokens, about.num_buckets)
    if least < 1 or lengths != {about.num_buckets}:
        counts = f"{about.num_buckets} buckets, but lengths of {sorted(lengths)} of them"
        raise ConfigError(f"{path}: {counts}")
    return about


def require_whole(folder: Path) -> About:
    """Read the description and check the weights against it, without torch; ConfigError if
    there is no predictor, or its weights are damaged."""
    about = read_about(folder)
    if digest_of(folder) != about.weights_digest:
        problem = f"not the weights that {ABOUT_FILE} describes: damaged, or of another training"
        raise ConfigError(f"{folder / WEIGHTS_FILE}: {problem}")
    return about


def write_about(folder: Path, about: About) -> None:
    """Write the last files of an artefact: without them, the folder is none. An instance loads the
    code of this folder of examples by one of them."""
    (folder / "predictor.py").write_text(
        f"import sys\n\nsys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from examples.predictor.client import check, make  # noqa: E402, F401\n"
    )
    content = msgspec.json.format(msgspec.json.encode(about), indent=2)
    (folder / ABOUT_FILE).write_bytes(content + b"\n")


def digest_of(folder: Path) -> str:
    """A short digest of the weights; ConfigError if they cannot be read."""
    path = folder / WEIGHTS_FILE
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


def encode(tokenizer: Any, text: str, window_tokens: int) -> list[int]:
    """Token ids, special ones included; a long prompt loses its middle."""
    most = window_tokens * _MOST_CHARACTERS
    if len(text) > 2 * most:
        text = text[:most] + text[-most:]
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) > window_tokens:
        tail = int(window_tokens * _TAIL_PART)
        ids = ids[: window_tokens - tail] + ids[len(ids) - tail :]
    # A tokenizer without special tokens leaves nothing of an empty prompt.
    return ids or [tokenizer.pad_token_id or 0]
