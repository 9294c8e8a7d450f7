"""Step costs from data sheets: an estimate, measured nowhere.

A model is known by its architecture. A device does a part of its published arithmetic and reads at
a part of its published bandwidth; weights and KV are 16 bits wide and divided evenly over the
devices of an instance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.cost.step_cost import Roofline

_BYTES = 2  # of a weight or a value of KV: fp16 or bf16
# Parts of published figures that engines reach in large matrix products and in long reads. These
# and the times below are round guesses for vLLM with CUDA graphs.
ARITHMETIC_PART, BANDWIDTH_PART = 0.6, 0.8
MEMORY_PART = 0.9  # for weights and KV: vLLM's default of 0.92 less activations and graphs
OVERHEAD_S = 0.003
ALL_REDUCE_S = 1e-5  # to begin one; there are two in a layer
_GIB = 1 << 30
# `model_type` of configurations that are read; feed-forward layers of all but OPT have a gate.
_KINDS = (
    "gemma", "gemma2", "granite", "llama", "mistral", "olmo2", "opt", "phi3", "qwen2", "qwen3",
    "smollm3",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder of transformer layers in 16 bits."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of its feed-forward layers
    ffn_matrices: int  # of each: 3 with a gate, 2 without
    vocabulary: int
    is_tied: bool = False  # whether the first and the last layer share their weights

    @property
    def parameters(self) -> int:
        """Parameters without biases, norms and learnt positions, which are under 1 %."""
        return self.step_parameters + (0 if self.is_tied else self.vocabulary * self.hidden)

    @property
    def step_parameters(self) -> int:
        """Parameters that a step reads: all but the table of token embeddings."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        ffn = self.ffn_matrices * self.hidden * self.ffn
        return self.layers * (attention + ffn) + self.vocabulary * self.hidden

    @property
    def kv_token_bytes(self) -> int:
        """KV of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES

    def kv_bytes(self, parallel: int) -> int:
        """KV of a token on all devices together, with copies if there are fewer heads than
        devices; 0 if its heads cannot be divided by that."""
        if parallel < 1 or self.heads % parallel:
            return 0
        if parallel >= self.kv_heads and parallel % self.kv_heads == 0:
            return self.kv_token_bytes * parallel // self.kv_heads
        return 0 if self.kv_heads % parallel else self.kv_token_bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device, by its data sheet."""

    name: str
    flops: float  # dense 16-bit matrix products, per second
    bandwidth: float  # bytes of its memory per second
    memory_bytes: int
    link: float  # bytes per second to the others of its instance, in one direction
    watts: (
        float  # TDP: what the vendor allows it to draw at most, not what serving was seen to draw
    )
    rack_units: float  # an eighth of the vendor's server with eight of them


