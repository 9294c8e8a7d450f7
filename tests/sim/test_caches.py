"""Prefix caches of simulated instances."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest

from tests.policy.builders import serving
from tests.sim.builders import (
    COST,
    HANDOVER_S,
    HANDOVER_TOKEN_S,
    decode_s,
    engine,
    named,
    one,
    pair,
    prompt_s,
)
from vllm_tetri import cli
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.policy.cluster import ClusterTable, InstanceRow
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.sim.cluster import ENGINES, run, simulate
from vllm_tetri.sim.config import ClusterConfig, EngineKind, Stock, make_instances
from vllm_tetri.sim.engine.cache import PrefixCache
from vllm_tetri.sim.engine.instance import Share
from vllm_tetri.sim.engine.tetri import TetriInstance
from vllm_tetri.sim.figures import figures
from vllm_tetri.sim.modes import SplitMode, WholeMode
from vllm_tetri.sim.request import SimRequest
from vllm_tetri.sim.workload import predicted, read_trace, with_names

ROOMY = {"kv_blocks": 300, "chunk_tokens": 2048}


# -- the cache by hand ---------------------------------------------------------------------


def test_a_prefix_is_found_up_to_the_first_name_that_is_missing() -> None:
    cache = PrefixCache()
    assert cache.use([1, 2, 3]) == 0
    cache.let_go([1, 2, 3])

    assert cache.find([1, 2, 3, 4]) == (3, 0)
    assert cache.find([1, 9, 3]) == (1, 0)
    assert cache.find([9, 1]) == (0, 0)


def test_the_end_of_the_prefix_that_was_used_least_recently_goes_first() -> None:
    cache = PrefixCache()
    for names in ([1, 2, 3], [1, 5], [7]):
        cache.use(names)
        cache.let_go(names)

    gone = []
    for most in reversed(range(5)):
        cache.shrink(most)
        gone += [name for name in (1, 2, 3, 5, 7) if name not in cache and name not in gone]

    assert gone == [3, 2, 5, 1, 7]


def test_a_touched_prefix_goes_last() -> None:
    cache = PrefixCache()
    for names in ([1, 2], [3]):
        cache.use(names)
        cache.let_go(names)

    cache.touch([1, 2, 8])
    cache.shrink(2)

    assert (3 in cache, cache.find([1, 2])) == (False, (2, 0))


def test_names_in_use_stay_and_are_shared() -> None:
    cache = PrefixCache()
    cache.use([1, 2])

    assert cache.use([1, 2, 3]) == 2
    cache.shrink(0)
    assert cache.find([1, 2, 3]) == (3, 3)
    assert cache.let_go([1, 2, 3]) == 2
    cache.shrink(0)
    assert cache.find([1, 2, 3]) == (2, 2)


def test_changes_tell_what_came_and_went() -> None:
    cache = PrefixCache()
    cache.use([1, 2])
    assert cache.changes == {1: True, 2: True}
    cache.changes = {}
    cache.let_go([1, 2])
    cache.use([1])
    cache.shrink(0)

    assert cache.changes == {2: False}


# -- one instance --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EngineKind(), Stock(2048)])
def test_a_hit_shortens_the_first_token_by_what_it_would_compute(kind: EngineKind) -> None:
    specs = [named(0, 1100, 3, (1, 2)), named(1, 1100, 3, (1, 2), 100.0)]

    first, second = simulate(one(kind=kind, **ROOMY), specs)

    assert first.ttft_s == pytest.approx(prompt_s(1100))
    assert second.ttft_s == pytest.approx(prompt_s(1100 - 1024))
    assert (first.cached_tokens, second.cached_tokens) == (0, 1024)
    assert second.begun_s == pytest.approx(100.0)
    assert figures([first, second], Objective())["cached"] == pytest.approx(1024 / 2200)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    specs = [named(0, 1024, 1, (1, 2)), named(1, 1024, 1, (1, 2), 100.0)]

    _, second = simulate(one(**ROOMY), specs)

    assert second.cached_tokens == 512


def test_what_was_written_while_decoding_is_found_by_the_next_turn() -> None:
    # The first block ends with the twelfth token of the output.
    specs = [named(0, 500, 30, (1,)), named(1, 600, 1, (1,), 100.0)]

    _, second = simulate(one(**ROOMY), specs)

    assert second.cached_tokens == 512


def test_a_request_finds_what_another_has_computed_so_far() -> None:
    specs = [named(0, 2000, 40, (1, 2, 3)), named(1, 2000, 1, (1, 2, 3), 9.0)]

    first, second = simulate(one(kv_blocks=300, chunk_tokens=512), specs)

    assert second.cached_tokens == 1536
    assert first.ttft_s > 9.0  # it came while the first one was computed


def test_memory_of_running_requests_is_taken_from_the_cache() -> None:
    # 100 blocks: the second prompt needs 80, so 20 are left for one of the names of the first.
    specs = [
        named(0, 1100, 1, (1, 2)),
        named(1, 1270, 1, (5, 6), 100.0),
        named(2, 1100, 1, (1, 2), 200.0),
    ]

    *_, third = simulate(one(kv_blocks=100, chunk_tokens=2048), specs)
    assert third.cached_tokens == 0
    *_, third = simulate(one(kv_blocks=180, chunk_tokens=2048), specs)
    assert third.cached_tokens == 1024


def test_requests_that_share_a_prefix_share_its_memory() -> None:
    """Two of 69 blocks run together in 100 only because they share 64."""
    specs = [named(0, 1100, 60, (1, 2)), named(1, 1100, 2, (1, 2), 20.0)]

    _, second = simulate(one(kv_blocks=100, chunk_tokens=2048, admission="greedy"), specs)
    _, alone = simulate(
        one(kv_blocks=100, chunk_tokens=2048, admission="greedy"),
        [specs[0], replace(specs[1], names=(8, 9))],
    )

    assert second.ttft_s < 4.0
    assert alone.ttft_s > 40.0


@pytest.mark.parametrize("mode", ["split", "adaptive", "whole"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_memory_is_exact_whatever_happens(mode: str, seed: int) -> None:
    """Instances assert at the end that all blocks are free. Pools are small, so that requests are
    preempted, and what decode instances held is evicted."""

    class Checked(TetriInstance):
        def compose(self, now: float) -> list[Share]:
            shares = super().compose(now)
            assert self.free_blocks >= 0
            return shares

    rng, specs = Random(seed), []
    for number in range(60):
        prompt, chain = rng.randint(1, 2500), 100 * rng.randrange(4)
        names = tuple(range(chain, chain + (prompt + 60) // 512))
        specs.append(named(number, prompt, rng.choice((1, 60, 120)), names, 2.0 * number))
    small = engine(kv_blocks=175, chunk_tokens=256, admission="greedy", arena_tokens=4000)
    config = ClusterConfig(make_instances(2, 2, engine=small), mode)

    with patch.dict(ENGINES, {EngineKind: Checked}):
        outcome = run(config, specs)

    assert len(outcome.served) == len(specs)
    assert outcome.preemptions
    assert sum(each.cached_tokens for each in outcome.served) > 5_000
    assert any(each.fetched_tokens for each in outcome.served)
    assert all(each.cached_tokens < each.spec.prompt_tokens for each in outcome.served)


# -- two instances -------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "role"), [("whole", "both"), ("split", "prefill")])
def test_a_prompt_goes_where_its_prefix_is_and_is_as_much_earlier(mode: str, role: str) -> None:
    """At 100 s both are idle; the first of equals would have it."""
    specs = [
        named(0, 2000, 1, (5,)),
        named(1, 1100, 2, (1, 2), 0.01),
        named(2, 1100, 2, (1, 2), 100),
    ]
    counts = {role: 2, "decode": int(mode == "split")}
    config = ClusterConfig(make_instances(**counts, engine=engine(**ROOMY)), mode)

    first, second, third = simulate(config, specs)
    *_, blind = simulate(config, [replace(each, names=()) for each in specs])

    places = [each.prefill.removeprefix(f"{role}-") for each in (first, second, third, blind)]
    assert places == ["0", "1", "1", "0"]
    assert blind.ttft_s - third.ttft_s == pytest.approx(1024 * COST.prompt_s)


def test_the_router_knows_only_what_was_reported() -> None:
    specs = [named(0, 600, 1, (1,)), named(1, 600, 1, (1,), 7.03)]
    config = ClusterConfig(make_instances(both=2, engine=engine(**ROOMY)), "whole")

    # The first prompt is done at 7 s, and reported at 7.1 s.
    _, early = simulate(config, specs)
    _, late = simulate(config, [specs[0], replace(specs[1], arrival_s=7.13)])

    assert (early.prefill, early.cached_tokens) == ("both-1", 0)
    assert (late.prefill, late.cached_tokens) == ("both-0", 512)


def test_of_many_instances_a_router_asks_few() -> None:
    config = ClusterConfig(make_instances(both=9, engine=engine(**ROOMY)), WholeMode)
    mode = WholeMode(config)
    for number, each in enumerate(config.instances):
        mode.residency.update(each.id, range(number), (), is_all=False)
    rows = [InstanceRow(serving(each.id), COST, 0, 0.0, 0.0) for each in config.instances]

    held = mode.look_up(named(0, 4100, 1, tuple(range(8))), rows).cached

    assert held == {f"both-{number}": 512 * number for number in (5, 6, 7, 8)}
    alike = [mode.look_up(named(number, 600, 1, (0,)), rows).cached for number in range(9)]
    assert {name for each in alike for name in each} == {each.id for each in config.instances[1:]}


@pytest.mark.parametrize("link", [None, 1000 / HANDOVER_TOKEN_S])
def test_what_the_decode_instance_holds_is_not_sent(link: float | None) -> None:
    specs = [named(0, 1100, 4, (1, 2)), named(1, 1100, 4, (1, 2), 100.0)]
    each = {**ROOMY, "kv_token_bytes": 1000}
    config = replace(pair(decode=engine(**each), **each), link=link)

    first, second = simulate(config, specs)

    for each, sent, new in ((first, 1100, 1100), (second, 76, 76)):
        assert each.decode == "d"
        assert each.ttft_s == pytest.approx(prompt_s(new))
        moved_s = HANDOVER_S + sent * HANDOVER_TOKEN_S
        assert each.jct_s == pytest.approx(each.ttft_s + moved_s + decode_s(1100, 3))


def test_what_only_the_prefill_instance_holds_is_sent() -> None:
    """The first request ends with its prompt. That of the second is one chunk."""
    specs = [named(0, 1100, 1, (1, 2)), named(1, 1100, 4, (1, 2), 100.0)]

    _, second = simulate(pair(decode=engine(**ROOMY), **ROOMY), specs)

    moved_s = HANDOVER_S + 1100 * HANDOVER_TOKEN_S
    assert second.jct_s == pytest.approx(prompt_s(76) + moved_s + decode_s(1100, 3))


def test_a_transfer_of_a_part_that_is_given_up_frees_what_it_took() -> None:
    """The second request opens one after its first chunk, and ends with its first token; instances
    assert at the end that arenas are empty."""
    specs = [named(0, 2000, 3, (1, 2, 3)), named(1, 2000, 1, (1, 2, 3), 100.0)]

    _, second = simulate(pair(decode=engine(kv_blocks=300), kv_blocks=300, chunk_tokens=256), specs)

    assert (second.held_tokens, second.is_split) == (1536, False)


def test_a_turn_is_decoded_where_the_last_one_was() -> None:
    specs = [named(2 * n, 600, 3, (n,), 100.0 * n) for n in range(8)]
    specs += [replace(each, id=each.id + 1, arrival_s=each.arrival_s + 50.0) for each in specs]
    config = ClusterConfig(make_instances(1, 2, engine=engine(**ROOMY)))

    served = simulate(config, sorted(specs, key=lambda each: each.id))

    assert {each.decode for each in served} == {"decode-0", "decode-1"}
    assert [each.decode for each in served[::2]] == [each.decode for each in served[1::2]]


class _Lies(SplitMode):
    """Takes the decode instance to hold what it never had."""

    def dispatch(
        self, request: SimRequest, table: ClusterTable, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        chosen = super().dispatch(request, table, now, may_wait=may_wait)
        request.held_tokens = 1024
        return chosen


def test_what_was_taken_to_be_held_is_computed_if_it_is_not() -> None:
    config = replace(pair(decode=engine(**ROOMY), **ROOMY), mode=_Lies)

    (served,) = simulate(config, [named(0, 1100, 4, (1, 2))])

    moved_s = HANDOVER_S + 76 * HANDOVER_TOKEN_S
    again_s = COST.step_s(0, 0, 1101, 0)  # with the first token; the second one follows from it
    assert served.jct_s == pytest.approx(prompt_s(1100) + moved_s + again_s + decode_s(1101, 2))


# -- traces --------------------------------------------------------------------------------


def read(tmp_path: Path, *rows: tuple[int, int, list[int]]) -> list[tuple[int, ...]]:
    lines = (
        f'{{"timestamp": {at}, "input_length": {prompt}, "output_length": {output}, '
        f'"hash_ids": {ids}}}\n'
        for at, (prompt, output, ids) in enumerate(rows)
    )
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines))
    return [each.names for each in with_names(predicted(read_trace(path), 1.0, 0), path)]


def test_whole_blocks_have_names(tmp_path: Path) -> None:
    assert read(tmp_path, (1100, 5, [1, 2, 3]), (1024, 5, [1, 2]), (500, 5, [4])) == [
        (1, 2), (1, 2), (),
    ]  # fmt: skip


def test_too_few_names_are_none(tmp_path: Path) -> None:
    assert read(tmp_path, (1100, 5, [1]), (1100, 5, [])) == [(), ()]


def test_the_blocks_of_an_output_have_the_names_of_the_next_turn(tmp_path: Path) -> None:
    turns = [(1100, 500, [1, 2, 3]), (1700, 1000, [1, 2, 4, 5]), (3000, 1, [1, 2, 4, 6, 7, 8])]

    assert read(tmp_path, *turns) == [(1, 2, 4), (1, 2, 4, 6, 7), (1, 2, 4, 6, 7)]


def test_prompts_that_end_alike_or_are_too_short_name_no_outputs(tmp_path: Path) -> None:
    shared = [(520, 900, [1, 2]), (530, 900, [1, 3]), (2000, 5, [1, 4, 5, 6])]
    assert read(tmp_path, *shared)[:2] == [(1,), (1,)]
    assert read(tmp_path, (600, 1500, [1, 2]), (1500, 5, [1, 4, 5]))[0] == (1,)


def test_the_command_takes_names_from_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
    path.write_text(row % 0 + row % 100_000)

    assert cli.main(["sim", "--trace", str(path), "--mode", "whole", "--json", "-"]) == 0

    (system,) = json.loads(capsys.readouterr().out)["systems"]
    assert system["cached"] == pytest.approx(1024 / 2200)
