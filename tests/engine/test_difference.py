"""Only the KV that a decode instance does not hold travels, and what it holds is kept meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests.engine.harness import BLOCK, FULL, IDENTITY, LAYERS, PAGE, WINDOW, Engine, told_by
from tests.engine.pair import CHUNK, Pair, prompt
from tests.eventually import eventually
from vllm_tetri.engine.blocks import Pins, PromptBlocks
from vllm_tetri.engine.step import WorkerReport
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import KEY, PrefillParams, PriorOutput, from_params, to_params
from vllm_tetri.messages import CancelTransfer
from vllm_tetri.policy.step_cost import HandoverFit
from vllm_tetri.transport.native import Sender, TransferState
from vllm_tetri.types import InstanceId, RequestId, Role, TransferId

OPTIONS: dict[str, Any] = {"arena_bytes": 1 << 20, "transfer_timeout_s": 5.0}
FIRST = prompt(5 * BLOCK + 7)  # the first turn of a conversation
SECOND = [*FIRST, 7, 7, 7, 7, *prompt(60, seed=11)]
HELD = 5 * BLOCK  # of it after the first turn
NEW_BLOCKS = 5
# Options of an instance, bytes of one block, blocks of the second turn that are new.
KINDS: dict[str, tuple[dict[str, Any], int, int]] = {
    "full": ({}, 1, NEW_BLOCKS),
    "window": ({"specs": (FULL, WINDOW)}, 1, NEW_BLOCKS + 3),
    "two ranks": ({"num_ranks": 2}, 2, NEW_BLOCKS),
    "one to two": ({"num_ranks": (1, 2), "num_heads": 2}, 2, NEW_BLOCKS),
    "replicas": ({"num_ranks": 2, "num_heads": 1}, 1, NEW_BLOCKS),  # of latents (MLA)
    "by request": ({"push": "request"}, 1, NEW_BLOCKS),
    "by layer": ({"push": "layer"}, 1, NEW_BLOCKS),
    "background": ({"specs": (FULL, FULL)}, 1, 2 * NEW_BLOCKS),
}


@contextmanager
def talking(folder: Path, **options: Any) -> Iterator[Pair]:
    """The decode instance has served the first turn."""
    pair = Pair(folder, **OPTIONS | options)
    pair.sent("first", FIRST)
    pair.decoding("first", FIRST)
    pair.end("first")
    yield pair
    pair.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with talking(tmp_path) as pair:
        yield pair


@pytest.fixture
def early(pair: Pair) -> Any:
    """The decode request of the second turn, before its KV."""
    request = pair.receive("a", SECOND, held_tokens=HELD, is_early=True)
    assert pair.decode.load().blocks_used == NEW_BLOCKS
    return request


# -- what travels ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_missing_is_sent(tmp_path: Path, kind: str) -> None:
    options, num_heads, num_new = KINDS[kind]
    with talking(tmp_path, **options) as pair:
        sends, receives = pair.prefill.endpoint.sends, pair.decode.endpoint.receives
        before, block_bytes = sends.sent_bytes, BLOCK * PAGE * LAYERS * num_heads
        told = told_by(pair.prefill)
        assert pair.sent("a", SECOND, held=HELD + 3).held_tokens == HELD
        assert [each.ending.held_tokens for each in told if each.ending] == [HELD]
        slot = pair.decode.endpoint.receiver.find("t-a")
        assert slot is not None
        assert slot.num_blocks == num_new
        assert sends.sent_bytes - before == num_new * block_bytes
        kept_blocks = HELD // BLOCK * (2 if kind == "background" else 1)
        assert pair.prefill.load().kv_bytes_kept == kept_blocks * block_bytes
        pair.decoding("a", SECOND, held_tokens=HELD)
        pair.end("a")
        assert (receives.loads_done, pair.decode.load().kv_gone) == (2, 0)
        assert pair.decode.computed["a"] == len(pair.decode.outputs["a"]) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_hint_did_not_know_of_is_not_loaded(tmp_path: Path, kind: str) -> None:
    with talking(tmp_path, **KINDS[kind][0]) as pair:
        assert pair.sent("a", SECOND, held=2 * BLOCK).held_tokens == 2 * BLOCK
        before = pair.decode.load().kv_bytes_received
        pair.decoding("a", SECOND, held_tokens=2 * BLOCK)
        pair.end("a")
        share = KINDS[kind][2] * LAYERS * BLOCK * pair.decode.caches[0][0][0].numel() // BLOCK
        received = pair.decode.load().kv_bytes_received - before
        assert received == share * len(pair.decode.workers)
        assert pair.decode.load().kv_gone == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [HELD + BLOCK, 1 << 40])
def test_a_hint_that_is_too_high_costs_a_computation(tmp_path: Path, kind: str, held: int) -> None:
    with talking(tmp_path, **KINDS[kind][0]) as pair:
        held_tokens = min(held, (len(SECOND) - 1) // BLOCK * BLOCK)
        assert pair.sent("a", SECOND, held=held).held_tokens == held_tokens
        pair.decoding("a", SECOND, held_tokens=held_tokens)
        pair.end("a")
        assert pair.decode.computed["a"] == len(SECOND) - HELD + 3
        seen = pair.decode.load()
        assert (seen.kv_gone, seen.kv_loads_failed) == (1, 0)


@pytest.mark.parametrize("num_tokens", [1, BLOCK, BLOCK + 1, 4 * BLOCK])
def test_of_a_prompt_that_is_held_as_a_whole_the_last_block_is_sent(
    pair: Pair, num_tokens: int
) -> None:
    tokens = FIRST[:num_tokens]
    response = pair.sent("a", tokens, held=num_tokens)
    assert response.held_tokens == (num_tokens - 1) // BLOCK * BLOCK
    both = [  # choices of a request, as one that is asked again for its first token
        pair.receive(name, tokens, TransferId("t-a"), held_tokens=response.held_tokens, **options)
        for name, options in (("a", {}), ("b", {"prior_output": PriorOutput([7])}))
    ]
    pair.decode.run_until(lambda: {"a", "b"} <= pair.decode.outputs.keys())
    assert all(pair.decode.holds(each, num_tokens) for each in both)
    pair.end("a")
    assert pair.decode.load().kv_gone == 0


@pytest.mark.parametrize("held", [{"d": -1}, {f"d{each}": 1 for each in range(17)}, {"d": "all"}])
def test_hints_are_bounded(held: dict[str, Any]) -> None:
    params = {"type": "prefill", "transfer": "t", "request": "r", "held": held}
    with pytest.raises(ProtocolError, match="held"):
        from_params({KEY: params})


def test_the_delay_of_a_hand_over_is_that_of_what_was_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[int] = []
    monkeypatch.setattr(HandoverFit, "learn", lambda _, tokens, seconds: learnt.append(tokens))
    pair.prefill.scheduler.reset_prefix_cache()  # so the last chunk has more tokens
    pair.sent("a", FIRST, held=HELD)
    assert learnt == [len(FIRST) - HELD]
    pair.decode.endpoint.take(CancelTransfer(TransferId("t-a")))


def test_drafters_take_back_the_last_block_of_a_hit(pair: Pair) -> None:
    manager = pair.decode.scheduler.kv_cache_manager
    manager.use_eagle = True
    assert PromptBlocks(manager).hit_tokens(len(SECOND), HELD) == HELD - BLOCK
    assert PromptBlocks(manager).hit_tokens(len(SECOND), BLOCK - 1) == 0


def test_a_prompt_that_reads_no_cache_is_sent_as_a_whole(pair: Pair) -> None:
    pair.send("a", SECOND, held=HELD)
    pair.prefill.scheduler.requests["a"].skip_reading_prefix_cache = True
    assert pair.prefilled("a").held_tokens == 0
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decoding("a", SECOND)
    pair.end("a")


# -- what can go wrong ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_all", [False, True])
def test_a_prefix_that_is_evicted_on_the_way_is_computed(
    tmp_path: Path, kind: str, is_all: bool
) -> None:
    with talking(tmp_path, **KINDS[kind][0]) as pair:
        pair.sent("a", SECOND, held=HELD)
        cache = pair.decode.scheduler.kv_cache_manager
        probe = pair.decode.add("probe", SECOND)
        groups = cache.get_computed_blocks(probe)[0].blocks
        pair.decode.abort("probe")
        cache.evict_blocks({each[0 if is_all else -1].block_id for each in groups})
        pair.decoding("a", SECOND, held_tokens=HELD)
        pair.end("a")
        assert pair.decode.computed["a"] >= len(SECOND) - HELD + BLOCK
        assert (pair.decode.load().kv_gone, pair.decode.load().kv_loads_failed) == (1, 0)


def test_an_instance_without_a_prefix_cache_computes(tmp_path: Path) -> None:
    with talking(tmp_path, decode={"args": {"enable_prefix_caching": False}}) as pair:
        pair.sent("a", SECOND, held=HELD)
        pair.decoding("a", SECOND, held_tokens=HELD)
        pair.end("a")
        assert (pair.decode.load().kv_gone, pair.decode.computed["a"]) == (1, len(SECOND) + 3)


@pytest.mark.parametrize("held_tokens", [0, HELD - BLOCK, HELD + BLOCK, 1 << 40])
def test_a_slot_that_begins_elsewhere_is_not_loaded(pair: Pair, held_tokens: int) -> None:
    pair.sent("a", SECOND, held=HELD)
    pair.decoding("a", SECOND, held_tokens=held_tokens)
    pair.end("a")
    assert pair.decode.load().kv_loads_failed == 1
    assert pair.decode.endpoint.receives.loads_done == 1


def test_a_full_arena_is_asked_for_the_difference_again(pair: Pair) -> None:
    receiver, hog = pair.decode.endpoint.receiver, Sender(identity=IDENTITY)
    size = receiver.stats().arena_total_bytes
    in_the_way = hog.open(receiver.endpoint, "in the way", 1, size)
    eventually(lambda: in_the_way.state is TransferState.SENDING)
    pair.send("a", SECOND, held=HELD)
    pair.prefill.run_until(lambda: receiver.stats().refused_full > 0)
    in_the_way.cancel()
    response = pair.prefilled("a")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    assert response.held_tokens == HELD
    pair.decoding("a", SECOND, held_tokens=HELD)
    assert pair.decode.endpoint.receives.loads_done == 2
    hog.close()
    pair.end("a")


def test_another_instance_gets_what_it_does_not_hold(pair: Pair, tmp_path: Path) -> None:
    other = Engine(tmp_path, Role.DECODE, instance="other", **OPTIONS)
    prefill = pair.prefill
    held = {pair.decode.info.id: HELD, InstanceId("other"): BLOCK}
    params = PrefillParams(TransferId("t-a"), RequestId("a"), held=held)
    tokens = [*SECOND, *prompt(3 * CHUNK, seed=13)]
    prefill.add("a", tokens, params=to_params(params))
    for _ in range(2):
        prefill.step()
    prefill.endpoint.sends.report(WorkerReport(failed={"a": (1, "PEER_LOST", "cut")}))
    prefill.sees(prefill, other)
    response = pair.prefilled("a")
    assert (response.decode, response.held_tokens) == ("other", BLOCK)
    prefill.run_until(lambda: prefill.is_at_rest)
    pair.decode, decode = other, pair.decode
    other.add("own", tokens[: BLOCK + 1])
    other.run_until(lambda: "own" in other.finished)
    pair.decoding("a", tokens, response.transfer, held_tokens=BLOCK)
    assert (other.endpoint.receives.loads_done, other.load().kv_gone) == (1, 0)
    pair.end("a")
    decode.close()


def test_a_preempted_prompt_is_sent_from_the_same_token(pair: Pair) -> None:
    tokens = [*SECOND, *prompt(3 * CHUNK, seed=13)]
    pair.send("a", tokens, held=HELD)
    for _ in range(3):
        pair.prefill.step()
    pair.prefill.finish_steps()
    scheduler = pair.prefill.scheduler
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    response = pair.prefilled("a")
    pair.prefill.run_until(lambda: pair.prefill.is_at_rest)
    pair.decoding("a", tokens, response.transfer, held_tokens=response.held_tokens)
    assert (response.held_tokens, pair.decode.load().kv_gone) == (HELD, 0)
    pair.end("a")


@pytest.mark.parametrize("state", ["waiting", "taken", "loading", "running", "preempted"])
def test_an_abort_leaves_nothing(tmp_path: Path, state: str) -> None:
    budget = {"load_budget_bytes": 1} if state == "loading" else {}
    with talking(tmp_path, **budget) as pair:
        decode, receives = pair.decode, pair.decode.endpoint.receives
        decode.add("busy", prompt(20, seed=77), max_tokens=300)
        decode.run_until(lambda: "busy" in decode.outputs)
        if state != "waiting":
            pair.sent("a", SECOND, held=HELD)
        request = pair.receive("a", SECOND, held_tokens=HELD)
        used = decode.load().blocks_used
        if state == "taken":
            receives.pin_arrived(decode.scheduler.requests)
            assert receives.is_here("a")
        elif state == "loading":
            decode.run_until(lambda: decode.scheduler.kv_holding_waiting)
        elif state != "waiting":
            decode.run_until(lambda: "a" in decode.outputs)
        if state == "preempted":
            decode.finish_steps()
            scheduler = decode.scheduler
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            decode.run_until(lambda: request.num_output_tokens > 1)
        assert used >= NEW_BLOCKS
        for name in ("a", "busy"):
            decode.abort(name)
        decode.endpoint.take(CancelTransfer(TransferId("t-a")))
        pair.settle()


# -- pins ----------------------------------------------------------------------------


def serve_others(engine: Engine, count: int, num_tokens: int) -> None:
    for number in range(count):
        name = f"other-{number}"
        engine.add(name, prompt(num_tokens, seed=20 + number))
        engine.run_until(lambda name=name: name in engine.finished)


def test_what_waits_for_its_difference_is_not_evicted(pair: Pair, early: Any) -> None:
    serve_others(pair.decode, 12, 8 * BLOCK)  # more than all blocks
    assert pair.sent("a", SECOND, held=HELD).held_tokens == HELD
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert pair.decode.holds(early, len(SECOND))
    pair.end("a")
    assert (pair.decode.load().kv_gone, pair.decode.endpoint.receives.loads_done) == (0, 2)


@pytest.mark.parametrize(
    "decode",
    [
        {"decode_policy": "greedy"},
        {"decode_policy": "reserve-dynamic"},
        {"prefill_policy": "srtf"},  # which asks vLLM only where it expects room
    ],
)
def test_pins_stand_in_no_prompts_way(tmp_path: Path, decode: dict[str, str]) -> None:
    with talking(tmp_path, decode=decode, transfer_timeout_s=100.0) as pair:
        request = pair.receive("a", SECOND, held_tokens=HELD, is_early=True)
        serve_others(pair.decode, 1, 61 * BLOCK)  # of 63 blocks
        assert pair.decode.load().blocks_used == 0
        pair.sent("a", SECOND, held=HELD)
        pair.decode.run_until(lambda: "a" in pair.decode.outputs)
        assert pair.decode.holds(request, len(SECOND))
        pair.end("a")
        assert pair.decode.load().kv_gone == 1


def test_nothing_that_runs_is_preempted_for_pins(pair: Pair) -> None:
    decode = pair.decode
    decode.add("long", prompt(50 * BLOCK, seed=9), max_tokens=11 * BLOCK)
    decode.run_until(lambda: "long" in decode.outputs)
    pair.receive("a", SECOND, held_tokens=HELD, is_early=True)
    decode.run_until(lambda: "long" in decode.finished)
    assert decode.load().preemptions == 0
    decode.abort("a")
    pair.settle()


def test_what_is_loaded_starts_although_pins_have_the_rest(tmp_path: Path) -> None:
    with talking(tmp_path, **KINDS["background"][0], transfer_timeout_s=100.0) as pair:
        tokens = prompt(26 * BLOCK + 1, seed=9)  # 52 of 63 blocks, and 2 for the last token
        pair.sent("b", tokens)
        request = pair.receive("b", tokens)
        pair.decode.run_until(lambda: pair.decode.scheduler.kv_holding_waiting)
        pair.receive("a", SECOND, held_tokens=HELD, is_early=True)
        assert pair.decode.load().blocks_used == 62
        pair.decode.run_until(lambda: "b" in pair.decode.outputs)
        assert pair.decode.holds(request, len(tokens))
        pair.decode.abort("a")
        pair.end("b")


@pytest.mark.usefixtures("early")
def test_pins_do_not_hinder_a_reset(pair: Pair) -> None:
    assert pair.decode.scheduler.reset_prefix_cache()
    assert pair.decode.load().blocks_used == 0
    pair.decode.abort("a")
    pair.settle()


class Pool:
    """A prefix cache with pins, beside a model of what must not be evicted."""

    def __init__(self, seed: int, hasher: Any) -> None:
        groups = [KVCacheGroupSpec([f"layer{i}"], each) for i, each in enumerate((FULL, WINDOW))]
        config = KVCacheConfig(num_blocks=48, kv_cache_tensors=[], kv_cache_groups=groups)
        self.cache, self.hasher = KVCacheManager(config, 1024, 16, BLOCK), hasher
        self.pins, self.rng = Pins(self.cache, PromptBlocks(self.cache)), Random(seed)
        self.waiting, self.running = dict[str, Request](), dict[str, Request]()
        self.pinned: dict[str, dict[int, Any]] = {}  # by request: hashes by block
        self.num_pinned = 0  # ever

    def arrive(self) -> None:
        name, rng = f"{self.rng.random()}", self.rng
        shared = prompt(BLOCK * rng.randint(0, 12), seed=rng.randint(1, 3))
        tokens = shared + prompt(rng.randint(1, 40), seed=rng.randint(50, 90))
        sampling = SamplingParams(max_tokens=1)
        request = Request(name, tokens, sampling, None, block_hasher=self.hasher)
        self.waiting[name] = request
        if rng.random() < 0.7:
            self.pins.hold(request)
            groups = self.cache.get_computed_blocks(request)[0].blocks
            blocks = [each for group in groups for each in group if not each.is_null]
            self.pinned[name] = {each.block_id: each.block_hash for each in blocks}
            self.num_pinned += len(blocks)

    def run(self) -> None:
        """Let a request in, if there is room; without, the pins go at the end of the step."""
        name, request = self.rng.choice(list(self.waiting.items()))
        if 2 * len(self.running) > self.cache.block_pool.get_num_free_blocks():
            self.pinned.clear()
        self.pins.leave_room(self.running.values())
        found, num_tokens, *_ = self.cache.get_computed_blocks(request)
        self.pins.ask(name)
        new_tokens = request.num_tokens - num_tokens
        if self.cache.allocate_slots(request, new_tokens, num_tokens, found) is None:
            self.pinned.clear()
        else:
            request.num_computed_tokens = request.num_tokens
            self.running[name] = request
            self.leave(name)
        self.pins.end_step()

    def leave(self, name: str) -> None:
        del self.waiting[name]
        self.pins.release(name)
        self.pinned.pop(name, None)

    def check(self) -> None:
        pool = self.cache.block_pool
        free = {each.block_id for each in pool.free_block_queue.get_all_free_blocks()}
        pinned = {each: known for hashes in self.pinned.values() for each, known in hashes.items()}
        assert {each: pool.blocks[each].block_hash for each in pinned} == pinned
        ids = [each for name in self.running for each in self.cache.get_block_ids(name)]
        used = {*pinned, *(each for group in ids for each in group)} - {0}
        assert not free & used
        assert len(free) == 47 - len(used)


def test_pinned_blocks_that_others_gave_back_count(pair: Pair) -> None:
    hasher, size = pair.decode.hasher, 8 * BLOCK
    pool = Pool(0, hasher)
    running, waiting = (
        Request(name, prompt(size + 1), SamplingParams(max_tokens=1), None, block_hasher=hasher)
        for name in "rw"
    )
    pool.cache.allocate_slots(running, size + 1)
    running.num_computed_tokens = size + 1
    pool.pins.hold(waiting)
    assert pool.pins.num_blocks < 8
    pool.cache.free(running)
    eventually(lambda: pool.pins.num_blocks == 8)


@pytest.mark.parametrize("seed", range(3))
def test_pins_against_a_model(pair: Pair, seed: int) -> None:
    pool = Pool(seed, pair.decode.hasher)
    for _ in range(1_500):
        action = pool.rng.choice(("arrive", "arrive", "run", "run", "end", "leave"))
        if action == "arrive" and len(pool.waiting) < 8:
            pool.arrive()
        elif action == "run" and pool.waiting:
            pool.run()
        elif action == "end" and pool.running:
            pool.cache.free(pool.running.pop(pool.rng.choice(list(pool.running))))
        elif action == "leave" and pool.waiting:
            pool.leave(pool.rng.choice(list(pool.waiting)))
        pool.check()
    for request in pool.running.values():
        pool.cache.free(request)
    pool.pins.release_all()
    assert pool.cache.block_pool.get_num_free_blocks() == 47
    assert pool.num_pinned > 1_000


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_turns_is_right_and_ends_at_rest(tmp_path: Path, seed: int) -> None:
    """Conversations grow on a decode instance too small for all, with hints that may lie."""
    rng, turns = Random(seed), [prompt(30, seed=each) for each in range(1, 5)]
    pair = Pair(tmp_path, **OPTIONS, num_blocks=96, decode={"num_blocks": 48})
    decode = pair.decode
    for number in range(40):
        name, which = f"{number}", rng.randrange(4)
        turns[which] = tokens = (turns[which] + prompt(rng.randint(1, 60), number + 9))[:400]
        held = rng.choice((0, len(tokens), rng.randrange(len(tokens))))
        left_out = decode.scheduler.blocks.hit_tokens(len(tokens), held)
        options = {"held_tokens": left_out, "max_tokens": rng.randint(2, 9)}
        request = pair.receive(name, tokens, **options) if rng.random() < 0.5 else None
        if rng.random() < 0.3:
            serve_others(decode, 1, rng.randint(1, 40 * BLOCK))
            del decode.finished["other-0"]
        pair.sent(name, tokens, held=held)
        request = request or pair.receive(name, tokens, **options)
        if rng.random() < 0.2:
            decode.abort(name)
            decode.endpoint.take(CancelTransfer(TransferId(f"t-{name}")))
        else:
            decode.run_until(lambda name=name: name in decode.outputs)
            assert decode.holds(request, len(tokens))
        if rng.random() < 0.5:
            pair.settle()
    pair.settle()
    seen = decode.load()
    assert min(seen.kv_gone, seen.kv_bytes_received, pair.prefill.load().kv_bytes_kept) > 0
    pair.close()
