"""A prompt's KV moves between two real schedulers through our connector."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import BLOCK, Engine
from vllm_tetri.handover import (
    DecodeLeg,
    Prefilled,
    PrefillLeg,
    digest_of,
    from_params,
    to_params,
)
from vllm_tetri.types import InstanceId, RequestId, Role, TransferId

CHUNK = 64


class Pair:
    """A prefill and a decode engine that know each other."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.prefill = Engine(folder, Role.PREFILL, chunk_size=CHUNK, **options)
        self.decode = Engine(folder, Role.DECODE, **options)
        self.prefill.sees(self.prefill, self.decode)

    def send(self, name: str, tokens: list[int]) -> None:
        leg = PrefillLeg(TransferId(f"t-{name}"), RequestId(name))
        self.prefill.add(name, tokens, params=to_params(leg))

    def prefilled(self, name: str) -> Prefilled:
        self.prefill.run_until(lambda: name in self.prefill.finished)
        answer = from_params(self.prefill.finished[name])
        assert isinstance(answer, Prefilled)
        return answer

    def receive(
        self,
        name: str,
        tokens: list[int],
        transfer: TransferId | None = None,
        *,
        digest: str = "",
    ) -> Any:
        leg = DecodeLeg(transfer or TransferId(f"t-{name}"), digest or digest_of(tokens))
        return self.decode.add(name, tokens, params=to_params(leg))

    def settle(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.run_until(lambda engine=engine: engine.is_at_rest)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(tmp_path, link=request.param, arena_bytes=1 << 20, transfer_timeout_s=5.0)
    yield pair
    pair.close()


@pytest.fixture
def shm_pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, arena_bytes=1 << 20, transfer_timeout_s=1.0)
    yield pair
    pair.close()


def prompt(num_tokens: int, seed: int = 3) -> list[int]:
    return [(seed * i * i + 5 * i + seed) % 120 for i in range(num_tokens)]


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 64, 65, 200, 511])
def test_kv_arrives_and_only_the_last_token_is_recomputed(pair: Pair, num_tokens: int) -> None:
    tokens = prompt(num_tokens)
    pair.send("a", tokens)
    answer = pair.prefilled("a")
    assert answer.decode == pair.decode.info.id
    assert answer.num_chunks == -(-num_tokens // CHUNK)
    request = pair.receive("a", tokens)
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert request.num_computed_tokens == num_tokens
    assert pair.decode.holds(request, num_tokens)
    assert pair.decode.instance.inbox.loads_done == (1 if num_tokens > 1 else 0)
    assert pair.prefill.outputs["a"] == [7]
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    pair.settle()
    assert len(pair.decode.outputs["a"]) == 4


def test_blocks_travel_while_later_chunks_are_computed(pair: Pair) -> None:
    tokens = prompt(4 * CHUNK)
    pair.send("a", tokens)
    pushed = []
    while "a" not in pair.prefill.finished:
        output = pair.prefill.step()
        pushed.append(sum(len(w.block_ids) for w in output.kv_connector_metadata.writes))
    assert pushed == [0, 4, 4, 4]  # blocks of CHUNK / BLOCK each, one step late


def test_request_level_push_sends_once(tmp_path: Path) -> None:
    pair = Pair(tmp_path, push="request", arena_bytes=1 << 20)
    tokens = prompt(3 * CHUNK)
    pair.send("a", tokens)
    while "a" not in pair.prefill.finished:
        output = pair.prefill.step()
        assert not output.kv_connector_metadata.writes
    request = pair.receive("a", tokens)
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert pair.decode.holds(request, len(tokens))
    pair.close()


def test_prefix_hits_on_both_sides(pair: Pair) -> None:
    shared = prompt(5 * BLOCK)
    for name, tail in (("a", 7), ("b", 40), ("c", 1)):
        tokens = shared + prompt(tail, seed=11 + tail)
        pair.send(name, tokens)
        pair.prefilled(name)
        request = pair.receive(name, tokens)
        pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
        pair.decode.run_until(lambda name=name: name in pair.decode.outputs)
        assert pair.decode.holds(request, len(tokens))
        pair.decode.run_until(lambda name=name: name in pair.decode.finished)
    pair.settle()
    assert pair.decode.instance.inbox.loaded_bytes < pair.prefill.instance.outbox.sent_bytes


def test_many_at_once(pair: Pair) -> None:
    names = [f"r{i}" for i in range(12)]
    prompts = {name: prompt(10 + 23 * i, seed=i + 1) for i, name in enumerate(names)}
    for name in names:
        pair.send(name, prompts[name])
    requests = {}
    for name in names:
        pair.prefilled(name)
        requests[name] = pair.receive(name, prompts[name])
        pair.decode.step()
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: all(name in pair.decode.finished for name in names))
    pair.settle()
    assert pair.decode.instance.inbox.loads_done == len(names)


