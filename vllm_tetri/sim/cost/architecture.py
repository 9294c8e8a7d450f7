"""Models by their architecture: how many weights, how much KV, how much arithmetic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tetri.errors import ConfigError

WEIGHT_BYTES = KV_BYTES = 2  # fp16 or bf16

# `model_type` of configurations that are read, and matrices of their feed-forward layers.
_MATRICES = {
    "gemma": 3,
    "gemma2": 3,
    "granite": 3,
    "llama": 3,
    "mistral": 3,
    "olmo2": 3,
    "opt": 2,
    "phi3": 3,
    "qwen2": 3,
    "qwen3": 3,
    "smollm3": 3,
}


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder of transformer layers in 16 bits.

    Attributes:
        ffn: Width of its feed-forward layers.
        ffn_matrices: Matrices of each: 3 with a gate, 2 without.
        is_tied: Whether the first and the last layer share their weights.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    ffn_matrices: int
    vocabulary: int
    is_tied: bool

    @property
    def parameters(self) -> int:
        """Without biases, norms and learnt positions, which are under 1 %."""
        return self.step_parameters + (0 if self.is_tied else self.vocabulary * self.hidden)

    @property
    def step_parameters(self) -> int:
        """That a step reads and multiplies with: all but the table of token embeddings."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        ffn = self.ffn_matrices * self.hidden * self.ffn
        return self.layers * (attention + ffn) + self.vocabulary * self.hidden

    @property
    def kv_token_bytes(self) -> int:
        """KV of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * KV_BYTES

    @property
    def attention_operations(self) -> int:
        """Per token and token of its context: scores, and what they weigh."""
        return 4 * self.layers * self.heads * self.head_dim


# Of their published configurations.
MODELS = {
    each.name: each
    for each in (
        Model("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 3, 32000, is_tied=False),
        Model("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 3, 128256, is_tied=False),
        Model("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 3, 128256, is_tied=False),
        Model("mistral-7b", 32, 4096, 32, 8, 128, 14336, 3, 32768, is_tied=False),
        Model("opt-13b", 40, 5120, 40, 40, 128, 20480, 2, 50272, is_tied=True),
        Model("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 3, 152064, is_tied=False),
        Model("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 3, 152064, is_tied=False),
        Model("smollm2-135m", 30, 576, 9, 3, 64, 1536, 3, 49152, is_tied=True),
    )
}


def model(name: str) -> Model:
    """A model that is known, or that of a Hugging Face configuration: a folder, or a file
    `config.json` in one.

    Raises:
        ConfigError: Neither, or an architecture that this cannot count.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json" or not path.is_file():
        raise ConfigError(
            f"no model {name!r}; there are {', '.join(MODELS)}, and folders with a config.json"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: {error}") from error
    return _parse(path, raw)


def _parse(path: Path, raw: object) -> Model:
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or kind not in _MATRICES:
        raise ConfigError(
            f"model {path}: model_type {kind!r} cannot be counted; {', '.join(_MATRICES)} can"
        )
    if raw.get("quantization_config"):
        raise ConfigError(f"model {path}: weights that are quantised cannot be counted")
    heads = _number(path, raw, "num_attention_heads")
    hidden = _number(path, raw, "hidden_size")
    return Model(
        name=path.parent.name or path.stem,
        layers=_number(path, raw, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(path, raw, "num_key_value_heads", heads),
        head_dim=_number(path, raw, "head_dim", hidden // heads),
        ffn=_number(path, raw, "ffn_dim" if kind == "opt" else "intermediate_size"),
        ffn_matrices=_MATRICES[kind],
        vocabulary=_number(path, raw, "vocab_size"),
        is_tied=bool(raw.get("tie_word_embeddings", kind in ("opt", "gemma", "gemma2"))),
    )


def _number(path: Path, raw: dict[str, Any], name: str, usual: int | None = None) -> int:
    value = raw.get(name)
    if value is None and usual is not None:
        return usual
    if type(value) is not int or value < 1:
        raise ConfigError(f"model {path}: {name} is {value!r}; it must be a whole number from 1")
    return value
