"""Preempted requests come back from the arena with the KV that they had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.harness import BLOCK, LAYERS, PAGE, Engine
from tests.engine.pair import Pair, prompt
from vllm_tetri.engine.preempted import ARENA_SHARE, PreemptedKV
from vllm_tetri.engine.step import KVLayout, Load, Save, StepMeta, WorkerReport
from vllm_tetri.engine.worker import KVWorker
from vllm_tetri.transport.blocks import HostMover
from vllm_tetri.transport.native import Receiver, open_receiver
from vllm_tetri.types import Role, TransferId

BLOCK_BYTES = BLOCK * PAGE * LAYERS


def tight(folder: Path, **options: Any) -> Engine:
    """Twenty blocks, and vLLM's own admission: what is admitted grows too large."""
    wanted = {"decode_policy": "greedy", "arena_bytes": 1 << 20} | options
    return Engine(folder, Role.BOTH, num_blocks=21, **wanted)


def crowd(engine: Engine, *, max_tokens: int = 120) -> dict[str, Any]:
    """Three requests that together need more than the pool."""
    return {
        name: engine.add(name, prompt(75, seed), max_tokens=max_tokens)
        for name, seed in (("a", 3), ("b", 5), ("c", 7))
    }


def counts(engine: Engine) -> tuple[int, int, int, int]:
    load = engine.endpoint.read_load()
    return load.preemptions, load.swapped_out, load.swapped_in, load.preemptions_recomputed


def run_until_swapped_out(engine: Engine) -> Any:
    engine.run_until(lambda: engine.endpoint.preempted.swapped_out > 0)
    (victim,) = [each for each in engine.scheduler.waiting if each.num_preemptions]
    return victim


def finish(engine: Engine, *names: str) -> None:
    engine.run_until(lambda: all(name in engine.finished for name in names))
    engine.run_until(lambda: engine.is_at_rest)


def test_kv_of_a_preempted_request_comes_back(tmp_path: Path) -> None:
    engine = tight(tmp_path)
    requests = crowd(engine)
    victim = run_until_swapped_out(engine)
    num_tokens = victim.num_tokens
    engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache.clear()
    while victim.num_computed_tokens == 0:
        output = engine.step()
    assert output.num_scheduled_tokens[victim.request_id] == 1
    assert victim.num_computed_tokens == victim.num_tokens - 1 == num_tokens
    assert engine.holds(victim, victim.num_computed_tokens)
    finish(engine, *requests)
    assert all(len(engine.outputs[name]) == 120 for name in requests)
    preemptions, swapped_out, swapped_in, recomputed = counts(engine)
    assert preemptions == swapped_out + recomputed
    assert swapped_in == swapped_out > 0
    assert recomputed == 0
    engine.close()


def test_what_the_prefix_cache_still_holds_is_not_loaded(tmp_path: Path) -> None:
    engine = tight(tmp_path)
    request = engine.add("a", prompt(5 * BLOCK + 3), max_tokens=20)
    engine.run_until(lambda: len(engine.outputs.get("a", ())) == 5)
    engine.scheduler._preempt_request(engine.scheduler.running.pop(), 0.0)
    engine.step()
    (load,) = engine.step().kv_connector_metadata.loads
    assert (load.first_block, len(load.block_ids)) == (5, 1)
    assert engine.holds(request, request.num_computed_tokens)
    finish(engine, "a")
    assert counts(engine)[1:] == (1, 1, 0)
    engine.close()


def test_a_request_that_is_aborted_while_swapped_out_frees_its_slot(tmp_path: Path) -> None:
    engine = tight(tmp_path)
    requests = crowd(engine)
    victim = run_until_swapped_out(engine)
    assert engine.endpoint.read_load().arena_used_bytes > 0
    engine.abort(victim.request_id)
    assert engine.endpoint.read_load().arena_used_bytes == 0
    for name in requests:
        engine.abort(name)
    engine.run_until(lambda: engine.is_at_rest)
    engine.close()


def test_without_room_in_the_arena_it_is_computed_again(tmp_path: Path) -> None:
    engine = tight(tmp_path, arena_bytes=BLOCK_BYTES)
    requests = crowd(engine)
    finish(engine, *requests)
    assert all(len(engine.outputs[name]) == 120 for name in requests)
    preemptions, swapped_out, swapped_in, recomputed = counts(engine)
    assert (swapped_out, swapped_in) == (0, 0)
    assert preemptions == recomputed > 0
    engine.close()


