"""A prompt's KV moves between two real schedulers through our connector."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import make_pair
from tests.engine.harness import BLOCK, Engine, told_by
from tests.engine.pair import CHUNK, Pair, prompt
from tests.eventually import eventually
from tests.transport.sides import still
from vllm_tetri.engine.compat import RequestStatus
from vllm_tetri.engine.step import WorkerReport
from vllm_tetri.handover import PriorOutput
from vllm_tetri.messages import CancelTransfer
from vllm_tetri.policy.order import ORDERS
from vllm_tetri.policy.step_cost import HandoverFit
from vllm_tetri.transport.native import SlotState
from vllm_tetri.types import InstanceId, TransferId


@pytest.fixture(params=["shm", "tcp", "dma", "ipc", "nccl", "staged"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from make_pair(tmp_path, request.param)


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 64, 65, 200, 511])
def test_kv_arrives_and_only_the_last_token_is_recomputed(pair: Pair, num_tokens: int) -> None:
    tokens = prompt(num_tokens)
    response = pair.sent("a", tokens)
    assert response.decode == pair.decode.info.id
    pair.decoding("a", tokens)
    assert pair.decode.endpoint.receives.loads_done == (1 if num_tokens > 1 else 0)
    assert pair.prefill.outputs["a"] == [7]
    pair.end("a")
    assert len(pair.decode.outputs["a"]) == pair.decode.computed["a"] == 4


def test_kv_that_a_draft_model_computes_last_arrives(pair: Pair) -> None:
    pair.prefill.drafts = True
    for num_tokens in (1, 17, CHUNK, 3 * CHUNK + 5):
        tokens, name = prompt(num_tokens, seed=num_tokens), f"{num_tokens}"
        pair.sent(name, tokens)
        pair.decoding(name, tokens)
        pair.end(name)
        assert pair.decode.computed[name] == 4


def test_blocks_travel_while_later_chunks_are_computed(pair: Pair) -> None:
    tokens = prompt(4 * CHUNK)
    pair.send("a", tokens)
    pushed = []
    while "a" not in pair.prefill.finished:
        output = pair.prefill.step()
        pushed.append(
            sum(len(ids) for w in output.kv_connector_metadata.writes for _, ids in w.runs)
        )
    assert pushed[:4] == [0, 4, 4, 4]  # blocks of CHUNK / BLOCK each, one step late
    assert not any(pushed[4:])


def test_request_level_push_sends_once(tmp_path: Path) -> None:
    pair = Pair(tmp_path, push="request", arena_bytes=1 << 20)
    tokens = prompt(3 * CHUNK)
    pair.send("a", tokens)
    while "a" not in pair.prefill.finished:
        output = pair.prefill.step()
        assert not output.kv_connector_metadata.writes
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decoding("a", tokens)
    pair.close()


def test_prefix_hits_on_both_sides(pair: Pair) -> None:
    shared = prompt(5 * BLOCK)
    for name, tail in (("a", 7), ("b", 40), ("c", 1)):
        tokens = shared + prompt(tail, seed=11 + tail)
        pair.sent(name, tokens)
        pair.decoding(name, tokens)
        pair.decode.run_until(lambda name=name: name in pair.decode.finished)
    pair.settle()
    assert pair.decode.endpoint.receives.loaded_bytes < pair.prefill.endpoint.sends.sent_bytes


def reset(engine: Engine) -> None:
    """What vLLM does when it pauses or sleeps, before its weights are replaced."""
    engine.finish_steps()
    options = {"reset_running_requests": True, "reset_connector": True}
    assert engine.scheduler.reset_prefix_cache(**options)


@pytest.mark.parametrize("has_arrived", [False, True])
def test_kv_of_before_new_weights_is_not_decoded_with_them(pair: Pair, has_arrived: bool) -> None:
    tokens, before = prompt(200), pair.decode.info.identity
    if has_arrived:
        pair.sent("a", tokens)
    request = pair.receive("a", tokens)
    pair.decode.endpoint.receives.pin_arrived(pair.decode.scheduler.requests)
    reset(pair.decode)
    reset(pair.decode)
    if not has_arrived:
        pair.send("a", tokens)
        pair.prefilled("a")
    later = pair.receive("b", tokens, TransferId("t-a"))
    pair.decode.run_until(lambda: {"a", "b"} <= pair.decode.outputs.keys(), max_steps=200)
    assert pair.decode.holds(request, len(tokens))
    assert pair.decode.holds(later, len(tokens))
    assert pair.decode.endpoint.receives.loaded_bytes == 0
    assert pair.decode.info.identity != before
    pair.end("a")


def test_kv_of_new_weights_is_not_sent_to_instances_with_the_old_ones(pair: Pair) -> None:
    tokens = prompt(5 * CHUNK)
    pair.send("a", tokens)
    for _ in range(3):
        pair.prefill.step()  # a decode instance is chosen, and has blocks of the old weights
    reset(pair.prefill)
    assert pair.prefilled("a").decode == ""
    pair.send("b", prompt(100, seed=5))
    assert pair.prefilled("b").decode == ""
    pair.settle()
    slot = pair.decode.endpoint.receiver.find("t-a")
    assert slot is None or slot.state is SlotState.FAILED


@pytest.mark.usefixtures("continues")
def test_a_prompt_and_its_cached_tokens_are_counted_where_they_were_computed(pair: Pair) -> None:
    tokens = prompt(5 * BLOCK + 7)
    for name, cached_tokens in (("a", 0), ("b", 5 * BLOCK)):
        assert pair.sent(name, tokens).cached_tokens == cached_tokens
        counted = pair.prefill.counted[name]
        assert (counted.num_prompt_tokens, counted.num_cached_tokens) == (
            len(tokens),
            cached_tokens,
        )
        prior = {"prior_output": PriorOutput([7]), "cached_tokens": cached_tokens}
        pair.decoding(name, tokens, **prior)
        counted = pair.decode.counted[name]
        assert (counted.num_prompt_tokens, counted.num_cached_tokens) == (0, cached_tokens)
        # As one instance would have told, which computed and kept the rest of the full blocks.
        assert counted.num_cache_creation_tokens == 5 * BLOCK - cached_tokens
        pair.end(name)


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
    assert pair.decode.endpoint.receives.loads_done == len(names)


def test_a_large_load_runs_beside_the_steps(tmp_path: Path) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20, load_budget_bytes=1)
    pair.decode.add("busy", prompt(5), max_tokens=100)
    pair.decode.run_until(lambda: "busy" in pair.decode.outputs)
    tokens = prompt(150)
    pair.sent("a", tokens)
    pair.decoding("a", tokens)
    assert pair.decode.endpoint.receives.loads_done == 1
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    pair.decode.abort("busy")
    pair.settle()
    pair.close()


def test_a_load_beside_steps_waits_for_what_they_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "on_device", True)
    pair = Pair(tmp_path, link="dma", arena_bytes=1 << 20, load_budget_bytes=1)
    engine, device = pair.decode, pair.decode.device
    assert device is not None
    engine.add("busy", prompt(5), max_tokens=200)
    engine.run_until(lambda: "busy" in engine.outputs)
    tokens, receives = prompt(150), engine.endpoint.receives
    pair.sent("a", tokens)
    with device.held(device.compute):
        request = pair.receive("a", tokens)
        engine.run_until(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
        assert still(lambda: (engine.step(), receives.loads_done)[1] == 0)
    engine.run_until(lambda: "a" in engine.outputs)
    assert engine.holds(request, len(tokens))
    engine.abort("busy")
    pair.end("a")
    pair.close()


# -- what can go wrong -------------------------------------------------------


def test_kv_that_never_comes_is_recomputed(shm_pair: Pair) -> None:
    tokens = prompt(50)
    shm_pair.decoding("a", tokens)
    assert shm_pair.decode.endpoint.receives.loads_failed == 1


def test_a_prompt_without_a_decode_instance_gets_a_response_that_says_so(shm_pair: Pair) -> None:
    shm_pair.prefill.sees(shm_pair.prefill)
    shm_pair.send("a", prompt(100))
    response = shm_pair.prefilled("a")
    assert response.decode == InstanceId("")
    assert response.reason
    shm_pair.settle()


def test_abort_of_a_running_prefill_frees_both_sides(pair: Pair) -> None:
    pair.send("a", prompt(5 * CHUNK))
    for _ in range(3):
        pair.prefill.step()
    assert "a" not in pair.prefill.finished
    pair.prefill.abort("a")
    pair.settle()


@pytest.mark.parametrize("is_sent", [False, True])
def test_cancel_before_or_after_the_transfer_is_done(pair: Pair, is_sent: bool) -> None:
    pair.send("a", prompt(100))
    pair.prefilled("a")
    if is_sent:
        pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
        assert pair.decode.endpoint.read_load().arena_used_bytes > 0
    for engine in (pair.prefill, pair.decode):
        engine.endpoint.take(CancelTransfer(TransferId("t-a")))
    pair.settle()


def test_abort_while_waiting_for_kv(shm_pair: Pair) -> None:
    shm_pair.receive("a", prompt(100))
    for _ in range(3):
        shm_pair.decode.step()
    shm_pair.decode.abort("a")
    shm_pair.settle()


def test_a_peer_that_refuses_costs_speed_only(shm_pair: Pair) -> None:
    """The decode instance is gone, but the view does not know it yet."""
    shm_pair.decode.endpoint.receiver.close()
    shm_pair.send("a", prompt(3 * CHUNK))
    response = shm_pair.prefilled("a")
    assert response.num_tokens == 3 * CHUNK
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
        response = pair.prefilled(name)
        assert response.decode == pair.decode.info.id
        waiting[name] = pair.receive(name, prompts[name], response.transfer)

    def step_both() -> bool:
        pair.prefill.step()
        return all(name in pair.decode.finished for name in names)

    pair.decode.run_until(step_both)
    pair.settle()
    assert pair.decode.endpoint.receives.loads_done == len(names)
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
    response = pair.prefilled("a")
    assert response.transfer != "t-a"
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decoding("a", tokens, response.transfer)
    assert pair.decode.endpoint.receives.loads_done == 1
    pair.close()


def test_a_prompt_that_pauses_for_long_is_sent_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind many shorter ones: its receiver would take the transfer for broken."""
    pair = Pair(tmp_path, arena_bytes=1 << 20, transfer_timeout_s=5.0)
    tokens = prompt(6 * CHUNK)
    pair.send("a", tokens)
    for _ in range(3):
        pair.prefill.step()
    scheduler = pair.prefill.scheduler
    original = scheduler.connector.build_connector_meta

    def with_pause(output: Any) -> Any:
        scheduler.connector.build_connector_meta = original
        paused = copy(output)
        paused.num_scheduled_tokens = {}
        later_s = time.monotonic() + 3.0
        with monkeypatch.context() as patched:
            patched.setattr("time.monotonic", lambda: later_s)
            return original(paused)

    scheduler.connector.build_connector_meta = with_pause
    response = pair.prefilled("a")
    assert response.transfer != "t-a"
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decoding("a", tokens, response.transfer)
    assert pair.decode.endpoint.receives.loads_done == 1
    pair.close()


