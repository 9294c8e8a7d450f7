"""A trained predictor: a folder with a classifier, its tokenizer and what it is good for.

``predictor.json`` holds an `About`; the rest is as transformers saves it, so any
sequence classifier will do. torch and transformers are imported when one is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.predictor.answers import Target
from vllm_tetri.predictor.dataset import Buckets
from vllm_tetri.types import Prediction

FORMAT = "vllm-tetri predictor 1"
ABOUT_FILE = "predictor.json"
WEIGHTS_FILE = "model.safetensors"
# Longest input, in the predictor's tokens (the cutting limit of paper section 3.3.2).
WINDOW_TOKENS = 512
# Of a longer prompt the beginning and the end are read: an instruction stands at either.
_TAIL_PART = 0.25
# Per token: text beyond it is not even tokenised, so a huge prompt costs no more.
_MOST_CHARACTERS = 16


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a predictor says of itself.

    Attributes:
        target: Whose answers it predicts, and how they were asked for.
        base_model: What was fine-tuned.
        granularity_tokens: Width of a bucket.
        num_buckets: The last one is open.
        window_tokens: Longest input; of longer prompts the middle is left out.
        held_out: Quarter of the prompts that it has not seen, of `dataset.split_of`.
        bucket_tokens: Mean length of the training answers in each bucket.
        bucket_quantiles: Their 10 %, 50 % and 90 % quantiles.
        num_prompts: Prompts per part of the split.
        data_digest: Of the answers it was trained on.
        weights_digest: Of the weights: names this predictor in caches.
        versions: Of the packages that made it.
        validation: Metrics on the validation part.
        format: Version of this file.
    """

    target: Target
    base_model: str
    granularity_tokens: int
    num_buckets: int
    window_tokens: int
    held_out: int
    bucket_tokens: tuple[float, ...]
    bucket_quantiles: tuple[tuple[float, float, float], ...]
    num_prompts: dict[str, int]
    data_digest: str
    weights_digest: str
    versions: dict[str, str]
    validation: dict[str, float]
    format: str = FORMAT

    @property
    def buckets(self) -> Buckets:
        """The buckets it tells apart."""
        return Buckets(self.num_buckets, self.granularity_tokens)


class Artefact:
    """A predictor in memory; one thread at a time may use it."""

    def __init__(self, about: About, model: Any, tokenizer: Any) -> None:
        self.about = about
        self._model = model
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The predictor's token ids of one prompt: at least one, at most the window.

        Args:
            text: The bare prompt, or as the target's tokenizer decodes it, special
                tokens included: the target's chat template around it is taken off.
        """
        return encode(self._tokenizer, bare(text, self.about.target), self.about.window_tokens)

    def classify(self, batch: Sequence[Sequence[int]]) -> list[list[float]]:
        """Probabilities of the buckets for every encoded prompt, in one forward pass.

        Shorter ones are padded to the longest.
        """
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

    def predict(self, batch: Sequence[Sequence[int]]) -> list[Prediction]:
        """The bucket of the median length for every encoded prompt.

        Not the likeliest one: that is nearly always the commonest bucket of all, and
        tells a scheduler next to nothing (docs/predictor.md).
        """
        buckets = self.about.buckets
        return [
            Prediction(median_bucket(row), buckets.num, buckets.granularity_tokens)
            for row in self.classify(batch)
        ]


def median_bucket(probabilities: Sequence[float]) -> int:
    """Where the probabilities, added up, reach one half."""
    total = 0.0
    for bucket, probability in enumerate(probabilities):
        total += probability
        if total >= 0.5:
            return bucket
    return len(probabilities) - 1


def load(folder: Path, *, num_threads: int = 1) -> Artefact:
    """Read a predictor from its folder, for the CPU.

    Args:
        num_threads: Threads of torch, in this whole process.

    Raises:
        ConfigError: One line: it is missing, damaged, or not what `About` says.
        UnsupportedError: torch or transformers is not installed.
    """
    about = require_whole(folder)
    require_torch()
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # it takes a moment, and belongs to no terminal of ours
    torch.set_num_threads(num_threads)
    try:
        model = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a damaged file provokes in there
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"{folder}: cannot be loaded: {type(error).__name__}: {text}") from error
    if model.config.num_labels != about.num_buckets:
        raise ConfigError(
            f"{folder}: the model tells {model.config.num_labels} buckets apart, "
            f"{ABOUT_FILE} names {about.num_buckets}"
        )
    return Artefact(about, model.float().eval(), tokenizer)


def read_about(folder: Path) -> About:
    """Only what a predictor says of itself: cheap, without torch.

    Raises:
        ConfigError: There is none, or it makes no sense.
    """
    path = folder / ABOUT_FILE
    try:
        about = msgspec.json.decode(path.read_bytes(), type=About)
    except OSError as error:
        raise ConfigError(
            f"{folder}: no predictor: {ABOUT_FILE}: {error.strerror or error}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not written by predictor train: {error}") from error
    if about.format != FORMAT:
        raise ConfigError(f"{path}: {about.format!r} is not {FORMAT!r}")
    lengths = {len(about.bucket_tokens), len(about.bucket_quantiles)}
    if about.granularity_tokens < 1 or about.window_tokens < 1 or lengths != {about.num_buckets}:
        raise ConfigError(
            f"{path}: {about.num_buckets} buckets, but lengths of {sorted(lengths)} of them"
        )
    return about


def require_whole(folder: Path) -> About:
    """`read_about`, after a look at the weights; without torch.

    Raises:
        ConfigError: There is no predictor, or its weights are damaged.
    """
    about = read_about(folder)
    if digest_of(folder) != about.weights_digest:
        raise ConfigError(
            f"{folder / WEIGHTS_FILE}: not the weights that {ABOUT_FILE} describes; "
            "the file is damaged or from another training"
        )
    return about


def write_about(folder: Path, about: About) -> None:
    """The last file of an artefact: without it, it is none."""
    content = msgspec.json.format(msgspec.json.encode(about), indent=2)
    (folder / ABOUT_FILE).write_bytes(content + b"\n")


def digest_of(folder: Path) -> str:
    """A short digest of the weights.

    Raises:
        ConfigError: They cannot be read.
    """
    path = folder / WEIGHTS_FILE
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


def bare(text: str, target: Target) -> str:
    """A prompt without the target's chat template around a single user turn."""
    return text.removeprefix(target.before).removesuffix(target.after)


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


def require_torch() -> None:
    """Make sure that a classifier can be run, before anything slow is started.

    Raises:
        UnsupportedError: torch or transformers is missing; says how to get them.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "a predictor needs torch and transformers; install them with "
            "pip install 'vllm-tetri[predictor]'"
        ) from error
