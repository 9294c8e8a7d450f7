"""Hand-over between instances of several tensor-parallel ranks: as many on both sides, of which one
may fail alone, and different numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.engine.harness import BLOCK, LAYERS, PAGE, Engine
from tests.engine.pair import CHUNK, Pair, prompt
from tests.eventually import eventually
from vllm_tetri.engine.step import FREED, WorkerReport
from vllm_tetri.transport.native import Sender, Status, Transfer, TransferState
from vllm_tetri.types import Role

IDENTITY = {"model": "harness"}
TOKENS = prompt(3 * CHUNK)


@pytest.fixture(params=[("shm", "chunk"), ("tcp", "chunk"), ("shm", "request")])
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair of two ranks each, which push by chunk or when the prompt is done."""
    link, push = request.param
    options = {"num_ranks": 2, "link": link, "push": push, "transfer_timeout_s": 5.0}
    pair = Pair(tmp_path, arena_bytes=1 << 20, **options)
    yield pair
    pair.close()


def test_all_ranks_hand_their_part_over(ranks: Pair) -> None:
    for name in ("a", "b"):
        assert ranks.sent(name, TOKENS).decode == ranks.decode.info.id
        ranks.decoding(name, TOKENS)
        ranks.end(name)
    assert ranks.decode.endpoint.receives.loads_done == 2


def test_a_rank_that_found_the_arena_full_follows_the_other(ranks: Pair) -> None:
    receiver, prefill = ranks.decode.endpoint.receiver, ranks.prefill
    hog = Sender(identity=IDENTITY)
    size = receiver.stats().arena_total_bytes
    in_the_way = hog.open(receiver.endpoint, "in the way", 1, size)
    eventually(lambda: in_the_way.state is TransferState.SENDING)

    def make_room(rank: int) -> None:
        """Rank 1 comes only when rank 0 was refused, and then finds room."""
        if rank == 1 and prefill.kv_worker.sending and receiver.stats().arena_used_bytes == size:
            eventually(lambda: receiver.stats().refused_full)
            in_the_way.cancel()
            eventually(lambda: receiver.stats().arena_used_bytes == 0)

    prefill.before_rank = make_room
    assert ranks.sent("a", TOKENS).decode == ranks.decode.info.id
    assert receiver.stats().refused_full > 0
    ranks.decoding("a", TOKENS)
    assert ranks.decode.endpoint.receives.loads_done == 1
    hog.close()
    ranks.end("a")


@pytest.mark.parametrize("ranks", [("shm", "chunk"), ("tcp", "chunk")], indirect=True)
def test_when_a_rank_fails_all_send_again_elsewhere(ranks: Pair, tmp_path: Path) -> None:
    other = Engine(tmp_path, Role.DECODE, instance="other", num_ranks=2, arena_bytes=1 << 20)
    prefill, first = ranks.prefill, ranks.decode.endpoint.receiver
    ranks.send("a", tokens := prompt(6 * CHUNK))
    prefill.step()
    prefill.step()
    worker = prefill.workers[1].worker
    assert worker is not None
    opened = worker.sending["a"].transfer  # or the receiver sees no connection end
    eventually(lambda: first.stats().filling and opened.state is TransferState.SENDING)
    worker.close()  # its connection ends
    prefill.workers[1].worker = prefill.make_worker(1)
    sent = prefill.kv_worker.sending["a"].transfer
    eventually(lambda: sent.state is TransferState.FAILED)  # told so by the receiver
    prefill.sees(prefill, other)
    response = ranks.prefilled("a")
    assert (response.decode, response.transfer) == ("other", "t-a~1")
    prefill.run_until(lambda: prefill.is_at_rest)
    ranks.decode, decode = other, ranks.decode
    ranks.decoding("a", tokens, response.transfer)
    assert other.endpoint.receives.loads_done == 1
    ranks.end("a")
    decode.close()


