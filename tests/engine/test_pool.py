"""Blocks that the prefix cache has no room for live on in host memory, and come back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

from tests.engine.harness import BLOCK, CHUNKS, FULL, LAYERS, PAGE, WINDOW, Engine
from tests.engine.pair import Pair, prompt
from vllm_tetri.config import decode_config
from vllm_tetri.engine.pool import pool_places
from vllm_tetri.engine.step import KVLayout, StepMeta, WorkerReport
from vllm_tetri.errors import ConfigError
from vllm_tetri.messages import TransferLost
from vllm_tetri.transport import segments
from vllm_tetri.transport.shards import Shards
from vllm_tetri.types import Role, TransferId

BLOCK_BYTES = BLOCK * PAGE * LAYERS
FIRST = prompt(8 * BLOCK + 5)
SECOND = [*FIRST, 7, 7, 7, 7, *prompt(40, seed=11)]


MIXED = {"windows": (FULL, WINDOW), "all windows": (WINDOW,), "chunks": (FULL, CHUNKS, WINDOW)}


def size(num_blocks: int, num_ranks: int = 1) -> str:
    return str(num_blocks * num_ranks * BLOCK_BYTES)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A prefix cache of 32 blocks, and a pool of twice as many."""
    made = Engine(tmp_path, Role.BOTH, num_blocks=33, kv_pool=size(64))
    yield made
    made.close()


def fail(*_: Any) -> None:
    raise ValueError("no such row")


def serve(engine: Engine, name: str, tokens: list[int], max_tokens: int = 4) -> int:
    """Return how many prompt tokens were computed for a request, whose KV was right."""
    request = engine.add(name, tokens, max_tokens=max_tokens)
    engine.run_until(lambda: name in engine.outputs)
    assert engine.holds(request, len(tokens))
    engine.run_until(lambda: name in engine.finished)
    return engine.computed[name] - len(engine.outputs[name]) + 1


def push_out(engine: Engine, count: int = 5, blocks: int = 7) -> None:
    """Serve others, until nothing else is left in the prefix cache."""
    for number in range(count):
        name = f"other-{len(engine.finished)}"
        serve(engine, name, [number, *prompt(blocks * BLOCK, seed=len(engine.finished))])


