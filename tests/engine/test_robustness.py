"""What a peer, a client or a race can do to an engine: cost time, nothing else."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.harness import BLOCK, Engine
from tests.engine.test_handover import CHUNK, Pair, prompt
from tests.eventually import eventually
from vllm_tetri.engine import notes
from vllm_tetri.engine.inbox import MAX_REMEMBERED
from vllm_tetri.engine.step import StepMeta, WorkerReport
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import (
    DecodeLeg,
    Given,
    Prefilled,
    PrefillLeg,
    digest_of,
    from_params,
    to_params,
)
from vllm_tetri.router.first_token import read_first_token
from vllm_tetri.types import InstanceId, RequestId, TransferId


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, arena_bytes=1 << 20, transfer_timeout_s=1.0)
    yield pair
    pair.close()


def worker_of(engine: Engine) -> Any:
    return engine.worker._worker


def test_kv_of_another_prompt_is_never_loaded(pair: Pair) -> None:
    """Two instances may make different tokens of the same text."""
    pair.send("a", prompt(100, seed=3))
    answer = pair.prefilled("a")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    other = prompt(100, seed=4)
    request = pair.receive("a", other, digest=answer.digest)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert pair.decode.holds(request, len(other))
    assert pair.decode.instance.inbox.loads_done == 0
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    pair.settle()


def test_a_kv_endpoint_that_is_none_is_survived(pair: Pair) -> None:
    picture = pair.prefill.instance._agent.picture()
    bad = tuple(
        replace(each, info=replace(each.info, kv_endpoint="nonsense"))
        for each in picture.view.instances
    )
    changed = picture._replace(view=replace(picture.view, instances=bad))
    pair.prefill.instance._agent.picture = lambda: changed
    pair.send("a", prompt(100))
    pair.prefilled("a")
    pair.settle()


def test_an_endless_transfer_name_is_no_leg(pair: Pair) -> None:
    leg = PrefillLeg(TransferId("x" * 70_000), RequestId("a"))
    pair.prefill.add("a", prompt(100), params=to_params(leg))
    pair.prefill.run_until(lambda: "a" in pair.prefill.finished)
    assert pair.prefill.instance.bad_legs == 1
    pair.settle()


def test_failed_transfers_leave_no_entry(pair: Pair) -> None:
    pair.decode.instance._receiver.close()
    for i in range(5):
        pair.send(f"r{i}", prompt(6 * CHUNK, seed=i + 1))
        pair.prefilled(f"r{i}")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    assert not worker_of(pair.prefill)._sending


def test_abort_after_a_full_arena_leaves_no_entry(tmp_path: Path) -> None:
    # A prompt that nobody has room for waits for a report period before it tries.
    pair = Pair(
        tmp_path, arena_bytes=24 * BLOCK * 64 * 2, transfer_timeout_s=5.0, report_period_s=0.001
    )
    pair.send("big", prompt(20 * BLOCK))
    pair.prefilled("big")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.send("a", prompt(20 * BLOCK, seed=9))
    entry = pair.prefill.instance.outbox._entries["a"]
    while not entry.retry_at:  # the arena said FULL
        pair.prefill.step()
        time.sleep(0.002)
    pair.prefill.abort("a")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    assert not worker_of(pair.prefill)._sending
    pair.close()


def test_telling_a_hung_peer_does_not_hold_the_engine(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        lost = [(endpoint, notes.encode(notes.Lost(f"t{i}"))) for i in range(50)]
        worker_of(pair.prefill).begin_step(StepMeta(notes=lost))
        assert time.monotonic() - start < 1.0


def test_old_losses_do_not_hide_new_ones(pair: Pair) -> None:
    inbox = pair.decode.instance.inbox
    for i in range(MAX_REMEMBERED):
        inbox._lost[f"old{i}"] = None
    tokens = prompt(100)
    request = pair.receive("a", tokens)
    inbox._entries["a"].deadline += 100.0
    worker_of(pair.prefill).begin_step(
        StepMeta(notes=[(pair.decode.info.kv_endpoint, notes.encode(notes.Lost("t-a")))])
    )
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert pair.decode.holds(request, len(tokens))
    assert inbox.loads_failed == 1


def test_kv_of_a_silent_instance_is_not_waited_for(pair: Pair) -> None:
    inbox, tokens = pair.decode.instance.inbox, prompt(100)
    request = pair.receive("a", tokens)
    inbox._entries["a"].deadline += 100.0
    pair.decode.step()
    assert inbox.num_waiting == 1
    pair.decode.instance._agent._on_lost(TransferId("t-a"))  # as when a router says so
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert pair.decode.holds(request, len(tokens))
    assert inbox.loads_failed == 1


def test_kv_that_has_arrived_is_taken_whatever_is_said_of_its_sender(pair: Pair) -> None:
    tokens = prompt(100)
    pair.send("a", tokens)
    pair.prefilled("a")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.instance._agent._on_lost(TransferId("t-a"))
    pair.receive("a", tokens)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert pair.decode.instance.inbox.loads_done == 1


def test_a_slot_is_kept_until_every_rank_has_loaded_it(pair: Pair) -> None:
    tokens = prompt(100)
    pair.send("a", tokens)
    pair.prefilled("a")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    inbox = pair.decode.instance.inbox
    request = pair.receive("a", tokens)
    assert inbox.match(request, 0, is_busy=False) == (99, False)
    inbox.admitted(request, list(range(7)), 99)
    inbox._num_ranks = 2
    inbox.report(WorkerReport(loaded={"a": 1}))
    assert pair.decode.instance._read_load().arena_used_bytes > 0
    assert inbox.match(request, 0, is_busy=False) == (None, False)
    inbox.report(WorkerReport(loaded={"a": 1}))
    assert pair.decode.instance._read_load().arena_used_bytes == 0


@pytest.mark.parametrize("budget", [1, 1 << 30], ids=["background", "in step"])
def test_a_load_that_fails_is_recomputed(tmp_path: Path, budget: int) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20, load_budget_bytes=budget)

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    worker_of(pair.decode)._scatter = broken
    pair.decode.add("busy", prompt(20, seed=77), max_tokens=300)
    pair.decode.run_until(lambda: "busy" in pair.decode.outputs)
    tokens = prompt(200)
    pair.send("a", tokens)
    pair.prefilled("a")
    request = pair.receive("a", tokens)
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert pair.decode.holds(request, len(tokens))
    assert pair.decode.instance.inbox.loads_failed == 1
    for name in ("a", "busy"):
        pair.decode.abort(name)
    pair.settle()
    pair.close()


@pytest.mark.parametrize(("name", "is_known"), [("T", True), ("T~1", True), ("U", False)])
def test_a_retry_is_known_by_its_name(name: str, is_known: bool) -> None:
    leg = Prefilled(TransferId(name), InstanceId("d"), 10, digest_of([1]), 1, 1, "")
    answer = msgspec.json.encode({"kv_transfer_params": to_params(leg)})
    found = read_first_token(answer, TransferId("T"), is_chat=False)
    assert (found is not None) == is_known


def test_legs_round_trip_and_nonsense_is_refused() -> None:
    leg = DecodeLeg(TransferId("t"), digest_of([1, 2]))
    assert from_params(to_params(leg)) == leg
    assert from_params(None) is None
    assert from_params({"other": 1}) is None
    for bad in ("tetri", {"tetri": 5}, {"tetri": {"type": "decode"}}):
        with pytest.raises(ProtocolError):
            from_params(bad)  # type: ignore[arg-type]


def test_notes_that_are_none_are_dropped(pair: Pair) -> None:
    endpoint = pair.decode.info.kv_endpoint
    good = notes.encode(notes.FirstTokens("t-a", Given([5])))
    huge = notes.encode(notes.FirstTokens("t-b", Given([1] * notes.MAX_BYTES)))
    bad = [b"", b"lost:t-a", good[:-1], huge, msgspec.msgpack.encode({"type": "first"})]
    worker = worker_of(pair.prefill)
    worker.begin_step(StepMeta(notes=[(endpoint, note) for note in [*bad, good]]))
    inbox = pair.decode.instance.inbox
    tokens = prompt(100)
    leg = DecodeLeg(TransferId("t-a"), digest_of(tokens), is_early=True)
    pair.decode.add("a", tokens, params=to_params(leg))
    pair.decode.run_until(lambda: not inbox._entries["a"].awaits_given)
    assert not inbox._given
    pair.decode.abort("a")
    pair.settle()


def test_a_token_that_comes_after_its_request_began_here_is_not_taken(pair: Pair) -> None:
    endpoint = pair.decode.info.kv_endpoint
    tokens = prompt(100)
    leg = DecodeLeg(TransferId("t-a"), digest_of(tokens), is_early=True)
    request = pair.decode.add("a", tokens, params=to_params(leg))
    worker = worker_of(pair.prefill)
    worker.begin_step(StepMeta(notes=[(endpoint, notes.encode(notes.Lost("t-a")))]))
    pair.decode.run_until(lambda: request.num_output_tokens == 1)
    late = notes.encode(notes.FirstTokens("t-a", Given([5])))
    worker.begin_step(StepMeta(notes=[(endpoint, late)]))
    inbox = pair.decode.instance.inbox
    eventually(lambda: inbox.tidy() or "t-a" in inbox._given)  # before the request has ended
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    assert pair.decode.outputs["a"] == [7] * 4  # what the harness samples
    assert pair.decode.instance._read_load().injected == 0


def test_a_prompt_that_is_computed_again_keeps_its_blocks_until_they_are_sent(pair: Pair) -> None:
    pair.send("a", prompt(3 * CHUNK))
    pair.prefill.step()
    pair.prefill.step()
    outbox = pair.prefill.instance.outbox
    assert outbox.freeable({"a"}) == set()
    outbox._preempted("a")  # what was sent was another try's
    pair.prefill.step()
    assert "a" in pair.prefill.finished
    assert len(outbox) == 1
