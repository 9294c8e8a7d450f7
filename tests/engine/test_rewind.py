"""What vLLM's V1 runner knows of a request: prior tokens are output, and generators of seeded
requests go back to where the output stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_tetri.engine.compat import CachedRequestState
from vllm_tetri.engine.continuation import ContinuedPrompt, teach_v1_runner

PROMPT = [1, 2, 3]
CONTINUED = ContinuedPrompt([*PROMPT, 8, 9], 2)


@pytest.fixture(autouse=True)
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


def expected(seed: int, count: int) -> list[int]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return [draw(generator) for _ in range(count)]


def rewind(request: Any) -> None:
    """As the runner does after a step that completed nothing."""
    request.generator.set_offset(request.generator.get_offset() - 4)


def test_the_runner_sees_prior_tokens_as_output() -> None:
    request = state(CONTINUED)
    assert (request.prompt_token_ids, request.output_token_ids) == (PROMPT, [8, 9])
    assert (request.num_prompt_tokens, request.num_tokens) == (3, 5)
    assert state(PROMPT).output_token_ids == []
    assert state(PROMPT).generator is None


def test_draws_are_those_of_the_seed_after_the_prior_tokens() -> None:
    generator = state(PROMPT, 7).generator
    assert [draw(generator) for _ in range(3)] == expected(7, 3)
    assert draw(state(CONTINUED, 7).generator) == expected(7, 3)[2]


def test_parts_of_a_prompt_draw_nothing() -> None:
    request = state(PROMPT, 7)
    for _ in range(3):
        draw(request.generator)
        rewind(request)
    assert draw(request.generator) == expected(7, 1)[0]


def test_a_preempted_request_goes_on_where_it_was() -> None:
    request = state(PROMPT, 7)
    for token in range(2):
        draw(request.generator)
        request.output_token_ids.append(token)
    draw(request.generator)
    rewind(request)
    assert draw(request.generator) == expected(7, 3)[2]
