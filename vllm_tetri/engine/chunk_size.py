"""Dummy requests, and `--tetri-chunk-size auto`, which times some of them at start.

Dummy requests are prompts that an instance sends to itself, to time steps or to pad a chunk.
They pass vLLM's scheduler and model runner like any other request; their outputs are removed
before they reach the API server.

The knee is the smallest chunk that reaches nine tenths of the best throughput seen (paper
section 3.3.3). Nothing of the model runner is called: prompts of doubling sizes pass vLLM's
scheduler and whatever executor there is, one per step, before the instance joins its cluster.
"""

from __future__ import annotations

import itertools
import logging
import random
import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from vllm_tetri.config import TetriConfig
from vllm_tetri.engine.compat import (
    EngineCoreOutputs,
    Request,
    SamplingParams,
    Scheduler,
    get_hash_fn_by_name,
    get_request_block_hasher,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

LEAST_TOKENS = 16
KNEE_PART = 0.9
# Every size runs this often. The first run warms up, the best of all counts: whatever else
# runs on the machine only adds.
_RUNS = 3
# Doubling the chunk without gaining this much, twice, means that the curve is flat.
_FLAT_GAIN = 0.03
# A step that takes longer is not doubled: slow machines have to get done, too.
_LONGEST_STEP_S = 1.5
DEADLINE_S = 30.0
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


def remove_dummy_outputs(outputs: dict[int, EngineCoreOutputs]) -> list[str]:
    """Remove dummy requests from a step's outputs; return their ids."""
    found = []
    for each in outputs.values():
        found += [one.request_id for one in each.outputs if is_dummy(one.request_id)]
        each.outputs = [one for one in each.outputs if not is_dummy(one.request_id)]
    return found


def fitting_chunk(chunk_tokens: int, *, batched_tokens: int, window_tokens: int) -> int:
    """Return a chunk size from the command line, lowered to what a step can hold."""
    most = min(batched_tokens, window_tokens)
    if chunk_tokens > most:
        logger.warning(
            "The chunk of %d tokens (--tetri-chunk-size) is lowered to %d: a step holds at most %d "
            "(--max-num-batched-tokens), the model's window %d.",
            chunk_tokens, most, batched_tokens, window_tokens,
        )  # fmt: skip
    return min(chunk_tokens, most)


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
    """Return the configuration with the longest prompt as its chunk unless vLLM `cuts_freely`: it
    would never start what has to be in one step and has more tokens than a chunk. Models that take
    or return something else than text get no dummy requests. Neither do data-parallel ranks that
    step together (MoE): a step of one waits for all others, which may have ended their probe."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    most = min(scheduler.max_num_batched_tokens, model.max_model_len)
    is_text = not (model.runner_type == "pooling" or model.is_multimodal_model)
    if not is_text or model.is_diffusion or vllm_config.parallel_config.data_parallel_size > 1:
        chunk_size = most if config.chunk_size == "auto" else config.chunk_size
        config = msgspec.structs.replace(config, chunk_size=chunk_size, pad="off")
    if cuts_freely(vllm_config):
        return config
    logger.warning(
        "This model's prompts cannot be cut anywhere, so vLLM alone cuts them, into steps of up to "
        "%d tokens: --tetri-chunk-size and --tetri-tbt-slo have no effect.",
        most,
    )
    return msgspec.structs.replace(config, chunk_size=most, tbt_slo_s=None)


class ChunkProbe:
    """Runs dummy prompts, none longer than a step can hold. Owner: the engine thread."""

    def __init__(self, scheduler: Scheduler, most_tokens: int) -> None:
        self._scheduler = scheduler
        self._most_tokens = most_tokens
        self._sizes = self._prompt_sizes()
        self._speeds: dict[int, float] = {}  # best tokens per second, by prompt tokens
        self._running, self._tokens, self._begun_s = "", 0, 0.0

    def before_step(self) -> bool:
        """Add the next dummy prompt once the previous one has ended; False if there is none."""
        if self._running in self._scheduler.requests:
            return True
        self._tokens = next(self._sizes, 0)
        if self._tokens:
            request = dummy_request(self._scheduler, self._tokens)
            self._running, self._begun_s = request.request_id, time.monotonic()
            self._scheduler.max_num_scheduled_tokens = self._tokens
            self._scheduler.add_request(request)
        return self._tokens > 0

    def after_step(self, ended: list[str]) -> None:
        """Take the time of a step that ended these dummy requests."""
        if self._running in ended:
            speed = self._tokens / (time.monotonic() - self._begun_s)
            self._speeds[self._tokens] = max(speed, self._speeds.get(self._tokens, 0.0))

    def knee(self) -> int:
        """Return the chunk to use, by what was timed."""
        enough = KNEE_PART * max(self._speeds.values(), default=0.0)
        fast = [tokens for tokens, speed in self._speeds.items() if speed >= enough]
        chunk_tokens = min(fast, default=min(LEAST_TOKENS, self._most_tokens))
        logger.info(
            "--tetri-chunk-size auto: %d tokens; prompt tokens/s by chunk: %s",
            chunk_tokens, ", ".join(f"{each}: {speed:.0f}" for each, speed in self._speeds.items()),
        )  # fmt: skip
        return chunk_tokens

    def _prompt_sizes(self) -> Iterator[int]:
        """Yield the tokens of one prompt after the other, until enough is known."""
        tokens, deadline = min(LEAST_TOKENS, self._most_tokens), time.monotonic() + DEADLINE_S
        logger.info(
            "--tetri-chunk-size auto: timing prompts of up to %d tokens; takes a few seconds, "
            "at most %.0f. The instance joins its cluster afterwards.",
            self._most_tokens, DEADLINE_S,
        )  # fmt: skip
        while True:
            for _ in range(_RUNS):
                if time.monotonic() > deadline:
                    return
                yield tokens
            speeds = list(self._speeds.values())[-3:]
            is_flat = len(speeds) == 3 and max(speeds[1:]) < (1 + _FLAT_GAIN) * speeds[0]
            is_long = tokens / self._speeds[tokens] > _LONGEST_STEP_S
            if is_flat or is_long or tokens >= self._most_tokens:
                return
            tokens = min(2 * tokens, self._most_tokens)
