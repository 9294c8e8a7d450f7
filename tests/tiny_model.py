"""A tiny Llama with random weights and a trained tokenizer, for fast tests with real vLLM.

Its text is nonsense, but deterministic: good for comparing token by token.
``python -m tests.tiny_model FOLDER`` makes one by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LAYERS = 3
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
VOCAB = 1024
MAX_TOKENS = 4096
SEED = 20240117

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_DEFAULT = Path(__file__).parent.parent / ".cache" / "models" / "tiny-llama"
_CORPUS = Path(__file__).parent.parent / "LICENSE"  # English text that never changes
_MARK = "complete-1"  # a new number makes every cached copy anew


def tiny_model(folder: Path = _DEFAULT) -> Path:
    """The model's folder, made when it is not there yet (about two seconds)."""
    if not (folder / _MARK).exists():
        _make_tokenizer(folder)
        _make_weights(folder)
        (folder / _MARK).touch()
    return folder


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|none|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(_CORPUS)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|none|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _make_weights(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=MAX_TOKENS,
        # Large enough for the next token to depend on the whole prompt.
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}))


if __name__ == "__main__":
    print(tiny_model(Path(sys.argv[1]) if len(sys.argv) > 1 else _DEFAULT))