def test_a_preempted_decode_computes_its_prompt_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20)
    tokens = prompt(80)
    pair.sent("a", tokens)
    pair.decoding("a", tokens)
    scheduler = pair.decode.scheduler
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    pair.end("a")
    assert len(pair.decode.outputs["a"]) == 4
    assert pair.decode.endpoint.receives.loads_done == 1
    pair.close()


def test_a_foreign_leg_is_served_whole(shm_pair: Pair) -> None:
    shm_pair.decode.add("a", prompt(20), params={"tetri": {"type": "nonsense"}})
    shm_pair.end("a")


@pytest.mark.usefixtures("continues")
@pytest.mark.parametrize("num_tokens", [65, 200, 511])
def test_a_decode_request_that_comes_before_its_kv_continues_after_the_token(
    pair: Pair, num_tokens: int
) -> None:
    tokens = prompt(num_tokens)
    request = pair.receive("a", tokens, is_early=True)
    for _ in range(3):
        assert not pair.decode.step().total_num_scheduled_tokens
    pair.send("a", tokens)
    response = pair.prefilled("a")
    assert response.prior_output is not None
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: request.num_output_tokens >= 2)
    assert list(request.output_token_ids)[:1] == response.prior_output.token_ids
    assert pair.decode.holds(request, num_tokens)
    assert pair.decode.endpoint.read_load().continued == 1
    assert pair.decode.endpoint.read_load().kv_loads_failed == 0
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    assert pair.decode.outputs["a"][:1] == response.prior_output.token_ids
    assert len(pair.decode.outputs["a"]) == 4
    pair.settle()


