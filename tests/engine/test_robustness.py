"""What a peer, a client or a race can do to an engine: cost time, nothing else."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.engine.harness import BLOCK, FULL, SHAPE, Engine
from tests.engine.pair import CHUNK, Pair, prompt
from tests.eventually import eventually
from vllm_tetri.engine.receive import MAX_REMEMBERED
from vllm_tetri.engine.step import (
    MAX_NOTE_BYTES,
    FirstTokens,
    Lost,
    StepMeta,
    WorkerReport,
    encode_note,
)
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import (
    DecodeParams,
    Prefilled,
    PrefillParams,
    PriorOutput,
    digest_of,
    from_params,
    to_params,
)
from vllm_tetri.messages import TransferLost
from vllm_tetri.router.first_token import read_first_token
from vllm_tetri.transport.shards import Shards
from vllm_tetri.types import InstanceId, RequestId, Role, TransferId


@pytest.fixture
def pair(shm_pair: Pair) -> Pair:
    return shm_pair


@pytest.fixture
def patient_pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, arena_bytes=1 << 20, transfer_timeout_s=100.0)
    yield pair
    pair.close()


def test_kv_of_another_prompt_is_never_loaded(pair: Pair) -> None:
    """Two instances may make different tokens of the same text."""
    prefilled = pair.sent("a", prompt(100, seed=3))
    other = prompt(100, seed=4)
    pair.decoding("a", other, digest=prefilled.digest)
    assert pair.decode.endpoint.receives.loads_done == 0
    pair.end("a")


def test_a_kv_endpoint_that_is_none_is_survived(pair: Pair) -> None:
    snapshot = pair.prefill.endpoint.agent.snapshot()
    bad = tuple(
        replace(each, info=replace(each.info, kv_endpoint="nonsense"))
        for each in snapshot.view.instances
    )
    changed = snapshot._replace(view=replace(snapshot.view, instances=bad))
    pair.prefill.endpoint.agent.snapshot = lambda: changed
    pair.send("a", prompt(100))
    pair.prefilled("a")
    pair.settle()


def test_a_request_with_an_endless_transfer_name_is_served_by_one_instance(pair: Pair) -> None:
    params = PrefillParams(TransferId("x" * 70_000), RequestId("a"))
    pair.prefill.add("a", prompt(100), params=to_params(params))
    pair.prefill.run_until(lambda: "a" in pair.prefill.finished)
    pair.settle()


def test_failed_transfers_leave_no_entry(pair: Pair) -> None:
    pair.decode.endpoint.receiver.close()
    for i in range(5):
        pair.send(f"r{i}", prompt(6 * CHUNK, seed=i + 1))
        pair.prefilled(f"r{i}")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    assert not pair.prefill.kv_worker.sending


def test_abort_after_a_full_arena_leaves_no_entry(tmp_path: Path) -> None:
    # A prompt for which no instance has capacity waits for a report period before it tries.
    pair = Pair(
        tmp_path, arena_bytes=24 * BLOCK * 64 * 2, transfer_timeout_s=5.0, report_period_s=0.001
    )
    pair.sent("big", prompt(20 * BLOCK))
    pair.send("a", prompt(20 * BLOCK, seed=9))
    entry = pair.prefill.endpoint.sends._sends["a"]
    while not entry.retry_at:  # the arena said FULL
        pair.prefill.step()
        time.sleep(0.002)
    pair.prefill.abort("a")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    assert not pair.prefill.kv_worker.sending
    pair.close()


def test_notes_to_a_hung_peer_do_not_hold_the_engine(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        lost = [(endpoint, encode_note(Lost(f"t{i}"))) for i in range(50)]
        pair.prefill.kv_worker.begin_step(StepMeta(notes=lost))
        assert time.monotonic() - start < 10.0  # one alone may take a second


@pytest.mark.parametrize("is_told_by_router", [False, True])
def test_kv_of_a_lost_transfer_is_not_waited_for(
    patient_pair: Pair, is_told_by_router: bool
) -> None:
    pair, tokens = patient_pair, prompt(100)
    receives = pair.decode.endpoint.receives
    for i in range(MAX_REMEMBERED):
        receives.lose(TransferId(f"old{i}"))  # hides no new one
    request = pair.receive("a", tokens)
    pair.decode.step()
    assert receives.num_waiting == 1
    if is_told_by_router:  # the prefill instance is unresponsive
        pair.decode.endpoint.take(TransferLost(TransferId("t-a")))
    else:
        note = pair.decode.info.kv_endpoint, encode_note(Lost("t-a"))
        pair.prefill.kv_worker.begin_step(StepMeta(notes=[note]))
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert pair.decode.holds(request, len(tokens))
    assert receives.loads_failed == 1


def test_kv_that_has_arrived_is_taken_whatever_is_said_of_its_sender(pair: Pair) -> None:
    tokens = prompt(100)
    pair.sent("a", tokens)
    pair.decode.endpoint.take(TransferLost(TransferId("t-a")))
    pair.receive("a", tokens)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert pair.decode.endpoint.receives.loads_done == 1


def test_a_slot_is_kept_until_every_rank_has_loaded_it(pair: Pair) -> None:
    tokens = prompt(100)
    pair.sent("a", tokens)
    receives = pair.decode.endpoint.receives
    request = pair.receive("a", tokens)
    assert receives.match(request, 0, is_busy=False) == (99, False)
    receives.admitted(request, (list(range(7)),), 99)
    receives._layout = replace(receives._layout, shards=Shards(2, 1, 1))
    receives.report(WorkerReport(loaded={"a": 1}))
    assert pair.decode.endpoint.read_load().arena_used_bytes > 0
    assert receives.match(request, 0, is_busy=False) == (None, False)
    receives.report(WorkerReport(loaded={"a": 1}))
    assert pair.decode.endpoint.read_load().arena_used_bytes == 0


@pytest.mark.parametrize(
    ("budget", "spec"),
    [(1, FULL), (1 << 30, FULL), (1 << 30, SlidingWindowSpec(**SHAPE, sliding_window=32))],
    ids=["background", "in step", "window"],
)
def test_a_load_that_fails_is_recomputed(tmp_path: Path, budget: int, spec: Any) -> None:
    """All of a prompt is computed where tokens of a window before what was loaded are missing."""
    pair = Pair(tmp_path, arena_bytes=1 << 20, load_budget_bytes=budget, specs=(spec,))

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    pair.decode.mover.scatter = broken  # type: ignore[method-assign]
    pair.decode.add("busy", prompt(20, seed=77), max_tokens=300)
    pair.decode.run_until(lambda: "busy" in pair.decode.outputs)
    tokens = prompt(200)
    pair.sent("a", tokens)
    pair.decoding("a", tokens)
    assert pair.decode.endpoint.receives.loads_failed == 1
    assert pair.decode.computed["a"] >= len(tokens)
    for name in ("a", "busy"):
        pair.decode.abort(name)
    pair.settle()
    pair.close()


@pytest.mark.parametrize(("name", "is_known"), [("T", True), ("T~1", True), ("U", False)])
def test_a_retry_is_known_by_its_name(name: str, is_known: bool) -> None:
    params = Prefilled(TransferId(name), InstanceId("d"), 10, digest_of([1]), "")
    prefilled = msgspec.json.encode({"kv_transfer_params": to_params(params)})
    found = read_first_token(prefilled, TransferId("T"), is_chat=False)
    assert (found is not None) == is_known


def test_transfer_parameters_round_trip_and_nonsense_is_refused() -> None:
    params = DecodeParams(TransferId("t"), digest_of([1, 2]))
    assert from_params(to_params(params)) == params
    assert from_params(None) is None
    assert from_params({"other": 1}) is None
    for bad in ("tetri", {"tetri": 5}, {"tetri": {"type": "decode"}}):
        with pytest.raises(ProtocolError):
            from_params(bad)  # type: ignore[arg-type]


def test_notes_that_are_none_are_dropped(pair: Pair) -> None:
    endpoint = pair.decode.info.kv_endpoint
    good = encode_note(FirstTokens("t-a", PriorOutput([5])))
    huge = encode_note(FirstTokens("t-b", PriorOutput([1] * MAX_NOTE_BYTES)))
    bad = [b"", b"lost:t-a", good[:-1], huge, msgspec.msgpack.encode({"type": "first"})]
    worker = pair.prefill.kv_worker
    worker.begin_step(StepMeta(notes=[(endpoint, note) for note in [*bad, good]]))
    receives = pair.decode.endpoint.receives
    tokens = prompt(100)
    pair.receive("a", tokens, is_early=True)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert not any(name in receives.outputs for name in ("t-a", "t-b"))
    pair.decode.abort("a")
    pair.settle()


def test_a_token_that_comes_after_its_request_began_here_is_not_taken(pair: Pair) -> None:
    endpoint = pair.decode.info.kv_endpoint
    tokens = prompt(100)
    request = pair.receive("a", tokens, is_early=True)
    worker = pair.prefill.kv_worker
    worker.begin_step(StepMeta(notes=[(endpoint, encode_note(Lost("t-a")))]))
    pair.decode.run_until(lambda: request.num_output_tokens == 1)
    late = encode_note(FirstTokens("t-a", PriorOutput([5])))
    worker.begin_step(StepMeta(notes=[(endpoint, late)]))
    receives = pair.decode.endpoint.receives
    eventually(lambda: receives.tidy() or "t-a" in receives.outputs)  # before the request has ended
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    assert pair.decode.outputs["a"] == [7] * 4  # what the harness samples
    assert pair.decode.endpoint.read_load().continued == 0


def test_a_prompt_that_is_computed_again_keeps_its_blocks_until_they_are_sent(pair: Pair) -> None:
    pair.send("a", prompt(3 * CHUNK))
    pair.prefill.step()
    pair.prefill.step()
    sends = pair.prefill.endpoint.sends
    assert sends.take_freeable(WorkerReport(ended={("a", 1): 1})) == set()
    output = SimpleNamespace(preempted_req_ids=["a"], num_scheduled_tokens={})
    sends.fill(StepMeta(), output)  # what was sent belongs to an earlier attempt
    pair.prefill.step()
    pair.prefill.finish_steps()
    assert "a" in pair.prefill.finished
    assert len(sends) == 1


class Seeded(Engine):
    """All its requests have seeds: V1's runner draws once per sampled token, V2's hashes seed and
    position. The token that comes n-th on stock vLLM is n."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.draws = Counter[str]()

    def sample(self, request: Any) -> int:
        self.draws[request.request_id] += 1
        if self.cell.runner == "v1":
            return self.draws[request.request_id] - 1
        return int(request.num_computed_tokens) - request.num_prompt_tokens


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_preempted_and_aborted_requests_leave_a_right_cache_and_nothing_else(
    tmp_path: Path, seed: int
) -> None:
    """And write what they would without preemption: none has a token under way, which vLLM drops on
    instances that hand KV over, and V1's runner would draw for twice."""
    rng = Random(seed)
    # Twenty blocks, and vLLM's own admission: what is admitted grows too large.
    pool = {"num_blocks": 21, "decode_policy": "greedy"}
    engine = Seeded(tmp_path, Role.BOTH, **pool)
    scheduler, wanted, aborted = engine.scheduler, {}, set()
    for turn in range(150):
        if rng.random() < 0.2:
            wanted[f"r{turn}"] = rng.randint(1, 120)
            tokens = prompt(rng.randint(1, 90), seed=turn + 1)
            engine.add(f"r{turn}", tokens, max_tokens=wanted[f"r{turn}"])
        if rng.random() < 0.05 and scheduler.requests:
            aborted.add(name := rng.choice(list(scheduler.requests)))
            engine.abort(name)
        engine.step()
        for request in scheduler.running:
            assert engine.holds(request, min(request.num_computed_tokens, request.num_tokens))
    engine.run_until(lambda: engine.is_at_rest)
    assert engine.endpoint.read_load().preemptions > 0
    for name in wanted.keys() - aborted:
        assert engine.outputs[name] == list(range(wanted[name]))
    engine.close()