def test_a_large_load_runs_beside_the_steps(tmp_path: Path) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20, load_budget_bytes=1)
    pair.decode.add("busy", prompt(5), max_tokens=100)
    pair.decode.run_until(lambda: "busy" in pair.decode.outputs)
    tokens = prompt(150)
    pair.send("a", tokens)
    pair.prefilled("a")
    request = pair.receive("a", tokens)
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert pair.decode.holds(request, len(tokens))
    assert pair.decode.instance.inbox.loads_done == 1
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    pair.decode.abort("busy")
    pair.settle()
    pair.close()


# -- what can go wrong -------------------------------------------------------


def test_kv_that_never_comes_is_recomputed(shm_pair: Pair) -> None:
    tokens = prompt(50)
    request = shm_pair.receive("a", tokens)
    shm_pair.decode.run_until(lambda: "a" in shm_pair.decode.outputs)
    assert shm_pair.decode.holds(request, len(tokens))
    assert shm_pair.decode.instance.inbox.loads_failed == 1


def test_no_decode_instance_is_an_answer(shm_pair: Pair) -> None:
    shm_pair.prefill.sees(shm_pair.prefill)
    shm_pair.send("a", prompt(100))
    answer = shm_pair.prefilled("a")
    assert answer.decode == InstanceId("")
    assert answer.reason
    shm_pair.settle()


def test_abort_of_a_running_prefill_frees_both_sides(pair: Pair) -> None:
    pair.send("a", prompt(5 * CHUNK))
    for _ in range(3):
        pair.prefill.step()
    assert "a" not in pair.prefill.finished
    pair.prefill.abort("a")
    pair.settle()


def test_cancel_between_the_legs_frees_the_arena(pair: Pair) -> None:
    pair.send("a", prompt(100))
    pair.prefilled("a")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    assert pair.decode.instance._read_load().arena_used_bytes > 0
    pair.decode.instance._cancel(TransferId("t-a"))
    pair.settle()


def test_cancel_before_the_transfer_is_done(pair: Pair) -> None:
    pair.send("a", prompt(100))
    pair.prefilled("a")
    for engine in (pair.prefill, pair.decode):
        engine.instance._cancel(TransferId("t-a"))
    pair.settle()


def test_abort_while_waiting_for_kv(shm_pair: Pair) -> None:
    shm_pair.receive("a", prompt(100))
    for _ in range(3):
        shm_pair.decode.step()
    shm_pair.decode.abort("a")
    shm_pair.settle()


def test_a_peer_that_refuses_costs_speed_only(shm_pair: Pair) -> None:
    """The decode instance is gone, but the view does not know it yet."""
    shm_pair.decode.instance._receiver.close()
    shm_pair.send("a", prompt(3 * CHUNK))
    answer = shm_pair.prefilled("a")
    assert answer.num_tokens == 3 * CHUNK
    shm_pair.prefill.run_until(lambda: shm_pair.prefill.is_at_rest)


def test_a_full_arena_delays_and_nothing_is_lost(tmp_path: Path) -> None:
    block_bytes = BLOCK * 64 * 2
    pair = Pair(tmp_path, arena_bytes=16 * block_bytes, transfer_timeout_s=10.0)
    names = [f"r{i}" for i in range(6)]
    prompts = {name: prompt(9 * BLOCK, seed=i + 1) for i, name in enumerate(names)}
    for name in names:
        pair.send(name, prompts[name])
    waiting = {}
    for name in names:
        answer = pair.prefilled(name)
        assert answer.decode == pair.decode.info.id
        waiting[name] = pair.receive(name, prompts[name], answer.transfer)

    def step_both() -> bool:
        pair.prefill.step()
        return all(name in pair.decode.finished for name in names)

    pair.decode.run_until(step_both)
    pair.settle()
    assert pair.decode.instance.inbox.loads_done == len(names)
    pair.close()


def test_preempted_prefill_is_sent_again_and_right(tmp_path: Path) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20)
    tokens = prompt(4 * CHUNK)
    pair.send("a", tokens)
    for _ in range(3):
        pair.prefill.step()
    scheduler = pair.prefill.scheduler
    victim = scheduler.running.pop()
    scheduler._preempt_request(victim, 0.0)
    original = scheduler.connector.build_connector_meta

    def with_preemption(output: Any) -> Any:
        output.preempted_req_ids = {"a"}
        scheduler.connector.build_connector_meta = original
        return original(output)

    scheduler.connector.build_connector_meta = with_preemption
    scheduler.kv_cache_manager.reset_prefix_cache()
    answer = pair.prefilled("a")
    request = pair.receive("a", tokens, answer.transfer)
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert answer.transfer != "t-a"
    assert pair.decode.holds(request, len(tokens))
    assert pair.decode.instance.inbox.loads_done == 1
    pair.close()


def test_a_preempted_decode_computes_its_prompt_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20)
    tokens = prompt(80)
    pair.send("a", tokens)
    pair.prefilled("a")
    pair.receive("a", tokens)
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    scheduler = pair.decode.scheduler
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    pair.settle()
    assert len(pair.decode.outputs["a"]) == 4
    assert pair.decode.instance.inbox.loads_done == 1
    pair.close()


