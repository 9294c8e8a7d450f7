"""Another role for a live scheduler, between two steps and with work of the old one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.harness import BLOCK, Engine
from tests.engine.pair import CHUNK, Pair, prompt, random_prompt
from vllm_tetri.engine.pacing import CPU_TILE_TOKENS
from vllm_tetri.policy.order import ORDERS
from vllm_tetri.predictor.base import Oracle
from vllm_tetri.types import Role


def flip(engine: Engine, role: Role) -> None:
    """As the agent does; the engine hears of it at its next step."""
    engine.endpoint.agent.roles.want(role)


def add(engine: Engine, name: str, num_tokens: int, max_tokens: int = 1) -> None:
    engine.add(name, random_prompt(name, num_tokens), max_tokens=max_tokens)


def starts(engine: Engine) -> list[str]:
    names: list[str] = []
    while engine.scheduler.has_requests():
        names += engine.step().num_scheduled_tokens
    return list(dict.fromkeys(names))


@pytest.mark.parametrize("policy", list(ORDERS))
def test_prompts_that_wait_outlive_flips_and_later_ones_are_ordered(make: Any, policy: str) -> None:
    engine = make(Role.PREFILL, prefill_policy=policy)
    for name, num_tokens in (("first", 150), ("a", 20), ("b", 200), ("c", 90)):
        add(engine, name, num_tokens)
    engine.step()
    flip(engine, Role.DECODE)
    engine.run_until(lambda: not engine.scheduler.has_unfinished_requests())
    assert {name: len(tokens) for name, tokens in engine.outputs.items()} == {
        "first": 1, "a": 1, "b": 1, "c": 1
    }  # fmt: skip

    flip(engine, Role.PREFILL)
    for name, num_tokens in (("d", 150), ("e", 20), ("f", 200), ("g", 90)):
        add(engine, name, num_tokens)
    shortest = dict.fromkeys(("sjf", "srtf", "mlfq"), "egdf")
    assert starts(engine) == list({"fcfs": "defg", "ljf": "fdge", **shortest}[policy])
    assert engine.is_at_rest


def test_interrupted_prompts_go_on_in_the_new_role(make: Any) -> None:
    engine = make(Role.PREFILL, prefill_policy="srtf")
    add(engine, "long", 400)
    engine.step()
    add(engine, "short", 2 * CHUNK)
    assert set(engine.step().num_scheduled_tokens) == {"short"}
    flip(engine, Role.DECODE)
    engine.run_until(lambda: engine.is_at_rest)
    assert set(engine.outputs) == {"long", "short"}


def test_decodes_go_first_beside_the_prompts_of_a_new_prefill_instance(make: Any) -> None:
    engine = make(Role.DECODE)
    for name in ("x", "y", "z"):
        add(engine, name, 20, max_tokens=40)
    engine.run_until(lambda: len(engine.outputs) == 3)
    flip(engine, Role.PREFILL)
    add(engine, "prompt", 200)
    output = engine.step()
    assert dict(output.num_scheduled_tokens) == {"x": 1, "y": 1, "z": 1, "prompt": CHUNK}
    engine.run_until(lambda: engine.is_at_rest)
    assert [len(engine.outputs[name]) for name in ("x", "y", "z", "prompt")] == [40, 40, 40, 1]


def test_an_idle_engine_has_its_role_before_the_first_request(make: Any) -> None:
    engine = make(Role.DECODE, predictor="oracle", predictor_mode="sequential")
    flip(engine, Role.PREFILL)
    assert engine.endpoint.is_idle()  # so the agent reports the role as taken: the engine sleeps
    add(engine, "a", 3 * CHUNK)
    assert not engine.endpoint.is_idle()
    assert engine.step().total_num_scheduled_tokens == CHUNK


def test_the_prefix_cache_survives(make: Any) -> None:
    engine = make(Role.PREFILL)
    add(engine, "a", 10 * BLOCK)
    engine.run_until(lambda: engine.is_at_rest)
    flip(engine, Role.DECODE)
    engine.add("again", random_prompt("a", 10 * BLOCK), max_tokens=1)
    assert engine.step().total_num_scheduled_tokens == BLOCK  # all but the last block


def test_a_predictor_starts_with_the_first_flip_that_needs_it_and_stays(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(Role.DECODE, predictor="histogram")
    made: list[Any] = []

    def make_predictor(*_: Any) -> Any:
        made.append(Oracle())
        return made[-1]

    monkeypatch.setattr("vllm_tetri.engine.endpoint.make_predictor", make_predictor)
    for role in (Role.PREFILL, Role.DECODE, Role.BOTH):
        flip(engine, role)
        engine.step()
        assert engine.endpoint.predictions.predictor is made[0]
    assert len(made) == 1


def test_a_predictor_that_cannot_be_loaded_costs_no_flip(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(Role.DECODE, predictor="histogram")
    monkeypatch.setattr("vllm_tetri.engine.endpoint.make_predictor", lambda *_: 1 / 0)
    flip(engine, Role.PREFILL)
    add(engine, "a", 20)
    engine.run_until(lambda: "a" in engine.finished)
    assert engine.info.role is Role.PREFILL
    assert engine.endpoint.predictions.predictor is None


def test_prompts_wait_for_a_predictor_that_came_with_a_flip(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, mute = make(Role.DECODE, predictor="histogram", predictor_mode="sequential"), Oracle()
    monkeypatch.setattr(mute, "poll", list)
    monkeypatch.setattr("vllm_tetri.engine.endpoint.make_predictor", lambda *_: mute)
    flip(engine, Role.PREFILL)
    engine.step()
    add(engine, "a", CHUNK)
    assert not engine.step().total_num_scheduled_tokens


@pytest.fixture
def pair(shm_pair: Pair) -> Pair:
    return shm_pair


def test_kv_in_the_air_is_loaded_by_one_that_has_flipped(pair: Pair) -> None:
    tokens = prompt(4 * CHUNK)
    pair.send("a", tokens)
    pair.prefill.step()
    pair.prefill.step()
    flip(pair.decode, Role.PREFILL)  # its KV is half there
    pair.prefilled("a")
    pair.decoding("a", tokens)
    assert pair.decode.endpoint.receives.loads_done == 1
    pair.settle()
    assert len(pair.decode.outputs["a"]) == 4


def test_prompts_are_handed_over_by_one_that_has_flipped(pair: Pair) -> None:
    tokens = prompt(6 * CHUNK)
    pair.send("a", tokens)
    pair.prefill.step()
    flip(pair.prefill, Role.DECODE)
    response = pair.prefilled("a")
    assert response.decode == pair.decode.info.id
    pair.decoding("a", tokens)
    pair.settle()


def test_each_takes_the_others_role_and_they_go_on(pair: Pair) -> None:
    flip(pair.prefill, Role.DECODE)
    flip(pair.decode, Role.PREFILL)
    for each in (pair.prefill, pair.decode):
        each.step()
    pair.decode.sees(pair.prefill, pair.decode)
    assert (pair.prefill.info.role, pair.decode.info.role) == (Role.DECODE, Role.PREFILL)
    pair.prefill, pair.decode = pair.decode, pair.prefill
    tokens = prompt(3 * CHUNK + BLOCK)
    pair.send("a", tokens)
    response = pair.prefilled("a")
    assert response.decode == pair.decode.info.id
    pair.decoding("a", tokens)
    pair.settle()


def test_speeds_are_learnt_and_reported(make: Any) -> None:
    engine = make(Role.PREFILL)
    add(engine, "a", 3 * CHUNK, max_tokens=10)
    engine.run_until(lambda: engine.is_at_rest)
    load = engine.endpoint.read_load()
    assert load.prompt_tokens_done == 3 * CHUNK
    assert load.output_tokens_done == 9
    assert load.cost.is_known
    assert engine.info.step_limits == (1024, 64, CPU_TILE_TOKENS)
