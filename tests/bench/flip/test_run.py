"""What is made of a run."""

from __future__ import annotations

import time

import pytest

from tests.bench.flip.builders import AFTER, ANSWERED, BEFORE, SLO, made
from vllm_tetri.bench.arrivals import figures
from vllm_tetri.bench.flip.run import Look, Watch, flipped


def test_a_request_is_in_time_with_both_its_first_and_its_further_tokens() -> None:
    found = figures(ANSWERED, SLO)
    assert found.requests == 3
    assert found.ttft_s == pytest.approx(10 / 3)
    assert found.jct_s == pytest.approx(13 / 3)
    assert found.jct_p99_s == pytest.approx(6.94)
    assert found.tpot_s == pytest.approx(0.4 / 3)
    assert found.attained == pytest.approx(1 / 3)


def test_a_run_has_figures_of_its_phases_and_what_it_took() -> None:
    run = made()
    assert [phase and phase.requests for phase in run.phases] == [2, 1, None, None]
    assert (run.makespan_s, run.busy_s, run.late_s, run.flips) == (65.0, 40.0, 0.02, 1)


def test_flips_of_the_run_are_known_with_how_long_they_took() -> None:
    (found,) = made().flipped
    assert (found.instance, found.source, found.target) == ("c", "decode", "prefill")
    assert (found.stage, found.drain_s, found.commit_s) == ("done", 6.0, 0.02)
    assert found.at_s == pytest.approx(2.0)


def test_a_flip_that_was_first_seen_done_was_ordered_before_its_drain() -> None:
    (found,) = flipped([Look(4.5, AFTER)], BEFORE, 0.5)
    assert found.at_s == pytest.approx(1.0)


def test_the_timeline_has_roles_and_requests() -> None:
    found = made().timeline
    assert found.at_s == pytest.approx([0.0, 2.2, 9.0])
    assert (found.prefill, found.decode) == ([1, 1, 2], [2, 1, 1])
    assert (found.prompts, found.answers) == ([0, 1, 0], [0, 1, 0])


def test_the_cluster_is_looked_at_until_it_is_left() -> None:
    rows = iter([{}, BEFORE])
    with Watch(lambda: next(rows, AFTER), time.monotonic()) as watch:
        deadline = time.monotonic() + 30
        while not watch.looks and time.monotonic() < deadline:
            time.sleep(0.01)
    assert watch.looks[0].rows == BEFORE
