"""Generators of seeded requests go back to where the output stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.runner_state import draw, injecting, state

PROMPT = [1, 2, 3]


@pytest.fixture(autouse=True)
def rewinding() -> Iterator[None]:
    with injecting():
        yield


def expected(seed: int, count: int) -> list[int]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return [draw(generator) for _ in range(count)]


def rewind(request: Any) -> None:
    """As the runner does after a step that completed nothing."""
    request.generator.set_offset(request.generator.get_offset() - 4)


def test_draws_are_those_of_the_seed() -> None:
    request = state(PROMPT, 7)
    assert [draw(request.generator) for _ in range(3)] == expected(7, 3)


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


def test_requests_without_a_seed_have_no_generator() -> None:
    assert state(PROMPT, None).generator is None
