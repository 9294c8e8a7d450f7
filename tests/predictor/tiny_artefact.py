"""A predictor too small to know anything, made from scratch: for tests of everything else.

``python -m tests.predictor.tiny_artefact FOLDER`` makes one by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from examples.predictor.model import About, Target, digest_of, write_about

WINDOW_TOKENS = 64
TARGET = Target(
    model="tiny",
    route="chat/completions",
    temperature=0.7,
    max_tokens=1000,
    before="<|start|>user\n",
    after="<|end|>\n<|start|>assistant\n",
)
SPECIAL = ["[PAD]", "[CLS]", "[SEP]"]


def make(folder: Path, *, num_buckets: int = 4, granularity: int = 200) -> Path:
    """A whole artefact, with random weights (about a second)."""
    make_base(folder, num_labels=num_buckets)
    middle = [(index + 0.5) * granularity for index in range(num_buckets)]
    about = About(
        target=TARGET,
        base_model="from scratch",
        granularity_tokens=granularity,
        num_buckets=num_buckets,
        window_tokens=WINDOW_TOKENS,
        held_out=0,
        bucket_tokens=tuple(middle),
        bucket_quantiles=tuple((each - 10, each, each + 10) for each in middle),
        num_prompts={"train": 0, "validation": 0, "test": 0},
        data_digest="",
        weights_digest=digest_of(folder),
        versions={},
        validation={},
    )
    write_about(folder, about)
    return folder


def make_base(folder: Path, *, num_labels: int = 2) -> Path:
    """An untrained classifier, and a tokenizer of single bytes."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    config = BertConfig(
        vocab_size=256 + len(SPECIAL),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=WINDOW_TOKENS,
        pad_token_id=0,
        num_labels=num_labels,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """Bytes are tokens; [CLS] and [SEP] go around them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=WINDOW_TOKENS,
    ).save_pretrained(folder)


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
