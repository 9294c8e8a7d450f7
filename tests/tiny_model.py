"""A tiny Llama with random weights and a trained tokenizer, for fast tests with real vLLM.

Its text is nonsense, but deterministic: good for comparing token by token.
``python -m tests.tiny_model FOLDER`` makes one by hand.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYERS = 3
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
VOCAB = 1024
MAX_TOKENS = 4096
SEED = 20240117
ADAPTER_RANK = 8

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_DEFAULT = Path(__file__).parent.parent / ".cache" / "models" / "tiny-llama"
_CORPUS = Path(__file__).parent.parent / "LICENSE"  # English text that never changes
_MARK = "complete-1"  # a new number makes every cached copy anew


def tiny_model(folder: Path = _DEFAULT, seed: int = SEED) -> Path:
    """The model's folder, made when it is not there yet (about two seconds). Another seed makes
    other weights, in files of the same names and sizes."""
    if not (folder / _MARK).exists():
        make_tokenizer(folder)
        _make_weights(folder, seed)
        (folder / _MARK).touch()
    return folder


def quantized_model(folder: Path) -> Path:
    """A copy with layers in 8-bit integers (W8A8 of compressed-tensors), made anew."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model(), folder)
    weights, file = {}, folder / "model.safetensors"
    for name, weight in load_file(file).items():
        weights[name] = weight
        if name.endswith("proj.weight"):
            weights[f"{name}_scale"] = scale = weight.abs().amax(1, keepdim=True) / 127
            weights[name] = (weight / scale).round().to(torch.int8)
    save_file(weights, file)
    kind = {"num_bits": 8, "type": "int"}
    # For symmetric inputs vLLM has kernels of CPUs with AMX, which want bfloat16.
    inputs = {**kind, "strategy": "token", "symmetric": False, "dynamic": True}
    outer = {**kind, "strategy": "channel", "symmetric": True}
    layers = {"weights": outer, "input_activations": inputs}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"all": {"targets": ["Linear"], **layers}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_tokenizer(
    folder: Path, template: str = CHAT_TEMPLATE, more: tuple[str, ...] = (), **named: str
) -> None:
    """Train a tokenizer; more special tokens follow the vocabulary, some of them with a name."""
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
        tokenizer_object=tokenizer,
        bos_token="<|start|>",
        eos_token="<|end|>",
        pad_token="<|none|>",
        extra_special_tokens=named,
    )
    fast.add_tokens(list(more), special_tokens=True)
    fast.chat_template = template
    fast.save_pretrained(folder)


def _make_weights(folder: Path, seed: int) -> None:
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
    save_random_weights(LlamaForCausalLM, config, folder, seed)


def save_random_weights(kind: Callable[[Any], Any], config: Any, folder: Path, seed: int) -> None:
    """Write a checkpoint of a model of this kind, whose weights follow from the seed."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).to(torch.float32)
    model.save_pretrained(folder)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}))


def make_adapter(
    model: Path, folder: Path, modules: list[str], *, scale: float, seed: int = SEED
) -> Path:
    """Make a LoRA adapter for these modules of a checkpoint, with random weights: the larger their
    `scale`, the more they change what the model says."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    made = torch.Generator().manual_seed(seed)
    parts = {}
    with safe_open(model / "model.safetensors", "pt") as weights:
        for key in weights.keys():  # noqa: SIM118
            name = key.removesuffix(".weight")
            if name.rpartition(".")[2] in modules:
                rows, columns = weights.get_tensor(key).shape
                for part, shape in (("A", (ADAPTER_RANK, columns)), ("B", (rows, ADAPTER_RANK))):
                    parts[f"base_model.model.{name}.lora_{part}.weight"] = scale * torch.randn(
                        shape, generator=made
                    )
    folder.mkdir(exist_ok=True)
    save_file(parts, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": ADAPTER_RANK, "bias": "none",
        "lora_alpha": ADAPTER_RANK, "target_modules": modules}))  # fmt: skip
    return folder


if __name__ == "__main__":
    print(tiny_model(Path(sys.argv[1]) if len(sys.argv) > 1 else _DEFAULT))