def test_a_step_copies_no_more_than_its_budget_and_the_rest_is_computed(tmp_path: Path) -> None:
    engine = tight(tmp_path, load_budget_bytes=3 * BLOCK_BYTES)
    requests = crowd(engine)
    victim = run_until_swapped_out(engine)
    assert engine.endpoint.read_load().arena_used_bytes <= 3 * (BLOCK_BYTES + 4096)
    engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache.clear()
    while victim.num_computed_tokens == 0:
        output = engine.step()
    assert victim.num_computed_tokens - output.num_scheduled_tokens[victim.request_id] == 3 * BLOCK
    assert engine.holds(victim, victim.num_computed_tokens)
    finish(engine, *requests)
    engine.close()


def test_a_prompt_for_another_instance_is_not_kept(tmp_path: Path) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20)
    pair.send("a", prompt(200))
    pair.prefill.step()
    pair.prefill.step()
    scheduler = pair.prefill.scheduler
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    assert len(pair.prefill.endpoint.preempted) == 0
    pair.prefilled("a")
    pair.decode.endpoint.cancel(TransferId("t-a"))
    pair.close()


def test_a_reset_of_the_prefix_cache_forgets_what_was_kept(tmp_path: Path) -> None:
    """It is how weights are changed: nothing computed before may come back."""
    engine = tight(tmp_path)
    requests = crowd(engine)
    victim = run_until_swapped_out(engine)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert len(engine.endpoint.preempted) == 0
    assert engine.endpoint.read_load().arena_used_bytes == 0
    assert victim.request_id not in engine.endpoint.preempted
    finish(engine, *requests)
    engine.close()


def test_kv_that_arrived_is_kept_like_any_other(tmp_path: Path) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20)
    tokens = prompt(80)
    pair.send("a", tokens)
    pair.prefilled("a")
    request = pair.receive("a", tokens)
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    scheduler = pair.decode.scheduler
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    scheduler.kv_cache_manager.reset_prefix_cache()
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    assert len(pair.decode.outputs["a"]) == 4
    assert pair.decode.endpoint.preempted.swapped_in == 1
    assert request.num_preemptions == 1
    pair.settle()
    assert pair.decode.endpoint.receives.loads_done == 1
    pair.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_happens_the_cache_is_right_and_nothing_is_left(tmp_path: Path, seed: int) -> None:
    """Requests come, are aborted and preempted; the arena is too small for all of them."""
    rng = Random(seed)
    engine = tight(
        tmp_path, arena_bytes=24 * BLOCK_BYTES, load_budget_bytes=rng.choice([3, 64]) * BLOCK_BYTES
    )
    scheduler, requests = engine.scheduler, {}
    for turn in range(150):
        if rng.random() < 0.1:
            tokens = prompt(rng.randint(1, 90), seed=turn + 1)
            requests[f"r{turn}"] = engine.add(f"r{turn}", tokens, max_tokens=rng.randint(1, 120))
        if rng.random() < 0.05 and scheduler.requests:
            engine.abort(rng.choice(list(scheduler.requests)))
        if rng.random() < 0.1 and scheduler.running:
            scheduler._preempt_request(scheduler.running.pop(), 0.0)
        engine.step()
        for request in scheduler.running:
            assert engine.holds(request, min(request.num_computed_tokens, request.num_tokens))
    engine.run_until(lambda: not scheduler.requests)
    engine.run_until(lambda: engine.is_at_rest)
    assert len(engine.endpoint.preempted) == 0
    assert engine.endpoint.preempted.swapped_in > 0
    engine.close()


# -- the bookkeeping alone -------------------------------------------------------

NUM_RANKS = 2
SLOT_BYTES = 4096  # one block of both ranks


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = open_receiver(arena_bytes=16 * SLOT_BYTES, identity={"model": "test"})
    yield receiver
    receiver.close()