def test_a_rank_that_fails_when_the_other_is_done_keeps_no_blocks(ranks: Pair) -> None:
    worker = ranks.prefill.workers[1].worker
    assert worker is not None
    collect, lost = worker.collect_sent, []

    def collect_after_a_cut() -> None:
        """The slot has arrived, and the connection ends before this rank is told so."""
        for name, sending in worker.sending.items() if not lost else ():
            if sending.transfer.state is not TransferState.DONE:
                return  # collected now, it could be done a moment later without the cut
            lost.append(name)
            sending.transfer = cast(
                Transfer,
                SimpleNamespace(
                    state=TransferState.FAILED,
                    status=Status.PEER_LOST,
                    error="cut",
                    quiesced=True,
                    cancel=lambda: None,
                ),
            )
        collect()

    worker.collect_sent = collect_after_a_cut  # type: ignore[method-assign]
    assert ranks.sent("a", TOKENS).decode == ranks.decode.info.id
    assert lost == ["a"]
    ranks.decoding("a", TOKENS)
    assert ranks.decode.endpoint.receives.loads_done == 1
    ranks.end("a")


def test_one_rank_sends_the_notes_of_all(ranks: Pair) -> None:
    sent = []
    for rank, each in enumerate(ranks.prefill.workers):
        assert each.worker is not None
        note = partial(lambda rank, *_: sent.append(rank), rank)
        each.worker.send_note = note  # type: ignore[method-assign]
    ranks.sent("a", TOKENS)
    assert sent == [0]


def test_blocks_are_freed_when_every_rank_has_sent_the_same_round(tmp_path: Path) -> None:
    pair = Pair(tmp_path, num_ranks=2, arena_bytes=1 << 20, transfer_timeout_s=5.0)
    sends, engine = pair.prefill.endpoint.sends, pair.prefill
    for worker in engine.workers:
        worker.worker.collect_sent = lambda: None  # type: ignore[method-assign, union-attr]
    pair.send("a", TOKENS)
    engine.step()
    engine.step()
    assert sends.take_freeable(WorkerReport(ended={("a", 1): 1})) == set()
    for _ in range(2):  # ranks that failed in the same round
        sends.report(WorkerReport(failed={"a": (1, "FULL", "no room")}))
    rounds: list[int] = []
    while rounds != [2] or "a" not in engine.finished:
        rounds += [each.round for each in engine.step().kv_connector_metadata.opens]
    assert sends.take_freeable(WorkerReport(ended={("a", 1): 2, ("a", FREED): 2})) == set()
    assert sends.take_freeable(WorkerReport(ended={("a", 2): 1})) == set()
    assert sends.take_freeable(WorkerReport(ended={("a", 2): 1})) == {"a"}
    pair.close()


@pytest.fixture(
    params=[(1, 2), (2, 1), (2, 4), (4, 2), (4, 1)], ids=lambda ranks: "to".join(map(str, ranks))
)
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_instances_of_other_sizes_hand_over(
    tmp_path: Path, sizes: tuple[int, int], num_heads: int
) -> None:
    pair = Pair(tmp_path, num_ranks=sizes, num_heads=num_heads, arena_bytes=1 << 20)
    for name in ("a", "b"):
        assert pair.sent(name, TOKENS).decode == pair.decode.info.id
        pair.decoding(name, TOKENS)
        pair.end(name)
    sends, receives = pair.prefill.endpoint.sends, pair.decode.endpoint.receives
    assert (receives.loads_done, receives.loads_failed) == (2, 0)
    num_blocks = len(TOKENS) // BLOCK
    assert sends.sent_bytes == 2 * num_blocks * BLOCK * PAGE * LAYERS * num_heads
    pair.close()


def test_replicas_are_not_waited_for(tmp_path: Path) -> None:
    pair = Pair(tmp_path, num_ranks=(2, 1), num_heads=1, arena_bytes=1 << 20)
    replica, sent = pair.prefill.workers[1].worker, list[str]()
    assert replica is not None
    pair.prefill.before_rank = lambda rank: sent.extend(replica.sending)
    assert pair.sent("a", TOKENS).decode == pair.decode.info.id
    pair.decoding("a", TOKENS)
    pair.end("a")
    pair.send("b", TOKENS)  # and is cancelled when its prompt is done
    pair.decode.endpoint.receiver.close()
    pair.prefilled("b")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    assert sent == []
    pair.close()


def test_a_slot_of_parts_that_cannot_be_read_is_computed_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path, num_ranks=(1, 2), num_heads=2, arena_bytes=1 << 20, knows_heads=False)
    receives = pair.decode.endpoint.receives
    pair.sent("a", TOKENS)
    pair.decoding("a", TOKENS)
    assert (receives.loads_done, receives.loads_failed) == (0, 1)
    pair.end("a")
    pair.close()
