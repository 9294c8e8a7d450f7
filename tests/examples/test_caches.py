"""Rules by which other routers use prefix caches, and the benchmark of caches."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from examples.benchmarks import caches
from examples.benchmarks.figures import Results
from examples.benchmarks.rivals.caches import DynamoMode, LlmdMode, ThresholdMode
from vllm_tetri.policy.cluster import ClusterTable
from vllm_tetri.policy.route import Route
from vllm_tetri.policy.tables import TableMaker
from vllm_tetri.sim.config import ClusterConfig, make_instances
from vllm_tetri.sim.modes import SimMode
from vllm_tetri.sim.workload import NAME_TOKENS, RequestSpec
from vllm_tetri.types import ClusterView, InstanceLoad, InstanceState, InstanceView

CONFIG = ClusterConfig(make_instances(both=3))
BUSY = {"blocks_total": 100, "chunk_tokens": 512}


def table(*loads: dict[str, Any]) -> ClusterTable:
    """What three instances report."""
    loads = loads or ({}, {}, {})
    views = tuple(
        InstanceView(each.info, InstanceState.READY, InstanceLoad(**{**BUSY, **load}), 0.0, 1)
        for each, load in zip(CONFIG.instances, loads, strict=True)
    )
    return TableMaker().make(ClusterView("x", 1, views), 0.0)


def spec(number: int, *names: int) -> RequestSpec:
    """A prompt of whole blocks and 16 tokens more."""
    return RequestSpec(number, 0.0, len(names) * NAME_TOKENS + 16, 10, names=names)


def hold(mode: SimMode, index: int, *names: int) -> None:
    mode.residency.update(CONFIG.instances[index].id, names, (), is_all=False)


def chosen(mode: SimMode, seen: ClusterTable, request: RequestSpec) -> int:
    route = mode.route(seen, request, 0.0)
    assert isinstance(route, Route)
    return int(route.prefill.removeprefix("both-"))


def test_llm_d_weighs_the_cached_share_against_queue_and_memory() -> None:
    """Cached for half: 1.5. All that wait at one: 0 instead of 2. Memory in use to 0.3: 1.4."""
    mode = LlmdMode(CONFIG)
    hold(mode, 1, 1, 2)

    request = spec(0, 1, 2, 3, 4)
    assert chosen(mode, table(), request) == 1
    assert chosen(mode, table({}, {"waiting": 1}, {"blocks_used": 10}), request) == 0
    assert chosen(mode, table({"blocks_used": 80}, {"blocks_used": 80}, {}), request) == 2
    assert chosen(mode, table({"blocks_used": 80}, {"blocks_used": 60}, {}), request) == 1


def test_dynamo_adds_blocks_to_compute_and_active_ones() -> None:
    mode, seen = DynamoMode(CONFIG), table()
    hold(mode, 1, 1, 2)
    long, short = spec(0, 1, 2, 3), spec(1, 1, 9)

    assert chosen(mode, seen, long) == 1  # 1 to compute; 3 elsewhere
    assert chosen(mode, seen, short) != 1  # 1 + 1 to compute and 3 active; 2 elsewhere
    mode.prefilled(long, 1.0)
    assert mode.scores(seen, spec(2, 1, 2))[CONFIG.instances[1].id] == -1 - (3 * 512 + 16) / 16
    mode.ended(long, 2.0)
    assert mode.scores(seen, spec(2, 1, 2))[CONFIG.instances[1].id] == -1


def test_dynamo_forgets_a_request_whose_first_token_was_the_last() -> None:
    mode, seen = DynamoMode(CONFIG), table()
    request = spec(0, 1, 2)
    mode.route(seen, request, 0.0)

    mode.ended(request, 1.0)

    assert set(mode.scores(seen, spec(1, 5)).values()) == {-(512 + 16) / 16}


def test_cache_aware_follows_the_longest_match_above_its_threshold() -> None:
    mode, seen = ThresholdMode(CONFIG), table()
    first = chosen(mode, seen, spec(0, 1, 2, 3, 4))

    assert chosen(mode, seen, spec(1, 1, 2, 7, 8)) == first
    others = {
        chosen(mode, seen, spec(2, 1, 21, 22, 23)),
        chosen(mode, seen, spec(3, 1, 31, 32, 33)),
    }
    assert others == {0, 1, 2} - {first}  # a quarter is not enough: where least was sent


def test_cache_aware_balances_what_is_far_apart() -> None:
    mode, seen = ThresholdMode(CONFIG), table()
    first = chosen(mode, seen, spec(0, 1, 2))
    for number in range(1, 65):
        assert chosen(mode, seen, spec(number, 1, 2)) == first

    assert chosen(mode, seen, spec(65, 1, 2)) != first


# -- the best possible -----------------------------------------------------------------------


def test_the_best_possible_by_hand() -> None:
    """Room for two names. LRU keeps 1 and 3 for the last request; Belady 1 and 2."""
    specs = [spec(0, 1, 2, 28), spec(1, 1, 3, 38), spec(2, 1, 2, 28)]

    lru, belady = caches.best_hits(specs, 2)

    tokens = 3 * (3 * 512 + 16)
    assert lru == pytest.approx(2 * 512 / tokens)
    assert belady == pytest.approx(3 * 512 / tokens)
    assert caches.best_hits(specs, 100) == (pytest.approx(4 * 512 / tokens),) * 2


@pytest.mark.parametrize("seed", range(3))
def test_nothing_beats_the_future(seed: int) -> None:
    rng = Random(seed)
    chains = [tuple(range(100 * chain, 100 * chain + 6)) for chain in range(8)]
    specs = [spec(n, *rng.choice(chains)[: rng.randint(1, 6)]) for n in range(200)]

    for room in (3, 10, 25):
        lru, belady = caches.best_hits(specs, room)
        assert lru <= belady


# -- the benchmark ---------------------------------------------------------------------------


def test_every_system_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, output = tmp_path / "trace.jsonl", tmp_path / "found.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {900 * n}, "input_length": 1600, "output_length": 20, '
            f'"hash_ids": [{n % 3}, {10 + n % 3}, {100 + n}, {200 + n}]}}\n'
            for n in range(40)
        )
    )
    words = ["caches", str(trace), "--instances", "4", "--output", str(output)]
    monkeypatch.setattr("sys.argv", words)

    caches.main()
    caches.main()  # again: nothing is left to do

    cells = Results(output, {}).cells
    assert [cell["system"] for cell in cells] == list(caches.SYSTEMS)
    for cell in cells:
        assert 0 < cell["hits"] <= cell["belady"]
        assert 0 < cell["ttft_mean_s"] < cell["jct_mean_s"]


def test_reports_are_counted() -> None:
    found = caches.traffic(1000, 60)

    # 8 bytes for each name that comes or goes, and for each of a request that ended.
    assert found["kb_per_s"] == pytest.approx(8 * (2 * 1000 + 1500) / 1e3, rel=0.15)
    assert 0 < found["router_core"] < 1
