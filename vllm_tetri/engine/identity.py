"""What two instances must agree on before KV blocks may travel as bytes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import vllm

from vllm_tetri.engine.compat import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec
from vllm_tetri.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROTOCOL = "1"


def identity_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, tensors: list[torch.Tensor]
) -> dict[str, str]:
    """Every property that changes the bytes of a block, by name.

    The KV layout of vLLM's CPU backend is packed for the instruction set, so
    that is a property too.
    """
    model = vllm_config.model_config
    return {
        "protocol": PROTOCOL,
        "vllm": vllm.__version__,
        "model": _model_digest(model.hf_config.to_json_string(use_diff=False)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(tensors[0].dtype).removeprefix("torch."),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "block_size": str(vllm_config.cache_config.block_size),
        "num_layers": str(len(tensors)),
        "page_shape": "x".join(str(size) for size in tensors[0].shape[1:]),
        "page_strides": "x".join(str(step) for step in tensors[0].stride()[1:]),
        "layout": str(kv_cache_config.kv_cache_layout),
        "device": tensors[0].device.type,
        "isa": _instruction_set() if tensors[0].device.type == "cpu" else "",
        "tensor_parallel": str(vllm_config.parallel_config.tensor_parallel_size),
    }


def _model_digest(config_json: str) -> str:
    lines = [
        line
        for line in config_json.splitlines()
        if not line.strip().startswith(('"_name_or_path"', '"transformers_version"'))
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _instruction_set() -> str:
    return torch.backends.cpu.get_cpu_capability().replace(" ", "")


def require_carriable(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse a model whose KV this connector cannot carry.

    Raises:
        UnsupportedError: Names the property.
    """
    model = vllm_config.model_config
    reason = ""
    groups = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    if model.is_multimodal_model:
        reason = "it is multimodal"
    elif any(isinstance(spec, MLAAttentionSpec) for spec in specs):
        reason = "it uses multi-head latent attention (MLA)"
    elif len(groups) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs})) or "no KV cache"
        reason = f"its KV cache is hybrid ({len(groups)} groups: {kinds})"
    elif vllm_config.lora_config is not None:
        reason = "LoRA is enabled"
    elif vllm_config.speculative_config is not None:
        reason = "speculative decoding is enabled"
    elif vllm_config.parallel_config.pipeline_parallel_size > 1:
        reason = "pipeline parallelism is enabled"
    if reason:
        raise UnsupportedError(
            f"--role cannot serve {model.model}: {reason}, and that KV cannot be handed over "
            "yet; run it without --role"
        )
