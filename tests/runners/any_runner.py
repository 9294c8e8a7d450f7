"""A platform of vLLM that computes on the CPU as a GPU's default does. Tests only.

vLLM's own CPU platform forces synchronous scheduling, and without a Triton that compiles for CPUs
the V1 model runner. Here Triton's interpreter runs the V2 runner's kernels, and
`--async-scheduling` means what it says. Active in processes that have this folder in PYTHONPATH.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's language is imported

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


def patch() -> None:
    """Replace the one kernel that the interpreter cannot run (it takes a loop's int for a tensor),
    and let engines tell in the log what they run."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    stock = EngineCore.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        runner = "v2" if self.scheduler.use_v2_model_runner else "v1"
        print(f"any_runner: {type(self.scheduler).__name__} on {runner}", flush=True)

    EngineCore.__init__ = __init__
