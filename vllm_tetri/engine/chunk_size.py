"""How prompts of this model may be cut."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from vllm_tetri.config import TetriConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


def cuts_freely(vllm_config: VllmConfig) -> bool:
    """Whether a step may end anywhere in a prompt. It may not if vLLM computes prompts in one step
    (`--no-enable-chunked-prefill`, and some platforms), if states are kept at block boundaries
    (Mamba with a prefix cache), or if an image must be computed as a whole."""
    is_multimodal = vllm_config.model_config.is_multimodal_model
    return (
        vllm_config.scheduler_config.enable_chunked_prefill
        and not (vllm_config.scheduler_config.disable_chunked_mm_input and is_multimodal)
        and vllm_config.cache_config.mamba_cache_mode != "align"
    )


def fit_to_chunking(config: TetriConfig, vllm_config: VllmConfig) -> TetriConfig:
    """Return the configuration with its chunk lowered to what a step can hold, and with the longest
    prompt as its chunk unless vLLM `cuts_freely`: it would never start what has to be in one step
    and has more tokens than a chunk."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    step_tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    most = min(step_tokens, model.max_model_len)
    if cuts_freely(vllm_config):
        if config.chunk_size == "auto" or config.chunk_size <= most:
            return config
        logger.warning(
            "The chunk of %d tokens (--tetri-chunk-size) is lowered to %d: a step holds at most %d "
            "(--max-num-batched-tokens), the model's window %d.",
            config.chunk_size, most, step_tokens, model.max_model_len,
        )  # fmt: skip
        return msgspec.structs.replace(config, chunk_size=most)
    logger.warning(
        "This model's prompts cannot be cut at every position, so vLLM chooses where, in steps of "
        "up to %d tokens: --tetri-chunk-size and --tetri-tbt-slo have no effect.",
        most,
    )
    return msgspec.structs.replace(config, chunk_size=most, tbt_slo_s=None)