@pytest.mark.usefixtures("continues")
def test_nothing_waits_for_what_is_here_already(
    shm_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, receives = prompt(200), shm_pair.decode.endpoint.receives
    request = shm_pair.receive("a", tokens, is_early=True)
    shm_pair.decode.step()
    shm_pair.send("a", tokens)
    shm_pair.prefilled("a")
    shm_pair.prefill.run_until(lambda: shm_pair.prefill.is_at_rest)

    def has_note() -> bool:  # it came while vLLM asked about the request
        receives.match(request, 0, is_busy=False)
        return bool(receives.outputs)

    eventually(has_note)
    eventually(lambda: shm_pair.decode.endpoint.receiver.stats().unclaimed == 1)
    monkeypatch.setattr(receives, "wait", pytest.fail)
    assert shm_pair.decode.step().total_num_scheduled_tokens
    monkeypatch.undo()
    shm_pair.decode.run_until(lambda: "a" in shm_pair.decode.finished)
    shm_pair.settle()


def test_the_router_is_told_when_the_last_chunk_begins(pair: Pair) -> None:
    told = told_by(pair.prefill)
    pair.sent("b", prompt(CHUNK))  # stays in the prefix cache
    told.clear()
    pair.send("a", prompt(4 * CHUNK))
    for num_told in (0, 0, 1):
        assert [message.ending for message in told] == [None] * num_told
        pair.prefill.step()
    assert told[-1].ending.transfer == pair.prefilled("a").transfer
    assert told[-1].ending.cached_tokens == CHUNK


def test_an_early_leg_whose_prefill_dies_is_computed_here(shm_pair: Pair) -> None:
    request = shm_pair.receive("a", prompt(100), is_early=True)
    shm_pair.decode.run_until(lambda: request.is_finished())
    assert shm_pair.decode.endpoint.read_load().kv_loads_failed == 1
    shm_pair.settle()


def test_an_early_leg_that_is_aborted_leaves_nothing(pair: Pair) -> None:
    tokens = prompt(200)
    pair.receive("a", tokens, is_early=True)
    pair.decode.step()
    pair.decode.abort("a")
    pair.send("a", tokens)
    pair.prefilled("a")
    pair.prefill.endpoint.sends.cancel(TransferId("t-a"))
    pair.decode.endpoint.take(CancelTransfer(TransferId("t-a")))
    pair.settle()


def test_early_and_late_legs_share_the_steps_of_running_decodes(pair: Pair) -> None:
    first, second = prompt(100), prompt(150, seed=5)
    pair.sent("a", first)
    running = pair.receive("a", first)  # writes 4 tokens
    waiting = pair.receive("b", second, max_tokens=3, is_early=True)
    pair.decode.run_until(lambda: running.num_output_tokens >= 2)
    assert waiting.num_output_tokens == 0
    pair.sent("b", second)
    pair.decode.run_until(lambda: "a" in pair.decode.finished and "b" in pair.decode.finished)
    assert len(pair.decode.outputs["b"]) == 3
    pair.settle()


def test_the_last_blocks_leave_after_the_last_chunk(pair: Pair) -> None:
    tokens = prompt(3 * CHUNK)
    pair.send("a", tokens)
    pair.prefilled("a")
    pair.decoding("a", tokens)  # without a further step of the prefill engine
    assert pair.decode.endpoint.receives.loads_done == 1
    pair.end("a")


def test_blocks_that_are_sent_before_their_request_ends_are_freed_with_it(pair: Pair) -> None:
    tokens = prompt(3 * CHUNK)
    pair.send("a", tokens)
    pair.prefill.step()
    pair.prefill.step()
    outbox = pair.prefill.endpoint.sends
    sent = WorkerReport(ended={("a", 1): 1, ("unknown", 1): 1})
    assert outbox.take_freeable(sent) == set()  # vLLM must not hear of it yet
    pair.prefill.step()
    assert pair.prefilled("a").decode == pair.decode.info.id
    assert len(outbox) == 0
    pair.receive("a", tokens)
    pair.end("a")


@pytest.mark.usefixtures("continues")
def test_blocks_are_freed_while_a_note_waits_and_the_note_is_sent(
    shm_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, engine, worker = prompt(3 * CHUNK), shm_pair.prefill, shm_pair.prefill.kv_worker
    collect = worker.collect_sent

    def wait_and_collect() -> None:  # so all is sent in the step that computes the last block
        ending = [each.transfer for each in worker.sending.values() if each.is_last]
        eventually(lambda: all(each.quiesced for each in ending))
        collect()

    monkeypatch.setattr(worker, "collect_sent", wait_and_collect)
    shm_pair.receive("a", tokens, is_early=True)
    shm_pair.send("a", tokens)
    shm_pair.prefilled("a")
    assert len(engine.endpoint.sends) == engine.endpoint.read_load().blocks_used == 0
    assert engine.scheduler.has_requests()  # so vLLM takes one more step
    engine.step()
    shm_pair.end("a")
    assert shm_pair.decode.endpoint.read_load().continued == 1


@pytest.mark.parametrize(("push", "first_tokens"), [("chunk", CHUNK), ("request", 2 * CHUNK)])
def test_a_hand_over_is_learnt_with_all_tokens_that_travel_after_the_prompt(
    tmp_path: Path, push: str, first_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, learnt = Pair(tmp_path, arena_bytes=1 << 20, push=push), list[int]()
    monkeypatch.setattr(HandoverFit, "learn", lambda _, tokens, seconds: learnt.append(tokens))
    shared = prompt(2 * CHUNK)
    for name, tokens in (("a", shared), ("b", [*shared, 1, 2, 3])):
        pair.sent(name, tokens)
    assert learnt == [first_tokens, 2 * CHUNK + 3]
    pair.close()


@pytest.mark.parametrize("order", list(ORDERS))
def test_kv_that_arrives_during_a_prompt_of_many_chunks_does_not_wait_for_it(
    order: str, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20, chunk_size=CHUNK, prefill_policy=order)
    decode = pair.decode
    names = {f"short-{index}": prompt(40 + index, seed=index + 5) for index in range(3)}
    for name, tokens in names.items():
        pair.send(name, tokens)
    transfers = {name: pair.prefilled(name).transfer for name in names}
    decode.add("long", prompt(500))
    decode.step()
    for name, tokens in names.items():
        pair.receive(name, tokens, transfers[name])
        pair.prefill.run_until(lambda transfer=transfers[name]: has_arrived(decode, transfer))

    scheduled = decode.step().num_scheduled_tokens

    assert scheduled == {"long": CHUNK, **dict.fromkeys(names, 1)}
    decode.finish_steps()
    assert set(decode.outputs) == set(names)
    decode.run_until(lambda: {*names, "long"} <= set(decode.finished))
    pair.settle()
    pair.close()


def has_arrived(engine: Engine, transfer: str) -> bool:
    seen = engine.endpoint.receiver.find(transfer)
    return seen is not None and seen.state is SlotState.ARRIVED