# From their published configurations.
MODELS = {each.name: each for each in (
    Model("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 3, 32000),
    Model("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 3, 128256),
    Model("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 3, 128256),
    Model("mistral-7b", 32, 4096, 32, 8, 128, 14336, 3, 32768),
    Model("opt-13b", 40, 5120, 40, 40, 128, 20480, 2, 50272, is_tied=True),
    Model("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 3, 152064),
    Model("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 3, 152064),
    Model("smollm2-135m", 30, 576, 9, 3, 64, 1536, 3, 49152, is_tied=True),
)}  # fmt: skip
# NVIDIA's data sheets, SXM variants, which count both directions of NVLink; DGX-1, DGX A100, H100
# and H200 for the space.
GPUS = {each.name: each for each in (
    Gpu("v100-32g", 125e12, 0.9e12, 32 * _GIB, 300e9 / 2, 300, 3 / 8),
    Gpu("a100-80g", 312e12, 2.039e12, 80 * _GIB, 600e9 / 2, 400, 6 / 8),
    Gpu("h100-80g", 989e12, 3.35e12, 80 * _GIB, 900e9 / 2, 700, 8 / 8),
    Gpu("h200", 989e12, 4.8e12, 141 * _GIB, 900e9 / 2, 700, 8 / 8),
)}  # fmt: skip


def gpu(name: str) -> Gpu:
    """Return a device by its name, or by the beginning of exactly one: `h100`, `h100@350` with its
    power capped at so many watts (Splitwise, section IV-D); raises ConfigError if there is none.

    A cap is estimated to lower the clock, and so the arithmetic, by the cube root of the power,
    and to leave the memory as fast as it is.
    """
    start, is_capped, cap = name.lower().partition("@")
    found = [each for each in GPUS.values() if start and each.name.startswith(start)]
    if len(found) != 1:
        raise ConfigError(f"no GPU {name!r}; there are {', '.join(GPUS)}")
    (whole,) = found
    if not is_capped:
        return whole
    if not cap.isdecimal() or not whole.watts / 4 <= int(cap) <= whole.watts:
        bounds = f"{whole.watts / 4:g} to {whole.watts:g}"
        raise ConfigError(f"GPU {name!r}: a cap is a whole number of watts, {bounds} of this one")
    share = int(cap) / whole.watts
    flops = whole.flops * share ** (1 / 3)
    return replace(whole, name=f"{whole.name}@{cap}", flops=flops, watts=int(cap))


def model(name: str) -> Model:
    """Return a known model, or that of a Hugging Face `config.json` or its folder; raises
    ConfigError if there is neither, or it is not a dense decoder in 16 bits."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    if path.suffix != ".json" or not path.is_file():
        raise ConfigError(
            f"no model {name!r}; there are {', '.join(MODELS)}, and folders with a config.json"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        kind = raw.get("model_type")
        if kind not in _KINDS or raw.get("quantization_config"):
            raise ConfigError(
                f"model {path}: of model_type {kind!r} or quantised, which cannot be counted; "
                f"{', '.join(_KINDS)} in 16 bits can"
            )
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        layers, hidden, heads, vocabulary = (int(raw[name]) for name in names)
        if min(layers, hidden, heads, vocabulary) < 1:
            raise ValueError("heads, layers, hidden size and vocabulary must be at least 1")
        kv_heads = int(raw.get("num_key_value_heads") or heads)
        head_dim = int(raw.get("head_dim") or hidden // heads)
        ffn, ffn_matrices = ("ffn_dim", 2) if kind == "opt" else ("intermediate_size", 3)
        return Model(
            path.parent.name or path.stem, layers, hidden, heads, kv_heads, head_dim,
            int(raw[ffn]), ffn_matrices, vocabulary,
            is_tied=bool(raw.get("tie_word_embeddings", kind in ("opt", "gemma", "gemma2"))),
        )  # fmt: skip
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"model {path}: {error!r}") from error


def roofline(model: Model, device: Gpu, parallel: int) -> Roofline:
    """Return the steps of an instance on `parallel` devices (tensor parallel); raises ConfigError
    if the model's heads cannot be divided by that."""
    kv_bytes = model.kv_bytes(parallel)
    if not kv_bytes:
        raise ConfigError(f"{model.name} has {model.heads} heads, not to be cut into {parallel}")
    flops = device.flops * ARITHMETIC_PART * parallel
    bandwidth = device.bandwidth * BANDWIDTH_PART * parallel
    num_reduces = 2 * model.layers if parallel > 1 else 0
    attention = 4 * model.layers * model.heads * model.head_dim  # scores and weighted values
    # Every device sends and gets all but its part twice (ring).
    reduced_bytes = num_reduces * model.hidden * _BYTES * 2 * (parallel - 1) / parallel
    return Roofline(
        overhead_s=OVERHEAD_S + num_reduces * ALL_REDUCE_S,
        weights_s=model.step_parameters * _BYTES / bandwidth,
        token_s=2 * model.step_parameters / flops,
        kv_s=kv_bytes / bandwidth,
        attention_s=attention / flops,
        link_s=reduced_bytes / (device.link * BANDWIDTH_PART),
    )


def kv_tokens(model: Model, device: Gpu, parallel: int) -> int:
    """Return how many tokens of KV fit next to the weights of an instance; raises ConfigError if
    none does."""
    usable = device.memory_bytes * MEMORY_PART * parallel - model.parameters * _BYTES
    tokens = int(usable // model.kv_bytes(parallel))
    if tokens < 1:
        raise ConfigError(
            f"{model.name} has {model.parameters * _BYTES / _GIB:.0f} GiB of weights, too "
            f"many for {parallel} {device.name}; cut it over more with :N"
        )
    return tokens
