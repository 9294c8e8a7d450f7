"""Generators of seeded requests go back to where the output stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_tetri.engine.compat import CachedRequestState
from vllm_tetri.engine.injection import make_runner_inject


@pytest.fixture(autouse=True)
def rewinding() -> Iterator[None]:
    stock = CachedRequestState.__post_init__
    make_runner_inject()
    make_runner_inject()
    yield
    CachedRequestState.__post_init__ = stock  # type: ignore[method-assign]


def state(seed: int | None) -> Any:
    generator = None if seed is None else torch.Generator(device="cpu").manual_seed(seed)
    return CachedRequestState(
        req_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=SamplingParams(seed=seed),
        generator=generator,
        block_ids=([0],),
        num_computed_tokens=0,
        output_token_ids=[],
    )


def draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))


def expected(seed: int, count: int) -> list[int]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return [draw(generator) for _ in range(count)]


def rewind(request: Any) -> None:
    """As the runner does after a step that completed nothing."""
    request.generator.set_offset(request.generator.get_offset() - 4)


def test_draws_are_those_of_the_seed() -> None:
    request = state(7)
    assert [draw(request.generator) for _ in range(3)] == expected(7, 3)


def test_parts_of_a_prompt_draw_nothing() -> None:
    request = state(7)
    for _ in range(3):
        draw(request.generator)
        rewind(request)
    assert draw(request.generator) == expected(7, 1)[0]


def test_a_preempted_request_goes_on_where_it_was() -> None:
    request = state(7)
    for token in range(2):
        draw(request.generator)
        request.output_token_ids.append(token)
    draw(request.generator)
    rewind(request)
    assert draw(request.generator) == expected(7, 3)[2]


def test_requests_without_a_seed_have_no_generator() -> None:
    assert state(None).generator is None
