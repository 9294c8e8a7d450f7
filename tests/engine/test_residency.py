"""What an instance reports of its prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_events import EventPublisherFactory
from vllm.v1.request import Request

from tests.engine.harness import BLOCK, CHUNKS, FULL, WINDOW, Engine
from vllm_tetri.engine import residency
from vllm_tetri.handover import PrefillParams
from vllm_tetri.messages import CacheReport, decode_to_router, encode
from vllm_tetri.policy.residency import Chain, Residency, names_of
from vllm_tetri.types import InstanceId, RequestId, Role, TransferId

ME = InstanceId("both-x")
PROMPT = list(range(100, 180))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    found = Engine(tmp_path, Role.BOTH, num_blocks=33)
    found.endpoint.agent.close()  # it reads reports, too
    yield found
    found.close()


class Reader:
    """What a router knows of an instance that reports."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seq = engine, 0
        self.residency, self.chains = Residency(), dict[str, Chain]()

    def read(self, *, is_all: bool = False) -> CacheReport | None:
        report = self.engine.endpoint.read_cache(self.seq + (not is_all), is_all=is_all)
        if report is None:
            return None
        report = decode_to_router(encode(report))
        assert isinstance(report, CacheReport)
        self.seq = report.seq
        added, removed = names_of(report.added), names_of(report.removed)
        self.residency.update(
            ME, added, removed, is_all=report.is_all, tail_blocks=report.tail_blocks
        )
        for each in report.chains:
            self.chains[each.request] = Chain(names_of(each.names), report.block_tokens)
        return report

    def held(self, name: str) -> int:
        return self.residency.held_tokens(ME, self.chains[name])


def serve(engine: Engine, name: str, tokens: list[int], max_tokens: int = 4) -> None:
    engine.add(name, tokens, max_tokens=max_tokens)
    engine.run_until(lambda: name in engine.finished)


def test_a_request_leaves_its_blocks_with_their_names(engine: Engine) -> None:
    reader = Reader(engine)
    assert reader.read() is None
    serve(engine, "a", PROMPT, max_tokens=20)  # 99 tokens have KV
    reader.read()
    assert reader.held("a") == 6 * BLOCK
    assert reader.residency.count(ME) == 6
    serve(engine, "b", [*PROMPT[:40], 1, 2, 3, *PROMPT])
    reader.read()
    shared = reader.chains["b"].names[:3]
    assert [*shared][:2] == [*reader.chains["a"].names][:2]
    assert shared[2] != reader.chains["a"].names[2]
    assert reader.read() is None


def test_evicted_and_cleared_blocks_are_taken_back(engine: Engine) -> None:
    reader = Reader(engine)
    serve(engine, "a", PROMPT)
    for at in range(8):  # 32 blocks in all
        serve(engine, f"other {at}", [at, *PROMPT])
    reader.read()
    assert reader.held("a") == 0
    assert reader.held("other 7") == 5 * BLOCK
    assert reader.residency.count(ME) <= 32
    assert engine.scheduler.reset_prefix_cache()
    serve(engine, "b", PROMPT)
    reader.read()
    assert reader.residency.count(ME) == 5
    assert reader.held("b") == 5 * BLOCK


def test_of_two_equal_blocks_one_may_go(engine: Engine) -> None:
    """vLLM computes the last block of a prompt anew."""
    reader, pool = Reader(engine), engine.scheduler.kv_cache_manager.block_pool
    for name in ("a", "b"):
        serve(engine, name, PROMPT)
    count = Counter(each.block_hash for each in pool.blocks if each.block_hash is not None)
    equal = [each.block_id for each in pool.blocks if count[each.block_hash] == 2]
    for block, held in zip(equal, (5 * BLOCK, 4 * BLOCK), strict=True):
        pool.evict_blocks({block})
        serve(engine, f"next {block}", [1, 2, 3])
        reader.read()
        assert reader.held("b") == held


@pytest.mark.parametrize("prompt_tokens", range(60, 100, 3))
@pytest.mark.parametrize("specs", [(FULL, WINDOW), (WINDOW,), (FULL, CHUNKS, WINDOW)])
def test_of_windows_it_reports_where_vllm_has_a_hit(
    tmp_path: Path, specs: tuple[Any, ...], prompt_tokens: int
) -> None:
    engine = Engine(tmp_path, Role.BOTH, specs=specs, num_blocks=97, retention=0)  # vLLM's default
    engine.endpoint.agent.close()
    reader, prompt = Reader(engine), list(range(100, 100 + prompt_tokens))
    serve(engine, "a", prompt, max_tokens=40)  # its last blocks of windows are not kept
    reader.read()
    again = engine.add("b", [*prompt, *engine.outputs["a"], 1, 2])
    held = reader.held("a")
    assert held == engine.scheduler.kv_cache_manager.get_computed_blocks(again)[1]
    assert prompt_tokens - 2 * BLOCK < held <= prompt_tokens
    late = Reader(engine)
    late.read(is_all=True)
    late.chains = reader.chains
    assert late.held("a") == held
    engine.close()


