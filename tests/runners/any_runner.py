"""A platform of vLLM that computes on the CPU as a GPU's default does. Tests only.

vLLM's own CPU platform forces synchronous scheduling, and without a Triton that compiles for CPUs
the V1 model runner. Here Triton's interpreter runs the V2 runner's kernels, and
`--async-scheduling` means what it says. Active in processes that have this folder in PYTHONPATH.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's language is imported

import torch
import triton.backends
from vllm.platforms.cpu import CpuPlatform


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return False


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Driver)


def platform() -> str:
    """The entry point's answer: which class is the platform."""
    return f"{__name__}.AnyRunnerPlatform"


class AnyRunnerPlatform(CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        is_async = vllm_config.scheduler_config.async_scheduling
        super().check_and_update_config(vllm_config)
        wanted = os.environ.get("ANY_RUNNER_SCHEDULING", "async") == "async"
        vllm_config.scheduler_config.async_scheduling = is_async and wanted


class _GrammarMask:
    """`_apply_grammar_bitmask_kernel` in torch: forbids what a grammar does not allow."""

    def __getitem__(self, grid: Any) -> Any:
        return self.apply

    @staticmethod
    def apply(
        logits: torch.Tensor,
        _logits_stride: int,
        indices: torch.Tensor,
        first_logits: torch.Tensor,
        masks: torch.Tensor,
        _mask_stride: int,
        vocabulary: int,
        *,
        MASK_STRIDE: int,
        BLOCK_SIZE: int,
    ) -> None:
        for index, mask in zip(indices.tolist(), masks, strict=True):
            request, position = divmod(index, MASK_STRIDE)
            begin, end = first_logits[request : request + 2].tolist()
            if begin + position < end:
                is_allowed = (mask[:, None] >> torch.arange(32)) & 1
                logits[begin + position, is_allowed.flatten()[:vocabulary] == 0] = -torch.inf


def patch() -> None:
    """Replace the two kernels that the interpreter cannot run (one takes a loop's int for a tensor,
    the other masks a store by a scalar), and tell in the log what runs."""
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import structured_outputs

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    structured_outputs._apply_grammar_bitmask_kernel = _GrammarMask()
    stock = EngineCoreProc.run_busy_loop

    def run_busy_loop(core: Any) -> None:
        runner = "v2" if core.scheduler.use_v2_model_runner else "v1"
        print(f"any_runner: {type(core.scheduler).__name__} on {runner}", flush=True)
        stock(core)

    EngineCoreProc.run_busy_loop = run_busy_loop
