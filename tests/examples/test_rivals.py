"""Simulated systems of other papers. Times are worked out by hand."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.benchmarks.rivals.__main__ import main
from examples.benchmarks.rivals.engines import Cadence, Orca, PromptsFirst, Static, Unchunked
from examples.benchmarks.rivals.fastserve import FastServe
from examples.benchmarks.rivals.modes import MooncakeMode, SplitwiseMode
from examples.benchmarks.rivals.systems import SYSTEMS, WITH_ROLES, Parts, system_of
from tests.sim.builders import COST, ENGINE, decode_s, engine, max_itl_s, one, pair, spec, steps
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.policy.lengths import End
from vllm_tetri.sim.cluster import run, simulate
from vllm_tetri.sim.config import (
    ClusterConfig,
    EngineConfig,
    EngineKind,
    InstanceConfig,
    Stock,
    make_instances,
)
from vllm_tetri.sim.workload import draw
from vllm_tetri.types import InstanceId, Role

SMALL = EngineConfig(kv_blocks=260, arena_tokens=6000)
WINDOW = 64
UNCHUNKED: dict[str, Any] = {"kind": Unchunked(), "order": "fcfs", "admission": "greedy"}


def alone(**changes: Any) -> ClusterConfig:
    return one("least-in-flight", **changes)


# -- all systems ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_serves_every_request_token_by_token_or_refuses_it(name: str) -> None:
    config = system_of(name, Parts(4, SMALL, objective=Objective(1.0, 0.1)))
    specs = draw("mixed", 60, 3.0, seed=2, accuracy=0.8)
    outcome = run(config, specs)
    assert [each.jct_s for each in outcome.served] == [
        each.jct_s for each in run(config, specs).served
    ]
    done = [each.spec.id for each in (*outcome.served, *outcome.refused)]
    assert sorted(done) == [each.id for each in specs]
    for each in outcome.served:
        gaps = np.concatenate(each.gap_parts)
        assert len(gaps) == each.spec.output_tokens - 1
        assert each.ttft_s + gaps.sum() == pytest.approx(each.jct_s)
    has_roles = any(each.role is Role.PREFILL for each in config.instances)
    assert has_roles == (name in WITH_ROLES)


def test_distserve_decodes_where_fewest_are() -> None:
    specs = [spec(number, 10, 100, 4.0 * number) for number in range(12)]
    served = simulate(system_of("distserve", Parts(3, ENGINE)), specs)
    at = [each.decode for each in served]
    assert at.count(InstanceId("decode-0")) == at.count(InstanceId("decode-1")) == 6


def test_the_papers_settings_slow_prompts_and_send_kv_once_and_reserve_the_lower_end() -> None:
    ours, papers = (system_of(name, Parts(2, ENGINE)) for name in ("tetri", "tetri-paper"))
    for config, ttft_s in ((ours, 1.1), (papers, 1.1 * 1.1)):
        (served,) = simulate(config, [spec(0, 10, 3)])
        assert served.ttft_s == pytest.approx(ttft_s)
        assert served.jct_s - served.ttft_s == pytest.approx(0.00805 + decode_s(10, 2))
    assert (ours.sends_chunks, papers.sends_chunks) == (True, False)
    assert {each.engine.end for each in papers.instances} == {End.LOWER}


# -- engines -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [Static(WINDOW), Orca(WINDOW), PromptsFirst(), Unchunked(), FastServe()]
)
def test_a_request_alone_takes_the_same_time_on_every_engine(kind: EngineKind) -> None:
    (served,) = simulate(alone(kind=kind), [spec(0, 10, 3)])
    assert served.ttft_s == pytest.approx(1.1)
    assert served.jct_s == pytest.approx(1.1 + decode_s(10, 2))


def test_a_static_batch_is_padded_and_keeps_requests_that_have_ended() -> None:
    specs = [spec(0, 10, 1), spec(1, 10, 2, 0.1), spec(2, 30, 5, 0.2), spec(3, 10, 1, 0.3)]
    outcome = run(alone(kind=Static(WINDOW), max_requests=2), specs)
    _, short, longest, later = outcome.served
    prompts_s = 1 + 2 * 30 * COST.prompt_s
    decodes_s = sum(COST.step_s(2, 2 * (30 + step), 0, 0) for step in range(4))
    assert short.ttft_s == pytest.approx(1.1 + prompts_s - 0.1)
    assert longest.jct_s == pytest.approx(1.1 + prompts_s + decodes_s - 0.2)
    assert later.ttft_s == pytest.approx(1.1 + prompts_s + decodes_s + 1.1 - 0.3)


def test_a_static_batch_frees_all_blocks_at_its_end() -> None:
    late = [spec(number, 10, 3 * number, 0.1 * number) for number in range(1, 9)]
    found = steps(alone(kind=Static(WINDOW), kv_blocks=16), [spec(0, 10, 1), *late])
    assert [len(each.prompts) for each in found if each.prompts] == [1, 4, 4]


def test_reservations_of_orca_bound_the_batch() -> None:
    specs = [spec(number, 10, 20, 0.1 * number) for number in range(3)]
    orca = simulate(alone(kind=Orca(WINDOW), kv_blocks=8), specs)
    paged = simulate(alone(kind=Stock(64), kv_blocks=8), specs)
    end_s = min(each.spec.arrival_s + each.jct_s for each in orca[:2])
    assert orca[2].spec.arrival_s + orca[2].ttft_s > end_s
    assert paged[2].ttft_s < 4


def test_a_whole_prompt_of_orca_stalls_the_decodes_of_its_step() -> None:
    specs = [spec(0, 10, 20), spec(1, 400, 2, arrival_s=5.0)]
    stalled, _ = simulate(alone(kind=Orca(512)), specs)
    assert max_itl_s(stalled) == pytest.approx(COST.step_s(1, 14, 400, 0))


def test_decodes_of_vllm_2023_wait_while_prompts_are_computed() -> None:
    first, second = simulate(alone(kind=PromptsFirst()), [spec(0, 10, 3), spec(1, 10, 2, 0.5)])
    both_s, last_s = COST.step_s(2, 20, 0, 0), COST.step_s(1, 11, 0, 0)
    assert second.ttft_s == pytest.approx(1.1 + 1.1 - 0.5)
    assert max_itl_s(first) == pytest.approx(1.1 + both_s)
    assert first.jct_s == pytest.approx(1.1 + 1.1 + both_s + last_s)


def test_a_cadence_leaves_steps_to_decodes_alone() -> None:
    specs = [spec(0, 10, 20), spec(1, 50, 2, arrival_s=3.0)]
    found = steps(alone(kind=Cadence(21, interval=3)), specs)
    parts = [(index, step.prompts) for index, step in enumerate(found) if step.prompts]
    assert [prompts for _, prompts in parts] == [[(0, 10)], [(1, 20)], [(1, 20)], [(1, 10)]]
    assert [after - before for (before, _), (after, _) in itertools.pairwise(parts[1:])] == [3, 3]


def test_a_new_request_of_fastserve_interrupts_one_that_has_run_for_long() -> None:
    specs = [spec(0, 10, 60), spec(1, 10, 3, arrival_s=30.0)]
    long, short = simulate(alone(kind=FastServe(), max_requests=1), specs)
    step_s = COST.step_s(1, 70, 0, 0)
    # Its second quantum holds a step and a part of the next; then the other one is in it, too.
    assert short.jct_s < 1.1 + decode_s(10, 2) + step_s
    assert long.jct_s == pytest.approx(1.1 + decode_s(10, 59) + 1.1 + decode_s(10, 2))


def test_a_long_prompt_of_fastserve_skips_the_levels_that_cannot_hold_it() -> None:
    specs = [spec(0, 10, 3), spec(1, 500, 2, arrival_s=0.1)]
    first, long = simulate(alone(kind=FastServe(), max_requests=1), specs)
    assert first.jct_s == pytest.approx(1.1 + decode_s(10, 2))
    assert long.ttft_s == pytest.approx(first.jct_s - 0.1 + COST.step_s(0, 0, 500, 0))


@pytest.mark.parametrize(("starving_s", "is_served"), [(15.0, True), (1e9, False)])
def test_what_starves_in_fastserve_rises(starving_s: float, is_served: bool) -> None:
    stream = [spec(number, 10, 2, 2.3 * number) for number in range(1, 200)]
    kind = FastServe(starving_s=starving_s)
    long, *short = simulate(alone(kind=kind, max_requests=1), [spec(0, 10, 20), *stream])
    assert (long.jct_s < max(each.spec.arrival_s for each in short)) == is_served


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 80), st.floats(0, 60)),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 6),
    st.floats(1, 100),
)
def test_fastserve_computes_everything_once(
    drawn: list[tuple[int, int, float]], most: int, starving_s: float
) -> None:
    """Memory for one or two of the longest requests: whatever is interrupted keeps its KV."""
    specs = [spec(number, *each) for number, each in enumerate(drawn)]
    config = alone(kind=FastServe(starving_s=starving_s), max_requests=most, kv_blocks=40)
    found = steps(config, specs)
    assert sorted(share for each in found for share in each.prompts) == [
        (each.id, each.prompt_tokens) for each in specs
    ]
    decodes = Counter(number for each in found for number in each.decodes)
    assert decodes == +Counter({each.id: each.output_tokens - 1 for each in specs})
    assert all(len(each.decodes) + len(each.prompts) <= most for each in found)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (PromptsFirst(), [1, 16, 4]),
        (PromptsFirst(most_prompts=9), [1, 9, 9, 2]),
        (PromptsFirst(most_tokens=120), [1, 12, 8]),
        (PromptsFirst(most_tokens=5), [1] * 21),
    ],
)
def test_a_step_of_vllm_2023_is_bounded_by_prompts_and_tokens(
    kind: EngineKind, sizes: list[int]
) -> None:
    specs = [spec(0, 10, 1), *(spec(number, 10, 1, 0.5) for number in range(1, 21))]
    found = steps(alone(kind=kind), specs)
    assert [len(each.prompts) for each in found] == sizes


def test_unchunked_prompts_share_a_step_only_if_they_fit_completely() -> None:
    specs = [spec(0, 10, 1), spec(1, 12, 1, 0.1), spec(2, 8, 1, 0.2), spec(3, 50, 1, 0.3)]
    found = steps(pair(chunk_tokens=20, **UNCHUNKED), [*specs, spec(4, 5, 1, 0.4)])
    assert [[number for number, _ in each.prompts] for each in found] == [[0], [1, 2], [3], [4]]


def test_an_unchunked_prompt_preempts_the_newest_decode_at_most_twice() -> None:
    specs = [spec(0, 30, 60), spec(1, 30, 60, 0.1)]
    specs += [spec(2 + number, 50, 2, 50 + 6.0 * number) for number in range(4)]
    served = simulate(alone(kv_blocks=12, chunk_tokens=64, **UNCHUNKED), specs)
    assert [each.preemptions for each in served[:2]] == [0, 2]
    assert [each.ttft_s > 8 for each in served[2:]] == [False, False, True, True]


# -- modes -----------------------------------------------------------------------------------


def test_splitwise_moves_a_machine_into_the_mixed_pool_for_a_burst_and_back() -> None:
    machine = engine(chunk_tokens=50, **UNCHUNKED)
    burst = [spec(number, 45, 10, 0.01 * number) for number in range(20)]
    calm = [spec(number, 40, 10, 100 + 4.0 * number) for number in range(20, 30)]
    served = simulate(
        ClusterConfig(make_instances(2, 2, engine=machine), SplitwiseMode), [*burst, *calm]
    )
    assert {str(each.prefill) for each in served[:20]} > {"prefill-0", "prefill-1"}
    assert {each.prefill for each in served[20:]} <= {"prefill-0", "prefill-1"}
    assert {each.decode for each in served[20:]} == {"decode-0", "decode-1"}


def test_mooncake_refuses_requests_that_would_be_late() -> None:
    burst = [spec(number, 500, 5, 0.05 * number) for number in range(40)]
    mode = partial(MooncakeMode, objective=Objective(2.0, 0.1))
    config = ClusterConfig(make_instances(1, 1), mode)
    outcome = run(config, burst)
    assert len(outcome.refused) > 20
    assert all("first token expected in" in each.reason for each in outcome.refused)
    assert not run(ClusterConfig(make_instances(1, 1), MooncakeMode), burst[:10]).refused


def test_mooncake_refuses_requests_without_room_to_be_decoded() -> None:
    cluster = (
        InstanceConfig(InstanceId("p"), Role.PREFILL, ENGINE),
        InstanceConfig(InstanceId("d"), Role.DECODE, engine(kv_blocks=10, chunk_tokens=8)),
    )
    specs = [spec(number, 60, 80, 2.5 * number) for number in range(6)]
    outcome = run(ClusterConfig(cluster, MooncakeMode), specs)
    assert {each.reason for each in outcome.refused} == {"no decode instance has room for its KV"}


def test_mooncake_computes_short_prompts_where_they_are_decoded() -> None:
    cluster = (
        InstanceConfig(InstanceId("p"), Role.PREFILL, ENGINE),
        InstanceConfig(InstanceId("d"), Role.DECODE, engine(chunk_tokens=30)),
    )
    specs = [spec(0, 25, 5), spec(1, 40, 5, 20.0), spec(2, 20, 5, 40.0), spec(3, 5, 5, 60.0)]
    free = simulate(ClusterConfig(cluster, MooncakeMode), specs)
    mode = partial(MooncakeMode, objective=Objective(9.0, 1.21))
    strict = simulate(ClusterConfig(cluster, mode), specs)
    assert [each.prefill for each in free] == ["d", "p", "d", "d"]
    assert [each.prefill for each in strict] == ["p", "p", "d", "d"]  # 1.25, 1.4, 1.2, 1.05 s


# -- the command ------------------------------------------------------------------------------


def test_the_command_prints_a_row_per_system_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--system", "static", "mooncake", "--instances", "3", "--prefill-instances", "2"]
    found = tmp_path / "found.json"
    assert main([*words, "--requests", "40", "--rate", "30", "--json", str(found)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines if re.match(r"\s*(sta|moo)", line)]
    assert [row[0] for row in rows] == ["static 3", "mooncake 2P+1D"]
    refused = [each["refused"] for each in json.loads(found.read_text())["systems"]]
    assert refused == [int(row[10]) for row in rows]
    assert 0 == refused[0] < refused[1] < 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--system", "tetri", "--instances", "1"], "at least 2"),
        (["--system", "adaptive", "--instances", "1"], "at least 2"),
        (["--system", "tetri", "--prefill-instances", "2"], "2 of 2 instances"),
        (["--system", "vllm", "--instances", "0"], "0 instances"),
        (["--system", "orca", "--window", "0"], "window tokens: 0"),
        (["--system", "orca", "--window", "500"], "longer than the window of both-0: 500"),
        (["--system", "static", "--kv-blocks", "10"], "does not fit into the KV pool"),
    ],
)
def test_wrong_options_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--requests", "20"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