def test_who_missed_a_report_gets_all(engine: Engine) -> None:
    reader, late = Reader(engine), Reader(engine)
    serve(engine, "a", PROMPT)
    assert reader.read() is not None
    assert late.read(is_all=True) is not None
    assert late.residency.count(ME) == reader.residency.count(ME) == 5
    serve(engine, "b", [7, *PROMPT])  # its changes come again after all of it came
    assert late.read(is_all=True) is not None
    assert late.residency.count(ME) == 10
    late.read()
    assert late.residency.count(ME) == 10


def test_vllms_own_publisher_gets_every_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Any] = []
    own = SimpleNamespace(publish=batches.append, shutdown=lambda: batches.append(None))
    monkeypatch.setattr(EventPublisherFactory, "create", lambda *_: own)
    engine = Engine(tmp_path, Role.BOTH)
    serve(engine, "a", PROMPT)
    engine.close()
    assert batches.pop() is None
    stored = [each for batch in batches for each in batch.events]
    assert sum(len(each.block_hashes) for each in stored) == 5


def test_without_a_prefix_cache_there_is_nothing_to_report(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Role.BOTH, args={"enable_prefix_caching": False})
    serve(engine, "a", PROMPT)
    reader = Reader(engine)
    reader.residency.update(ME, [7], [], is_all=True)  # by the process before, which had one
    assert reader.read() is None
    assert reader.read(is_all=True) is not None
    assert reader.residency.count(ME) == 0
    assert reader.read() is None
    engine.close()


def test_reports_are_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MAX_CACHE_NAMES", 7)
    monkeypatch.setattr(residency, "_MAX_CHAIN_BYTES", 100)
    reader = Reader(engine)
    serve(engine, "a", PROMPT)
    serve(engine, "b", [7, *PROMPT])
    serve(engine, "c", [8, *PROMPT])
    reader.read()
    assert reader.residency.count(ME) == 10  # what would exceed it was left out
    assert set(reader.chains) == {"a", "b"}


def test_events_wait_for_a_report_but_not_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a router no report is asked for."""
    monkeypatch.setattr(residency, "_MAX_BATCHES", 3)
    kept = []
    monkeypatch.setattr(engine.endpoint.cache, "_read", lambda: kept.append(1))
    for number in range(4):
        engine.add(f"r{number}", [number, *PROMPT])
        engine.run_until(lambda number=number: f"r{number}" in engine.finished)
    assert kept


def test_marks_tell_how_much_of_a_prompt_a_chain_is(engine: Engine) -> None:
    reader = Reader(engine)
    serve(engine, "a", PROMPT, max_tokens=200)  # 17 blocks
    reader.read()
    marks = reader.chains["a"].marks()
    log, output = engine.endpoint.cache, engine.outputs["a"]
    again = engine.add("b", [*PROMPT, *output[:90], *PROMPT])
    assert log.known_tokens(again, marks) == 160  # of 170
    assert log.known_tokens(engine.add("c", [*PROMPT[:40], 1, *output]), marks) == 32
    assert log.known_tokens(engine.add("d", PROMPT[:10]), marks) == 0
    for strange in ([], [(0, 1)], [(7, marks[0][1])], [(1 << 40, 1)], [(16, -1)]):
        assert log.known_tokens(again, strange) == 0


def test_what_is_not_this_prompt_is_not_held(engine: Engine) -> None:
    reader = Reader(engine)
    serve(engine, "a", PROMPT)
    reader.read()
    marks = reader.chains["a"].marks()
    added: list[PrefillParams] = []
    engine.endpoint.sends.add = lambda request, params: added.append(params)
    params = PrefillParams(
        TransferId("t"), RequestId("r"), held={ME: 5 * BLOCK, InstanceId("x"): 32}, marks=marks
    )
    for prompt in ([*PROMPT, 1, 2], [*PROMPT[:70], *PROMPT], [5, *PROMPT]):
        request = Request("b", prompt, SamplingParams(), None, block_hasher=engine.hasher)
        engine.endpoint.add(request, params)
    assert [each.held[ME] for each in added] == [80, 64, 0]
    assert [each.held[InstanceId("x")] for each in added] == [32, 32, 0]
