"""What changes the cost of a step: the key under which a profile is remembered."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.platforms import current_platform

import vllm_tetri

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def conditions_of(config: VllmConfig, scope: str) -> dict[str, str]:
    """Everything that changes what a step costs, by name."""
    model, parallel = config.model_config, config.parallel_config
    plain: dict[str, Any] = {
        "scope": scope,
        "vllm": vllm.__version__,
        "vllm_tetri": vllm_tetri.__version__,
        "model": model.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "num_layers": model.hf_text_config.num_hidden_layers,
        "hidden_size": model.get_hidden_size(),
        "vocabulary": model.get_vocab_size(),
        "window": model.max_model_len,
        "device": device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "binding": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""),
        "block_size": config.cache_config.block_size,
        "kv_dtype": config.cache_config.cache_dtype,
        "step_tokens": config.scheduler_config.max_num_batched_tokens,
        "step_requests": config.scheduler_config.max_num_seqs,
        "executor": parallel.distributed_executor_backend,
        "tensor_parallel": parallel.tensor_parallel_size,
        "compilation": config.compilation_config.mode,
    }
    return {name: str(value) for name, value in plain.items()}


def device_name() -> str:
    """The accelerator, or the CPU's model."""
    if not is_cpu():
        return str(current_platform.get_device_name())
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "cpu"


def device_place() -> str:
    """The host and what of it this engine computes on; equal for those who share that."""
    if is_cpu():
        return f"{platform.node()} cores {','.join(map(str, sorted(os.sched_getaffinity(0))))}"
    return f"{platform.node()} {current_platform.get_device_uuid(0)}"


def is_cpu() -> bool:
    """Whether vLLM computes on the CPU."""
    return bool(current_platform.is_cpu())
