"""Prompts whose outputs any instance may write: also the one that computed them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import Engine
from tests.engine.pair import CHUNK, prompt
from vllm_tetri.handover import (
    DecodeParams,
    Prefilled,
    PrefillParams,
    digest_of,
    from_params,
    to_params,
)
from vllm_tetri.types import RequestId, Role, TransferId


@pytest.fixture(params=list(Role))
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """One of any role and a decode instance; both see both."""
    first = Engine(tmp_path, request.param, chunk_size=CHUNK, arena_bytes=1 << 20)
    second = Engine(tmp_path, Role.DECODE, arena_bytes=1 << 20, instance="other")
    for each in (first, second):
        each.sees(first, second)
    yield first, second
    first.close()
    second.close()


def begin(engine: Engine, name: str, tokens: list[int], *, anywhere: bool = True) -> None:
    kv_params = PrefillParams(TransferId(f"t-{name}"), RequestId(name), anywhere=anywhere)
    engine.add(f"{name}-1", tokens, params=to_params(kv_params))


def prefilled(engine: Engine, name: str) -> Prefilled:
    engine.run_until(lambda: f"{name}-1" in engine.finished)
    response = from_params(engine.finished[f"{name}-1"])
    assert isinstance(response, Prefilled)
    return response


def go_on(engine: Engine, name: str, tokens: list[int], response: Prefilled) -> None:
    """The decode request: its KV must be right and nothing computed again but one token."""
    loads = engine.endpoint.receives.loads_done
    kv_params = DecodeParams(response.transfer, digest_of(tokens), response.prior_output)
    request = engine.add(f"{name}-2", tokens, params=to_params(kv_params))
    engine.run_until(lambda: f"{name}-2" in engine.outputs)
    assert engine.holds(request, len(tokens))
    engine.run_until(lambda: f"{name}-2" in engine.finished)
    assert len(engine.outputs[f"{name}-2"]) == 4
    assert engine.endpoint.receives.loads_done - loads <= 1
    assert engine.endpoint.read_load().kv_loads_failed == 0


def settle(*engines: Engine) -> None:
    for each in engines:
        each.run_until(lambda each=each: each.is_at_rest)


@pytest.mark.parametrize("num_tokens", [1, 17, 64, 65, 200, 511])
def test_an_output_that_may_stay_does_unless_its_role_is_prefill(
    pair: tuple[Engine, Engine], num_tokens: int
) -> None:
    first, second = pair
    tokens = prompt(num_tokens)
    before = first.endpoint.read_load()
    begin(first, "a", tokens)
    response = prefilled(first, "a")
    stays = first.info.role is not Role.PREFILL
    assert response.decode == (first if stays else second).info.id
    assert response.reason.startswith("adaptive: ")
    chosen = first if stays else second
    if not stays:
        first.run_until(lambda: first.is_at_rest)
    go_on(chosen, "a", tokens, response)
    settle(first, second)
    after = first.endpoint.read_load()
    assert after.prefills_done == 1
    assert after.handover_s != before.handover_s > 0


def test_an_instance_that_hands_over_to_itself_generates_as_one_that_does_not(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path, Role.BOTH, chunk_size=CHUNK, arena_bytes=1 << 20, num_blocks=128)
    engine.sees(engine)
    tokens = prompt(200)
    engine.add("whole", tokens)
    engine.run_until(lambda: "whole" in engine.finished)
    for name in "abc":  # again and again: what the first one held is free
        begin(engine, name, tokens)
        response = prefilled(engine, name)
        assert response.decode == engine.info.id
        assert response.prior_output is not None
        go_on(engine, name, tokens, response)
        assert engine.outputs[f"{name}-2"] == engine.outputs["whole"]
        settle(engine)
    engine.close()


def test_only_a_prompt_that_any_instance_may_decode_stays(tmp_path: Path) -> None:
    # On one device the first prompt, which the other instance will decode, slows this one down.
    first = Engine(tmp_path, Role.BOTH, chunk_size=CHUNK, arena_bytes=1 << 20, device="one")
    second = Engine(tmp_path, Role.DECODE, arena_bytes=1 << 20, device="two")
    first.sees(first, second)
    begin(first, "a", prompt(100), anywhere=False)
    assert prefilled(first, "a").decode == second.info.id
    begin(first, "b", prompt(100, seed=9))
    assert prefilled(first, "b").decode == first.info.id
    for each in (first, second):
        each.close()
