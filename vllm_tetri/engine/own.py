"""Requests that an instance sends to itself: to measure, or to pad a chunk.

They go through vLLM's scheduler and model runner like any other, so whatever
executor and device there is gets the same work as from a client. Their outputs
are taken away before anybody sees them.
"""

from __future__ import annotations

import itertools
import secrets
from random import Random

from vllm_tetri.engine.compat import (
    EngineCoreOutputs,
    Request,
    SamplingParams,
    Scheduler,
    get_hash_fn_by_name,
    get_request_block_hasher,
)

# No client can guess it, so none can pass for one of ours.
OWN_PREFIX = f"tetri-own-{secrets.token_hex(8)}-"
_PADDING = OWN_PREFIX + "pad-"
_MIN_VOCABULARY = 2


def is_own(request_id: str) -> bool:
    """Whether a request comes from the instance itself."""
    return request_id.startswith(OWN_PREFIX)


def is_padding(request_id: str) -> bool:
    """Whether an own request only fills up a chunk."""
    return request_id.startswith(_PADDING)


class OwnRequests:
    """Makes such requests for one scheduler, with random prompts that no client's
    prompt can hit in the prefix cache, nor they a client's."""

    def __init__(self, scheduler: Scheduler) -> None:
        cache = scheduler.vllm_config.cache_config
        self._vocabulary = max(_MIN_VOCABULARY, scheduler.vllm_config.model_config.get_vocab_size())
        self._hasher = (
            get_request_block_hasher(
                scheduler.hash_block_size, get_hash_fn_by_name(cache.prefix_caching_hash_algo)
            )
            if cache.enable_prefix_caching
            else None
        )
        self._numbers = itertools.count()
        self._rng = Random()

    def pad(self, num_tokens: int) -> Request:
        """A prompt that fills up a chunk."""
        return self._make(_PADDING, num_tokens, 1)

    def make(self, num_tokens: int, *, max_tokens: int = 1) -> Request:
        """A prompt of `num_tokens` that writes exactly `max_tokens`."""
        return self._make(OWN_PREFIX, num_tokens, max_tokens)

    def _make(self, prefix: str, num_tokens: int, max_tokens: int) -> Request:
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0, skip_reading_prefix_cache=True
        )
        return Request(
            f"{prefix}{next(self._numbers)}",
            self._rng.choices(range(self._vocabulary), k=num_tokens),
            sampling,
            None,
            block_hasher=self._hasher,
        )


def take_own_outputs(outputs: dict[int, EngineCoreOutputs]) -> None:
    """Remove what own requests wrote from a step's outputs."""
    for answer in outputs.values():
        answer.outputs = [each for each in answer.outputs if not is_own(each.request_id)]