KINDS: dict[str, dict[str, Any]] = {
    "host": {},
    "two ranks": {"num_ranks": 2, "kv_pool": size(64, 2)},
    "replicas": {"num_ranks": 2, "num_heads": 1, "kv_pool": size(64, 2)},
    "in the background": {"load_budget_bytes": 1},
    "file": {},
    "device": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_evicted_prefix_comes_back(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "on_device", kind == "device")
    folder = tmp_path / "pool"
    folder.mkdir()
    pool = size(64) + (f":{folder}" if kind == "file" else "")
    engine = Engine(tmp_path, Role.BOTH, **{"num_blocks": 33, "kv_pool": pool} | KINDS[kind])
    assert serve(engine, "a", FIRST) == len(FIRST)
    push_out(engine)
    if kind == "in the background":
        engine.add("busy", prompt(20, seed=77), max_tokens=200)
        engine.run_until(lambda: "busy" in engine.outputs)
    assert serve(engine, "b", SECOND) == len(SECOND) - 8 * BLOCK
    seen, num_ranks = engine.load(), len(engine.workers)
    stats = engine.counted["b"]
    assert (stats.num_cached_tokens, stats.num_local_cached_tokens) == (8 * BLOCK, 0)
    assert (seen.kv_pool_hit_tokens, seen.kv_pool_total_blocks) == (8 * BLOCK, 64)
    heads = 1 if kind == "replicas" else num_ranks
    assert seen.kv_pool_bytes_loaded == 8 * BLOCK_BYTES * heads
    assert seen.kv_pool_bytes_saved >= 8 * BLOCK_BYTES * heads
    assert seen.kv_bytes_received == 0  # that is what other instances sent
    assert list(folder.iterdir()) == []  # a file has no name, so it goes with its process
    engine.abort("busy")
    engine.run_until(lambda: engine.is_at_rest)
    engine.close()


def test_what_is_left_of_a_prefix_and_what_the_pool_has_go_together(engine: Engine) -> None:
    serve(engine, "a", FIRST)
    serve(engine, "x", [1, *prompt(27 * BLOCK, seed=5)])  # all but the first blocks go
    assert serve(engine, "b", SECOND) == len(SECOND) - 8 * BLOCK
    stats = engine.counted["b"]
    assert 0 < stats.num_local_cached_tokens < stats.num_cached_tokens == 8 * BLOCK
    # What is in both is not copied again when it leaves the prefix cache.
    push_out(engine, 10)
    before = engine.load().kv_pool_bytes_saved
    serve(engine, "c", SECOND[: 8 * BLOCK + 1])
    push_out(engine, 1)
    hits = engine.load().kv_pool_hit_tokens
    assert serve(engine, "d", FIRST) == 5
    assert engine.load().kv_pool_hit_tokens >= hits
    assert engine.load().kv_pool_bytes_saved - before < 20 * BLOCK_BYTES


@pytest.mark.parametrize("left", [0, 1, 3, 6, 8, 11])
@pytest.mark.parametrize("kind", MIXED)
def test_layers_with_windows_come_back(tmp_path: Path, kind: str, left: int) -> None:
    """What requests since then left of a prefix in the cache of the device goes with it, also where
    the cache alone has no hit, as layers lack other blocks of it each."""
    specs = MIXED[kind]
    engine = Engine(tmp_path, Role.BOTH, specs=specs, num_blocks=49, kv_pool=size(600))
    serve(engine, "a", FIRST)
    push_out(engine, 12 - left, 3)
    assert serve(engine, "b", SECOND) == len(SECOND) - 8 * BLOCK
    push_out(engine, 12)
    assert serve(engine, "c", SECOND) < BLOCK + 5
    assert engine.load().kv_pool_hit_tokens > 8 * BLOCK
    engine.run_until(lambda: engine.is_at_rest)
    assert engine.endpoint.pool.index.num_pinned == 0
    engine.close()


def test_a_long_prompt_finds_its_short_beginning(engine: Engine) -> None:
    serve(engine, "a", FIRST)
    push_out(engine)
    request = engine.add("long", [*FIRST[: 8 * BLOCK], *prompt(200 * BLOCK, seed=3)])
    assert engine.endpoint.pool.reach(request, 0, 208 * BLOCK) == 8 * BLOCK
    engine.abort("long")
    engine.run_until(lambda: engine.is_at_rest)


def test_a_draft_model_computes_the_last_block_that_is_here(engine: Engine) -> None:
    """The draft model's KV of a block's last token depends on the token after it."""
    serve(engine, "a", FIRST)
    push_out(engine)
    engine.scheduler.blocks.num_taken_back = 1
    request = engine.add("b", [*FIRST[: 8 * BLOCK], *prompt(BLOCK + 5, seed=11)])
    assert engine.endpoint.pool.match(request, 0, is_busy=False) == (7 * BLOCK, False)
    engine.abort("b")
    engine.run_until(lambda: engine.is_at_rest)


def test_blocks_in_use_are_not_copied_since_they_may_be_computed_in_this_step(
    engine: Engine,
) -> None:
    push_out(engine)
    engine.add("a", FIRST, max_tokens=20)
    engine.run_until(lambda: "a" in engine.outputs)
    pool, request = engine.endpoint.pool, engine.add("b", SECOND)
    assert pool.reach(request, 0, 8 * BLOCK) == 0
    engine.run_until(lambda: "a" in engine.finished)
    assert pool.reach(request, 0, 8 * BLOCK) == 8 * BLOCK
    pool.release("b")
    engine.run_until(lambda: engine.is_at_rest)


def test_the_bytes_of_the_pool_are_what_is_computed_with(engine: Engine) -> None:
    serve(engine, "a", FIRST)
    push_out(engine)
    assert engine.kv_worker.pool is not None
    engine.kv_worker.pool[:] ^= 0xFF
    request = engine.add("b", FIRST)
    engine.run_until(lambda: "b" in engine.outputs)
    assert not engine.holds(request, 8 * BLOCK)
    engine.run_until(lambda: engine.is_at_rest)


@pytest.mark.parametrize("how", ["prefix cache", "running", "connector", "failed load"])
def test_nothing_is_loaded_after_a_reset(engine: Engine, how: str) -> None:
    serve(engine, "a", FIRST)
    push_out(engine)
    if how == "running":
        engine.add("busy", prompt(20, seed=77), max_tokens=50)
        engine.run_until(lambda: "busy" in engine.outputs)
    if how == "failed load":
        engine.endpoint.pool.distrust({5})
    else:
        assert engine.scheduler.reset_prefix_cache(
            reset_running_requests=how == "running", reset_connector=how == "connector"
        )
    assert engine.kv_worker.pool is not None
    engine.kv_worker.pool[:] ^= 0xFF
    assert engine.load().kv_pool_blocks == 0
    assert serve(engine, "b", FIRST) == len(FIRST)
    assert engine.load().kv_pool_hit_tokens == 0


@pytest.mark.parametrize("kv_pool", ["", size(64)], ids=["no pool", "pool"])
def test_what_a_load_that_failed_left_is_in_no_cache(
    tmp_path: Path, kv_pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20, decode={"num_blocks": 33, "kv_pool": kv_pool})
    pair.sent("a", FIRST)

    with monkeypatch.context() as patch:
        patch.setattr(pair.decode.mover, "scatter", fail)
        pair.receive("a", FIRST)
        pair.decode.run_until(lambda: pair.decode.load().kv_loads_failed)
    pair.decode.abort("a")  # before it is computed
    assert serve(pair.decode, "b", FIRST) == len(FIRST)
    push_out(pair.decode)
    assert serve(pair.decode, "c", FIRST) == (5 if kv_pool else len(FIRST))
    pair.settle()
    pair.close()


@pytest.mark.parametrize("kind", ["host", *MIXED])
def test_a_load_that_fails_is_computed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = MIXED.get(kind, (FULL,))
    blocks, pool = 1 + 32 * len(specs), size(64 * len(specs))
    engine = Engine(tmp_path, Role.BOTH, specs=specs, num_blocks=blocks, kv_pool=pool)
    serve(engine, "a", FIRST)
    push_out(engine, 12)

    with monkeypatch.context() as patch:
        patch.setattr(engine.mover, "load_rows", fail)
        assert serve(engine, "b", FIRST) >= len(FIRST)
    assert engine.load().kv_loads_failed == 1
    made_room = 8 * len(specs) * (kind != "host")  # since then, for what was computed
    assert engine.load().kv_pool_blocks <= made_room
    engine.run_until(lambda: engine.is_at_rest)
    engine.close()


@pytest.mark.parametrize("push", ["chunk", "layer"])
def test_what_was_computed_after_a_load_that_failed_is_not_handed_over(
    tmp_path: Path, push: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What arrived of the first attempt is of no use, and expires.
    own = {"num_blocks": 33, "kv_pool": size(64), "push": push, "hold_timeout_s": 1.0}
    pair = Pair(tmp_path, arena_bytes=1 << 20, decode={"num_blocks": 200, "kv_pool": ""}, **own)
    serve(pair.prefill, "a", FIRST)
    push_out(pair.prefill, 12)

    with monkeypatch.context() as patch:
        patch.setattr(pair.prefill.mover, "load_rows", fail)
        response = pair.sent("b", FIRST)
    assert pair.prefill.load().kv_loads_failed == 1
    pair.decoding("b", FIRST, response.transfer)
    pair.end("b")
    pair.close()


def test_a_prompt_that_reads_no_cache_reads_no_pool(engine: Engine) -> None:
    serve(engine, "a", FIRST)
    push_out(engine)
    request = engine.add("b", FIRST)
    request.skip_reading_prefix_cache = True
    assert engine.endpoint.pool.match(request, 0, is_busy=False) == (0, False)
    engine.run_until(lambda: "b" in engine.finished)
    assert (engine.computed["b"], engine.load().kv_pool_hit_tokens) == (len(FIRST) + 3, 0)


def test_what_is_being_loaded_keeps_its_places(tmp_path: Path) -> None:
    """The pool has room for one prompt, and others push into it while that is loaded."""
    engine = Engine(tmp_path, Role.BOTH, num_blocks=33, kv_pool=size(9), load_budget_bytes=1)
    push_out(engine, 4)
    serve(engine, "a", FIRST[: 7 * BLOCK + 1])
    serve(engine, "x", prompt(25 * BLOCK, seed=5))
    engine.add("busy", prompt(20, seed=77), max_tokens=300)
    engine.run_until(lambda: "busy" in engine.outputs)
    gate, mover = Event(), engine.mover
    load_rows = mover.load_rows
    mover.load_rows = lambda *order: (gate.wait(10), load_rows(*order))[1]
    engine.add("b", FIRST[: 7 * BLOCK + 1])
    engine.run_until(lambda: "b" in engine.endpoint.pool.loading)
    pinned = list(engine.endpoint.pool.loading["b"].places)
    assert pinned
    before = engine.load().kv_pool_bytes_saved
    push_out(engine, 6)
    assert engine.load().kv_pool_bytes_saved > before  # by those that are not pinned
    pool, request = engine.endpoint.pool, engine.scheduler.requests["b"]
    assert pool.loading["b"].places == pinned
    assert pool.match(request, 0, is_busy=False) == (None, False)  # were it preempted
    gate.set()
    engine.run_until(lambda: "b" in engine.outputs)
    assert engine.holds(engine.scheduler.requests["b"], 7 * BLOCK)
    engine.abort("busy")
    engine.run_until(lambda: engine.is_at_rest)
    assert engine.endpoint.pool.index.num_pinned == 0
    engine.close()


@pytest.mark.parametrize("blocks", [1, 8])
def test_of_a_prompt_that_is_here_as_a_whole_the_last_block_is_computed(
    engine: Engine, blocks: int
) -> None:
    tokens = FIRST[: blocks * BLOCK]
    serve(engine, "a", tokens)
    push_out(engine)
    assert serve(engine, "b", tokens) == BLOCK
    engine.run_until(lambda: engine.is_at_rest)


def test_places_are_pinned_until_all_ranks_have_loaded(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Role.BOTH, num_blocks=33, num_ranks=2, kv_pool=size(64, 2))
    serve(engine, "a", FIRST)
    push_out(engine)
    pool, request = engine.endpoint.pool, engine.add("b", FIRST)
    assert pool.match(request, 0, is_busy=False) == (8 * BLOCK, False)
    pool.admitted("b", (list(range(1, 10)),), 8 * BLOCK)
    for num_pinned in (8, 0):
        pool.report(WorkerReport(loaded={"b": 1}))
        assert pool.index.num_pinned == num_pinned
    engine.close()


def test_what_is_not_admitted_in_a_step_is_not_pinned(engine: Engine) -> None:
    serve(engine, "a", FIRST)
    push_out(engine)
    pool, request = engine.endpoint.pool, engine.add("b", FIRST)
    assert pool.match(request, 0, is_busy=False) == (8 * BLOCK, False)
    pool.ask("b")
    assert pool.index.num_pinned == 8
    pool.fill(StepMeta())
    assert pool.index.num_pinned == 0


# -- other instances -----------------------------------------------------------------


@pytest.mark.parametrize("push", ["chunk", "layer", "request"])
def test_a_prefill_instance_sends_what_its_pool_had(tmp_path: Path, push: str) -> None:
    pair = Pair(tmp_path, arena_bytes=1 << 20, push=push, num_blocks=33, kv_pool=size(64))
    serve(pair.prefill, "a", FIRST)
    push_out(pair.prefill)
    tokens = [*FIRST[: 8 * BLOCK], 1, 2]
    response = pair.sent("b", tokens)
    assert response.cached_tokens == 8 * BLOCK
    pair.decoding("b", tokens)
    pair.end("b")
    assert pair.prefill.load().kv_pool_hit_tokens == 8 * BLOCK
    pair.close()


def test_a_difference_follows_what_the_pool_has(tmp_path: Path) -> None:
    options = {"num_blocks": 33, "kv_pool": size(64)}
    pair = Pair(tmp_path, arena_bytes=1 << 20, num_blocks=64, decode=options)
    serve(pair.decode, "a", FIRST)
    push_out(pair.decode)
    assert pair.sent("b", SECOND, held=8 * BLOCK).held_tokens == 8 * BLOCK
    pair.decoding("b", SECOND, held_tokens=8 * BLOCK)
    pair.end("b")
    seen = pair.decode.load()
    assert (seen.kv_gone, seen.kv_pool_hit_tokens) == (0, 8 * BLOCK)
    assert seen.kv_pool_bytes_loaded == 8 * BLOCK_BYTES
    assert seen.kv_bytes_received == 4 * BLOCK_BYTES
    assert pair.decode.computed["b"] == 4
    pair.close()


@pytest.mark.parametrize("more", [1, 20, 40])
@pytest.mark.parametrize("kind", MIXED)
def test_a_difference_of_windows_follows_what_the_pool_has(
    tmp_path: Path, kind: str, more: int
) -> None:
    """The pool has the rest of a window that the difference begins in."""
    options = {"num_blocks": 1 + 32 * len(MIXED[kind]), "kv_pool": size(600)}
    pair = Pair(tmp_path, arena_bytes=1 << 20, num_blocks=200, specs=MIXED[kind], decode=options)
    tokens = [*FIRST[: 8 * BLOCK], *prompt(more, seed=11)]
    serve(pair.decode, "a", FIRST)
    push_out(pair.decode, 12)
    assert pair.sent("b", tokens, held=8 * BLOCK).held_tokens == 8 * BLOCK
    pair.decoding("b", tokens, held_tokens=8 * BLOCK)
    pair.end("b")
    spans = pair.decode.scheduler.blocks.spans(len(tokens))
    num_blocks = sum(len(range(span.start, 8)) for span in spans)
    seen = pair.decode.load()
    assert (seen.kv_gone, seen.kv_pool_bytes_loaded) == (0, num_blocks * BLOCK_BYTES)
    assert pair.decode.computed["b"] == 4
    pair.close()


def test_what_waits_for_its_difference_stays_in_the_pool(tmp_path: Path) -> None:
    options = {"num_blocks": 33, "kv_pool": size(10)}
    pair = Pair(tmp_path, arena_bytes=1 << 20, num_blocks=64, decode=options)
    serve(pair.decode, "a", FIRST)
    serve(pair.decode, "x", prompt(31 * BLOCK, seed=5))
    pair.receive("b", SECOND, held_tokens=8 * BLOCK, is_early=True)
    assert pair.decode.endpoint.pool.index.num_pinned == 8
    pair.receive("c", SECOND, held_tokens=8 * BLOCK, is_early=True)
    pair.decode.abort("c")
    push_out(pair.decode)
    pair.sent("b", SECOND, held=8 * BLOCK)
    pair.decode.run_until(lambda: "b" in pair.decode.outputs)
    assert pair.decode.holds(pair.decode.scheduler.requests["b"], len(SECOND))
    pair.end("b")
    assert pair.decode.load().kv_gone == 0
    pair.close()


def test_a_transfer_that_fails_leaves_the_pool(tmp_path: Path) -> None:
    options = {"num_blocks": 33, "kv_pool": size(64)}
    pair = Pair(tmp_path, arena_bytes=1 << 20, decode=options)
    serve(pair.decode, "a", FIRST)
    push_out(pair.decode)
    request = pair.receive("b", SECOND)
    pair.decode.step()
    pair.decode.endpoint.take(TransferLost(TransferId("t-b")))
    pair.decode.run_until(lambda: "b" in pair.decode.outputs)
    assert pair.decode.holds(request, len(SECOND))
    pair.end("b")
    assert pair.decode.load().kv_pool_hit_tokens == 8 * BLOCK
    pair.close()


# -- what routers are told -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "windows", "chunks"])
def test_routers_are_told_of_both_caches(tmp_path: Path, kind: str) -> None:
    specs = MIXED.get(kind, (FULL,))
    blocks, places = 1 + 32 * len(specs), size(20 * len(specs))
    engine = Engine(tmp_path, Role.BOTH, specs=specs, num_blocks=blocks, kv_pool=places)
    engine.endpoint.agent.close()  # it reads reports, too
    pool, cached = engine.endpoint.pool, engine.scheduler.kv_cache_manager.block_pool
    told, known = set[bytes](), set[bytes]()
    for number in range(30):
        serve(engine, f"{number}", [number % 7, *prompt((number % 5 + 4) * BLOCK, seed=number % 3)])
        if number == 20:
            engine.scheduler.reset_prefix_cache()
            serve(engine, "first", FIRST)
        keys = {each.block_hash for each in cached.blocks if each.block_hash is not None}
        group = engine.scheduler.blocks.prefix_group[0]
        known |= {key for key in keys if get_group_id(key) == group}
        report = engine.endpoint.read_cache(number + 1, is_all=False)
        assert report is not None
        if report.is_all:
            told.clear()
        split = [
            {names[at : at + 8] for at in range(0, len(names), 8)}
            for names in (report.added, report.removed)
        ]
        told = (told | split[0]) - split[1]
        held = {
            key[:-4]
            for key in known
            if key in pool.index or cached.get_cached_block(key[:-4], [group])
        }
        assert told == {name[-8:] for name in held}
    assert engine.load().kv_pool_evictions > 0
    engine.close()


# -- where there is no pool --------------------------------------------------------------


STATE = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"specs": (FULL, STATE)},
            "some layers of its model keep a state, or are of a kind that it does not know",
        ),
        ({"args": {"enable_prefix_caching": False}}, "it has no prefix cache"),
        ({"args": {"scheduling_policy": "priority"}}, "requests have priorities"),
        ({"kv_pool": "100"}, "not one block fits"),
    ],
)
def test_where_it_cannot_be_used_one_line_says_so(
    tmp_path: Path,
    options: dict[str, Any],
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm_tetri"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="vllm_tetri"):
        engine = Engine(tmp_path, Role.BOTH, **{"num_blocks": 33, "kv_pool": size(64)} | options)
    assert [each.getMessage() for each in caplog.records if "kv-pool" in each.getMessage()] == [
        f"--tetri-kv-pool {engine.endpoint.config.kv_pool} is not used, since {why}"
    ]
    assert engine.kv_worker.pool is None
    serve(engine, "a", FIRST)
    push_out(engine)
    serve(engine, "b", FIRST)
    assert engine.load().kv_pool_blocks == 0
    engine.close()


def test_blocks_of_different_sizes_have_no_pool(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Role.BOTH)
    config = decode_config({"role": "both", "kv_pool": size(8)})
    groups = [KVCacheGroupSpec([""], each) for each in (FULL, replace(WINDOW, block_size=32))]
    cache = replace(engine.cache_config, kv_cache_groups=groups)
    places, why = pool_places(config, engine.config, cache, KVLayout(BLOCK_BYTES, Shards()))
    assert (places, why) == (0, "layers of its model have blocks of different sizes")
    engine.close()


def test_a_pool_that_the_worker_cannot_have_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's configuration has one layer of each group, and may look as if it could."""
    none = lambda *_: (0, "its layers differ")  # noqa: E731
    monkeypatch.setattr("vllm_tetri.engine.connector.pool_places", none)
    engine = Engine(tmp_path, Role.BOTH, kv_pool=size(8))
    serve(engine, "a", FIRST)
    push_out(engine)
    assert engine.load().kv_pool_total_blocks == 0
    engine.close()


def test_a_size_that_is_none_is_refused() -> None:
    for text in ("8 apples", ":/tmp", "0"):
        with pytest.raises(ConfigError, match=f"--tetri-kv-pool {text}: .*is not a size"):
            decode_config({"role": "both", "kv_pool": text})


def test_memory_and_disks_that_are_too_small_are_refused(tmp_path: Path) -> None:
    segments.require_memory(1 << 20, str(tmp_path), 0)
    segments.require_memory(1 << 20, "", 2 << 20)
    assert list(tmp_path.iterdir()) == []
    for folder, what in ((str(tmp_path), str(tmp_path)), ("", "memory")):
        with pytest.raises(OSError, match=f"{what} has .* GiB left"):
            segments.require_memory(1 << 60, folder, 1 << 30)
    limit = tmp_path / "memory.max"
    limit.write_text("1000\n")
    with pytest.raises(OSError, match=r"memory has 0\.0 GiB left"):
        segments.require_memory(1 << 20, "", 1 << 30, limit)
    with pytest.raises(OSError, match="No such file"):
        segments.require_memory(1, str(tmp_path / "nowhere"), 1)
    with pytest.raises(OSError, match="No such file"):
        segments.map_memory(1, str(tmp_path / "nowhere"))


# -- any order ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "two ranks", "device", *MIXED])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_mix_of_turns_is_right_and_ends_at_rest(
    tmp_path: Path, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations grow side by side on an instance whose caches are both too small."""
    monkeypatch.setattr(Engine, "on_device", kind == "device")
    rng, turns = Random(seed), [prompt(30, seed=each) for each in range(1, 7)]
    options = {"num_ranks": 2, "kv_pool": size(24, 2)} if kind == "two ranks" else {}
    if kind in MIXED:
        number = len(MIXED[kind])
        options = {"specs": MIXED[kind], "num_blocks": 40 * number, "kv_pool": size(24 * number)}
    engine = Engine(tmp_path, Role.BOTH, **{"num_blocks": 40, "kv_pool": size(24)} | options)
    live: dict[str, Any] = {}
    for number in range(50):
        which = rng.randrange(len(turns))
        turns[which] = (turns[which] + prompt(rng.randint(1, 60), number + 9))[:300]
        name = f"{number}"
        live[name] = engine.add(name, turns[which], max_tokens=rng.randint(2, 30))
        for _ in range(rng.randrange(6)):
            engine.step()
        live = {each: request for each, request in live.items() if each not in engine.finished}
        engine.finish_steps()
        for each in rng.sample(engine.scheduler.running, min(2, len(engine.scheduler.running))):
            assert engine.holds(each, min(each.num_tokens - 1, each.num_computed_tokens))
        if live and rng.random() < 0.1:
            gone = rng.choice(list(live))
            engine.abort(gone)
            del live[gone]
        if rng.random() < 0.03:
            engine.finish_steps()
            if not engine.scheduler.kv_holding_waiting:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run_until(lambda: engine.is_at_rest)
    seen = engine.load()
    assert min(seen.kv_pool_hit_tokens, seen.kv_pool_evictions) > 0
    assert engine.endpoint.pool.index.num_pinned == 0
    engine.close()


def test_a_report_of_another_request_changes_nothing(engine: Engine) -> None:
    engine.endpoint.pool.report(WorkerReport(loaded={"unknown": 1}))
    assert engine.load().kv_pool_bytes_loaded == 0
