"""The order of prompts in vLLM's own scheduler, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.request import StructuredOutputRequest

from tests.engine.harness import BLOCK, Cell, Engine
from tests.engine.pair import CHUNK, random_prompt
from vllm_tetri.engine.compat import RequestStatus
from vllm_tetri.engine.queue import AdapterSlots
from vllm_tetri.policy.order import ORDERS
from vllm_tetri.policy.queue import PromptQueue
from vllm_tetri.types import Role


@pytest.fixture(scope="module")
def shared(cell: Cell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        tmp_path_factory.mktemp("order"), Role.PREFILL, num_blocks=256, chunk_size=CHUNK
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    for name in list(shared.scheduler.requests):
        shared.abort(name)
    shared.step()
    assert shared.is_at_rest
    assert shared.scheduler.waiting.lane.unfinished_tokens == 0
    shared.scheduler.reset_prefix_cache()


def order_by(engine: Engine, policy: str, sched_batch: int = 16) -> None:
    scheduler = engine.scheduler
    scheduler.waiting.lane = PromptQueue(
        ORDERS[policy], sched_batch, scheduler.block_size, scheduler.remaining_tokens
    )


def add(engine: Engine, name: str, num_tokens: int, *, priority: int = 0) -> None:
    engine.add(name, random_prompt(name, num_tokens), max_tokens=1, priority=priority)


def steps(engine: Engine) -> list[dict[str, int]]:
    """Tokens per request of every step until nothing is left to compute."""
    taken = []
    while engine.scheduler.has_unfinished_requests():
        awaits_results = engine.is_ahead
        scheduled = dict(engine.step().num_scheduled_tokens)
        assert scheduled or awaits_results, "work is left and nothing is scheduled"
        taken += [scheduled] if scheduled else []
    return taken


def starts(taken: list[dict[str, int]]) -> list[str]:
    return list(dict.fromkeys(name for step in taken for name in step))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["a", "b", "c", "d"]),
        ("sjf", ["b", "d", "a", "c"]),
        ("ljf", ["c", "a", "d", "b"]),
        ("srtf", ["b", "d", "a", "c"]),
    ],
)
def test_prompts_start_in_the_order_of_the_policy(
    engine: Engine, policy: str, expected: list[str]
) -> None:
    order_by(engine, policy)
    for name, num_tokens in (("a", 150), ("b", 20), ("c", 200), ("d", 90)):
        add(engine, name, num_tokens)
    assert starts(steps(engine)) == expected


@pytest.mark.parametrize("policy", list(ORDERS))
def test_every_step_takes_exactly_a_chunk_while_there_is_work(engine: Engine, policy: str) -> None:
    order_by(engine, policy, 4)
    lengths = [5, 300, 17, 64, 63, 65, 128, 1, 200, 90, 33, 40]
    for index, num_tokens in enumerate(lengths):
        add(engine, f"{policy}{index}", num_tokens)
    taken = steps(engine)
    totals = [sum(step.values()) for step in taken]
    assert totals[:-1] == [CHUNK] * (len(totals) - 1)
    assert sum(totals) == sum(lengths)


def test_a_short_prompt_interrupts_a_long_one_at_a_chunk_border(engine: Engine) -> None:
    order_by(engine, "srtf")
    add(engine, "long", 400)
    engine.step()
    add(engine, "short", 40)
    assert dict(engine.step().num_scheduled_tokens) == {"long": CHUNK - 40, "short": 40}
    add(engine, "two chunks", 2 * CHUNK)
    assert dict(engine.step().num_scheduled_tokens) == {"two chunks": CHUNK}
    assert engine.holds(engine.scheduler.requests["long"], CHUNK + CHUNK - 40)
    assert starts(steps(engine))[-1] == "long"


def test_what_the_prefix_cache_holds_counts_as_done(engine: Engine) -> None:
    order_by(engine, "sjf")
    tokens = random_prompt(1, 320)
    engine.add("first", tokens, max_tokens=1)
    steps(engine)
    add(engine, "new", 100)
    engine.add("known", [*tokens, 5, 6, 7], max_tokens=1)
    taken = steps(engine)
    assert starts(taken) == ["known", "new"]
    assert taken[0]["known"] < BLOCK


def test_priority_goes_first_within_a_batch(engine: Engine) -> None:
    order_by(engine, "sjf")
    add(engine, "short", 10)
    add(engine, "urgent", 200, priority=-1)
    add(engine, "late", 5, priority=3)
    assert starts(steps(engine)) == ["urgent", "short", "late"]


def test_aborts_leave_no_trace_in_the_order(engine: Engine) -> None:
    order_by(engine, "srtf", 2)
    for name in ("started", "scheduled", "raw"):
        add(engine, name, 200)
    add(engine, "kept", 30)
    engine.step()
    for name in ("started", "scheduled", "raw"):
        engine.abort(name)
    assert starts(steps(engine)) == ["kept"]


def test_a_name_that_is_used_again_at_once_is_another_prompt(engine: Engine) -> None:
    add(engine, "same", 200)
    engine.step()
    engine.abort("same")
    add(engine, "same", 100)
    assert starts(steps(engine)) == ["same"]


def test_a_prompt_that_cannot_start_delays_no_other_one(make: Any) -> None:
    """Its grammar takes for ever; a decode keeps every step from being empty."""
    engine = make(Role.BOTH, prefill_policy="srtf")
    engine.add("decode", random_prompt(1, 4), max_tokens=500)
    engine.add("long", random_prompt(2, 400), max_tokens=1)
    engine.step()
    add(engine, "blocked", 50)
    blocked = engine.scheduler.requests["blocked"]
    blocked.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    blocked.structured_output_request = StructuredOutputRequest(StructuredOutputsParams(regex="a"))
    engine.run_until(lambda: "long" in engine.finished, max_steps=12)


@pytest.mark.parametrize("policy", list(ORDERS))
def test_a_small_kv_pool_blocks_no_prompt_for_good(make: Any, policy: str) -> None:
    """Interrupted prompts hold blocks; others must not wait for those in a circle."""
    engine = make(Role.PREFILL, num_blocks=24, prefill_policy=policy)
    for index in range(12):
        add(engine, f"long{index}", 300 - index)
        engine.step()
        add(engine, f"short{index}", 100 + index)
        engine.step()
    steps(engine)
    assert len(engine.finished) == 24


def test_few_slots_block_no_prompt_for_good(make: Any) -> None:
    engine = make(Role.PREFILL, prefill_policy="srtf")
    engine.scheduler.max_num_active_reqs = 2
    for index in range(10):
        add(engine, f"r{index}", 500 - 40 * index)
        engine.step()
    steps(engine)
    assert len(engine.finished) == 10


def test_a_paused_prompt_keeps_the_place_of_its_adapter(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_by(engine, "srtf")
    monkeypatch.setattr(engine.scheduler, "lora_config", SimpleNamespace(max_loras=1))
    monkeypatch.setattr(engine.scheduler, "_adapters", AdapterSlots(1))
    for index, num_tokens in enumerate((300, 100), 1):
        request = engine.add(str(index), random_prompt(index, num_tokens), max_tokens=1)
        request.lora_request = LoRARequest(f"adapter {index}", index, "/x")
        engine.step()
    steps(engine)  # vLLM asserts that no step has two adapters
    assert set(engine.finished) >= {"1", "2"}


def test_an_instance_of_both_roles_puts_decodes_before_prompts(make: Any) -> None:
    engine = make(Role.BOTH, prefill_policy="srtf")
    for index in range(3):
        engine.add(f"decode{index}", random_prompt(index, 4), max_tokens=50)
    engine.step()
    engine.add("long", random_prompt(9, 400), max_tokens=1)
    engine.step()
    engine.add("new", random_prompt(10, 30), max_tokens=50)
    engine.step()  # the new one interrupts the long one and decodes from now on
    taken = engine.step().num_scheduled_tokens
    assert list(taken) == ["decode0", "decode1", "decode2", "new", "long"]
    assert taken["long"] == CHUNK  # decodes come on top
