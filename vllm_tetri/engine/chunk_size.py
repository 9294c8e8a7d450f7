"""How prompts of this model may be cut, and dummy requests.

Dummy requests are prompts that an instance sends to itself to pad a chunk. They pass vLLM's
scheduler and model runner like any other request; their outputs are removed before they reach the
API server.
"""

from __future__ import annotations

import itertools
import logging
import random
import secrets
from typing import TYPE_CHECKING

import msgspec

from vllm_tetri.config import TetriConfig
from vllm_tetri.engine.compat import (
    Request,
    SamplingParams,
    Scheduler,
    get_hash_fn_by_name,
    get_request_block_hasher,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

# Clients cannot guess it, so a client's request is never taken for a dummy one.
DUMMY_PREFIX = f"tetri-dummy-{secrets.token_hex(8)}-"
_numbers = itertools.count()


def is_dummy(request_id: str) -> bool:
    """Whether a request comes from the instance itself."""
    return request_id.startswith(DUMMY_PREFIX)


def dummy_request(scheduler: Scheduler, num_tokens: int) -> Request:
    """Return a prompt that generates one token, for a scheduler. It is random, so that no client's
    prompt hits it in the prefix cache."""
    config, hasher = scheduler.vllm_config, None
    if config.cache_config.enable_prefix_caching:
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        hasher = get_request_block_hasher(scheduler.hash_block_size, hash_function)
    vocabulary = range(max(2, config.model_config.get_vocab_size()))
    sampling = SamplingParams(max_tokens=1, temperature=0, skip_reading_prefix_cache=True)
    name, token_ids = f"{DUMMY_PREFIX}{next(_numbers)}", random.choices(vocabulary, k=num_tokens)
    return Request(name, token_ids, sampling, None, block_hasher=hasher)


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
    and has more tokens than a chunk. Models that take or return something else than text get no
    dummy requests. Neither do data-parallel ranks, of which a step of one may wait for others."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    step_tokens = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    most = min(step_tokens, model.max_model_len)
    is_text = not (model.runner_type == "pooling" or model.is_multimodal_model)
    if not is_text or model.is_diffusion or vllm_config.parallel_config.data_parallel_size > 1:
        config = msgspec.structs.replace(config, pad="off")
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
