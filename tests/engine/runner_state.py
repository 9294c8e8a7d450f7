"""A request as vLLM's V1 runner knows it, and its sampler's draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import SamplingParams

from vllm_tetri.engine.compat import CachedRequestState
from vllm_tetri.engine.continuation import teach_v1_runner


@contextmanager
def injecting() -> Iterator[None]:
    """Our hook in place, twice as in a process that calls it again; gone afterwards."""
    stock = CachedRequestState.__post_init__
    teach_v1_runner()
    teach_v1_runner()
    yield
    CachedRequestState.__post_init__ = stock


def state(token_ids: list[int], seed: int | None = None) -> Any:
    generator = None if seed is None else torch.Generator(device="cpu").manual_seed(seed)
    return CachedRequestState(
        req_id="r",
        prompt_token_ids=token_ids,
        mm_features=[],
        sampling_params=SamplingParams(seed=seed),
        generator=generator,
        block_ids=([0],),
        num_computed_tokens=0,
        output_token_ids=[],
    )


def draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))