def test_a_foreign_leg_is_served_whole(shm_pair: Pair) -> None:
    shm_pair.decode.add("a", prompt(20), params={"tetri": {"type": "nonsense"}})
    shm_pair.decode.run_until(lambda: "a" in shm_pair.decode.finished)
    assert shm_pair.decode.instance.bad_legs == 1
    shm_pair.settle()


def early(pair: Pair, name: str, tokens: list[int], **options: Any) -> Any:
    leg = DecodeLeg(TransferId(f"t-{name}"), digest_of(tokens), is_early=True)
    return pair.decode.add(name, tokens, params=to_params(leg), **options)


@pytest.mark.parametrize("num_tokens", [65, 200, 511])
def test_a_leg_that_comes_before_its_kv_goes_on_behind_the_token(
    pair: Pair, num_tokens: int
) -> None:
    tokens = prompt(num_tokens)
    request = early(pair, "a", tokens)
    for _ in range(3):
        assert not pair.decode.step().total_num_scheduled_tokens
    pair.send("a", tokens)
    answer = pair.prefilled("a")
    assert answer.given is not None
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: request.num_output_tokens >= 2)
    assert list(request.output_token_ids)[:1] == answer.given.token_ids
    assert pair.decode.holds(request, num_tokens)
    assert pair.decode.instance._read_load().injected == 1
    assert pair.decode.instance._read_load().kv_loads_failed == 0
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    assert pair.decode.outputs["a"][:1] == answer.given.token_ids
    assert len(pair.decode.outputs["a"]) == 4
    pair.settle()


def test_the_router_is_told_when_the_last_chunk_begins(pair: Pair) -> None:
    tokens = prompt(3 * CHUNK)
    told: list[Any] = []
    pair.prefill.instance._agent.publish = told.append
    pair.send("a", tokens)
    pair.prefill.step()
    assert told == []
    pair.prefill.step()
    assert [message.opening for message in told] == [None]
    pair.prefill.step()
    opening = told[-1].opening
    assert "a" in pair.prefill.finished
    assert opening.transfer == pair.prefilled("a").transfer
    assert opening.digest == digest_of(tokens)
    assert opening.prompt_token_ids == tokens
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.receive("a", tokens)
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    pair.settle()


def test_an_early_leg_whose_prefill_dies_is_computed_here(shm_pair: Pair) -> None:
    request = early(shm_pair, "a", prompt(100))
    shm_pair.decode.run_until(lambda: request.is_finished())
    assert shm_pair.decode.instance._read_load().kv_loads_failed == 1
    shm_pair.settle()


def test_an_early_leg_that_is_aborted_leaves_nothing(pair: Pair) -> None:
    tokens = prompt(200)
    early(pair, "a", tokens)
    pair.decode.step()
    pair.decode.abort("a")
    pair.send("a", tokens)
    pair.prefilled("a")
    pair.prefill.instance.outbox.cancel(TransferId("t-a"))
    pair.decode.instance._cancel(TransferId("t-a"))
    pair.settle()


def test_early_and_late_legs_share_the_steps_of_running_decodes(pair: Pair) -> None:
    first, second = prompt(100), prompt(150, seed=5)
    pair.send("a", first)
    pair.prefilled("a")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    running = pair.receive("a", first)  # writes 4 tokens
    waiting = early(pair, "b", second, max_tokens=3)
    pair.decode.run_until(lambda: running.num_output_tokens >= 2)
    assert waiting.num_output_tokens == 0
    pair.send("b", second)
    pair.prefilled("b")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: "a" in pair.decode.finished and "b" in pair.decode.finished)
    assert len(pair.decode.outputs["b"]) == 3
    pair.settle()


def test_the_last_blocks_leave_behind_the_last_chunk(pair: Pair) -> None:
    tokens = prompt(3 * CHUNK)
    pair.send("a", tokens)
    pair.prefill.run_until(lambda: "a" in pair.prefill.finished)
    # No further step of the prefill engine: everything left with the last chunk.
    request = pair.receive("a", tokens)
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    assert pair.decode.instance._read_load().kv_loads_failed == 0
    assert pair.decode.instance.inbox.loads_done == 1
    assert request.num_output_tokens == 4
    pair.settle()


def test_blocks_that_are_sent_before_their_request_ends_are_freed_with_it(pair: Pair) -> None:
    tokens = prompt(3 * CHUNK)
    pair.send("a", tokens)
    pair.prefill.step()
    pair.prefill.step()
    outbox = pair.prefill.instance.outbox
    assert outbox.freeable({"a", "unknown"}) == set()  # vLLM must not hear of it yet
    pair.prefill.step()
    assert pair.prefilled("a").decode == pair.decode.info.id
    assert len(outbox) == 0
    pair.receive("a", tokens)
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    pair.settle()