@pytest.fixture
def copies(receiver: Receiver) -> PreemptedKV:
    layout = KVLayout(BLOCK, SLOT_BYTES // NUM_RANKS, NUM_RANKS)
    return PreemptedKV(receiver, layout, arena_bytes=16 * SLOT_BYTES, budget_bytes=6 * SLOT_BYTES)


def running(name: str, num_computed: int, num_tokens: int | None = None, **more: Any) -> Any:
    """What a request looks like to `PreemptedKV`."""
    return SimpleNamespace(
        request_id=name,
        num_computed_tokens=num_computed,
        num_tokens=num_tokens if num_tokens is not None else num_computed + 1,
        **{"skip_reading_prefix_cache": False} | more,
    )


def ids(count: int) -> list[int]:
    return list(range(1, count + 1))


def save(copies: PreemptedKV, *names: str) -> list[Save]:
    saves = copies.take_saves()
    for order in saves:
        copies.report(WorkerReport(saved={order.slot: NUM_RANKS}))
    return saves


def test_every_rank_must_have_saved_and_loaded(copies: PreemptedKV, receiver: Receiver) -> None:
    request = running("a", 40)
    copies.save(request, ids(3))
    (order,) = copies.take_saves()
    assert order.rank_bytes == 3 * SLOT_BYTES // NUM_RANKS
    assert copies.match(request, 0) is None
    copies.report(WorkerReport(saved={order.slot: 1}))
    assert copies.match(request, 0) is None
    copies.report(WorkerReport(saved={order.slot: 1}))
    assert copies.match(request, 16) == 24
    copies.admitted(request, ids(3), 24)
    (load,) = copies.take_loads()
    assert (load.first_block, list(load.block_ids)) == (1, [2, 3])
    assert copies.match(request, 16) is None
    copies.report(WorkerReport(restored={order.slot: 1}))
    assert receiver.stats().slots == 1
    copies.report(WorkerReport(restored={order.slot: 1}))
    assert receiver.stats().slots == 0
    assert "a" not in copies
    assert (copies.swapped_out, copies.swapped_in, copies.recomputed) == (1, 1, 0)


def test_a_rank_that_could_not_save_makes_it_computed_again(
    copies: PreemptedKV, receiver: Receiver
) -> None:
    request = running("a", 40)
    copies.save(request, ids(3))
    (order,) = copies.take_saves()
    copies.report(WorkerReport(saved={order.slot: 1}))
    copies.report(WorkerReport(unsaved={order.slot: 1}))
    assert "a" not in copies
    assert receiver.stats().slots == 0
    assert (copies.swapped_in, copies.recomputed) == (0, 1)


def test_a_slot_that_workers_are_at_is_freed_after_them(
    copies: PreemptedKV, receiver: Receiver
) -> None:
    request = running("a", 40)
    copies.save(request, ids(3))
    copies.forget(request)
    assert receiver.stats().slots == 1
    (order,) = save(copies)
    assert receiver.stats().slots == 0
    copies.save(request, ids(3))
    (order,) = save(copies)
    copies.admitted(request, ids(3), 40)
    copies.forget(request)
    assert receiver.stats().slots == 1
    copies.report(WorkerReport(restored={order.slot: NUM_RANKS}))
    assert receiver.stats().slots == 0
    assert len(copies) == 0


def test_preempted_again_before_its_load_is_known_to_be_done(
    copies: PreemptedKV, receiver: Receiver
) -> None:
    request = running("a", 40)
    copies.save(request, ids(3))
    (first,) = save(copies)
    copies.admitted(request, ids(3), 40)
    request.num_computed_tokens, request.num_tokens = 41, 42
    copies.save(request, ids(3))
    assert receiver.stats().slots == 2
    (second,) = save(copies)
    assert first.slot != second.slot
    copies.report(WorkerReport(restored={first.slot: NUM_RANKS}))
    assert receiver.stats().slots == 1
    assert copies.match(request, 0) == 41
    assert (copies.swapped_out, copies.swapped_in) == (2, 1)


def test_only_a_share_of_the_arena_is_taken(copies: PreemptedKV, receiver: Receiver) -> None:
    for name in "abcde":
        copies.save(running(name, 4 * BLOCK), ids(4))
        save(copies)
    assert receiver.stats().arena_used_bytes <= ARENA_SHARE * 16 * SLOT_BYTES
    assert copies.swapped_out == 2
    assert copies.recomputed == 3


def test_a_step_saves_no_more_than_its_budget(copies: PreemptedKV) -> None:
    copies.save(running("a", 4 * BLOCK), ids(4))
    copies.save(running("b", 4 * BLOCK), ids(4))
    copies.save(running("c", 4 * BLOCK), ids(4))
    assert [len(order.block_ids) for order in copies.take_saves()] == [4, 2]
    assert copies.recomputed == 1


def test_arrivals_come_first_where_the_arena_is_full(
    copies: PreemptedKV, receiver: Receiver
) -> None:
    assert receiver.claim("arrived", 15, SLOT_BYTES)
    copies.save(running("a", 40), ids(3))
    assert copies.recomputed == 1
    copies.save(running("b", 10), ids(1))
    assert copies.swapped_out == 1


@pytest.mark.parametrize(
    ("num_computed", "num_tokens", "loaded"),
    [
        (40, 41, 40),  # between two steps
        (41, 41, 40),  # its last token is still being computed, the next one unknown
        (48, 48, 47),
        (30, 100, 30),  # in the middle of a prompt
    ],
)
def test_what_comes_back_is_what_is_known(
    copies: PreemptedKV, num_computed: int, num_tokens: int, loaded: int
) -> None:
    request = running("a", num_computed, num_tokens)
    copies.save(request, ids(8))
    save(copies)
    assert copies.match(request, 0) == loaded
    assert copies.match(request, 2 * BLOCK) == max(0, loaded - 2 * BLOCK)


def test_nothing_is_kept_that_vllm_would_not_load(copies: PreemptedKV) -> None:
    copies.save(running("a", 40, skip_reading_prefix_cache=True), ids(3))
    copies.save(running("b", 0, 40), [])
    assert (len(copies), copies.recomputed) == (0, 2)


def test_every_rank_fills_its_part_of_a_slot(receiver: Receiver) -> None:
    num_blocks, page = 6, 256
    caches = [
        [torch.randint(0, 256, (num_blocks, page), dtype=torch.uint8) for _ in range(2)]
        for _ in range(NUM_RANKS)
    ]
    kept = [[layer.clone() for layer in cache] for cache in caches]
    config = SimpleNamespace(link="auto", streams=1, transfer_timeout_s=5.0, secret_file="")
    workers = [
        KVWorker(
            config=config,  # type: ignore[arg-type]
            identity={"model": "test"},
            mover=HostMover(cache, num_blocks),
            rank=rank,
            num_ranks=NUM_RANKS,
        )
        for rank, cache in enumerate(caches)
    ]
    block_ids = np.asarray([4, 0, 5], dtype=np.int32)
    slot = receiver.claim("copies", len(block_ids), 2 * page, NUM_RANKS)
    assert slot is not None
    place = {"segment": receiver.segment, "offset": slot.offset, "rank_bytes": slot.rank_bytes}
    for worker, cache in zip(workers, caches, strict=True):
        worker.save_preempted(StepMeta(saves=[Save(slot="copies", block_ids=block_ids, **place)]))
        for layer in cache:
            layer.zero_()
    reports = [worker.take_report() for worker in workers]
    assert reports[0] is not None
    assert reports[1] is not None
    assert reports[0].aggregate(reports[1]).saved == {"copies": NUM_RANKS}
    back = np.asarray([1, 2], dtype=np.int32)
    load = Load(
        request_id="a",
        first_block=1,
        block_ids=back,
        is_background=False,
        preempted="copies",
        **place,
    )
    for worker, cache, was in zip(workers, caches, kept, strict=True):
        worker.load(StepMeta(loads=[load]))
        assert worker.take_report() == WorkerReport(restored={"copies": 1})
        for layer, before in zip(cache, was, strict=True):
            assert torch.equal(layer[[1, 2]], before[[0, 5]])
            assert not layer[[0, 3, 4, 5]].any()
        worker.close()


def test_a_copy_that_fails_is_reported(receiver: Receiver) -> None:
    cache = [torch.zeros((4, 256), dtype=torch.uint8)]
    worker = KVWorker(
        config=SimpleNamespace(link="auto", streams=1, transfer_timeout_s=5.0, secret_file=""),  # type: ignore[arg-type]
        identity={"model": "test"},
        mover=HostMover(cache, 4),
        rank=0,
        num_ranks=1,
    )
    gone = np.asarray([9], dtype=np.int32)
    for segment in (receiver.segment, "/dev/shm/nothing"):
        order = Save(slot="s", segment=segment, offset=1 << 20, rank_bytes=256, block_ids=gone)
        worker.save_preempted(StepMeta(saves=[order]))
        assert worker.take_report() == WorkerReport(unsaved={"s": 1})
    worker.close()
