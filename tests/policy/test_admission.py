"""When a request enters the decode batch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from random import Random
from statistics import fmean
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policy.decoding import Job, Run, decode, draw_jobs
from vllm_tetri.policy.admission import (
    ADMISSIONS,
    ENTRY_ORDERS,
    Admission,
    AdmissionPolicy,
    DecodeGate,
)
from vllm_tetri.policy.lengths import End, Lengths, OutputLengths

GREEDY, STATIC, DYNAMIC = ADMISSIONS.values()
RESERVES = STATIC, DYNAMIC
Held = tuple[int, int]


def admission(
    policy: AdmissionPolicy = DYNAMIC,
    running: list[Held] | None = None,
    *,
    total_blocks: int = 10,
    block_size: int = 10,
    used_blocks: int | None = None,
) -> Admission:
    """One that has begun a step; unless said, nothing but `running` holds blocks."""
    running = running or []
    if used_blocks is None:
        used_blocks = sum(-(-held // block_size) for held, _ in running)
    begun = Admission(policy, block_size=block_size, total_blocks=total_blocks)
    begun.begin(total_blocks - used_blocks, running)
    return begun


# -- rules ---------------------------------------------------------------------


def test_greedy_leaves_it_to_vllm() -> None:
    assert admission(GREEDY, [(90, 500)]).admit(50, 500)


def test_static_counts_no_block_that_comes_back() -> None:
    running = [(20, 10), (20, 30)]  # 4 blocks now, 4 more to come
    assert admission(STATIC, running).admit(10, 10)
    assert not admission(STATIC, running).admit(10, 11)


def test_dynamic_counts_blocks_that_come_back_before_they_are_needed() -> None:
    running = [(50, 5), (10, 10)]  # 6 blocks back after 5 steps
    assert admission(DYNAMIC, running).admit(10, 70)
    assert not admission(STATIC, running).admit(10, 70)
    assert not admission(DYNAMIC, running).admit(30, 5)  # in 5 steps: 6, 2 and 4 blocks


def test_dynamic_looks_at_every_end_and_not_only_the_next() -> None:
    running = [(10, 1), (10, 40), (10, 40)]
    # After 1 step everybody has 2 blocks; after 40 those two have 5 each.
    assert not admission(DYNAMIC, running).admit(10, 40)
    assert admission(DYNAMIC, running).admit(10, 1)


def test_what_happens_after_its_end_is_not_its_fault() -> None:
    assert admission(DYNAMIC, [(10, 500)]).admit(10, 5)


def test_a_request_that_does_not_fit_now_waits() -> None:
    assert not admission(DYNAMIC, [(80, 1)]).admit(21, 1)


def test_what_was_admitted_counts_for_the_next_one() -> None:
    begun = admission(DYNAMIC, [(10, 40)])
    assert begun.admit(10, 40)
    assert not begun.admit(10, 40)


def test_blocks_that_others_hold_do_not_come_back() -> None:
    assert admission(DYNAMIC, [(10, 5)], used_blocks=5).admit(10, 35)
    assert not admission(DYNAMIC, [(10, 5)], used_blocks=7).admit(10, 35)


def test_shared_blocks_do_not_shut_out_who_fits_anyway() -> None:
    running = [(50, 9)] * 4  # 20 blocks if each had its own; 4 of 5 are common
    assert admission(DYNAMIC, running, used_blocks=5, total_blocks=11).admit(5, 5)
    assert not admission(DYNAMIC, running, used_blocks=5, total_blocks=9).admit(5, 5)


def test_blocks_that_others_hold_already_are_not_needed_again() -> None:
    """Requests with a prefix in common: 4 blocks of 5 each, of which the batch has one set."""
    running = [(50, 9)] * 4
    begun = partial(admission, DYNAMIC, running, total_blocks=14, used_blocks=8)
    assert not begun().admit(50, 9)
    found = begun()
    assert found.admit(50, 9, shared_blocks=4)
    assert not found.admit(
        50, 9, shared_blocks=4
    )  # six would grow by a block each, and four are left


def test_blocks_that_are_kept_for_a_request_are_not_needed_twice() -> None:
    pinned = admission(DYNAMIC, [(5, 3)], total_blocks=10, used_blocks=9)
    assert pinned.admit(85, 4, shared_blocks=8)


def test_reserved_blocks_are_what_is_kept_beyond_what_is_held() -> None:
    running = [(20, 10), (20, 30)]
    assert admission(GREEDY, running).reserved_blocks == 0
    assert admission(STATIC, running).reserved_blocks == 1 + 3
    # In 10 steps 3 + 3 blocks, in 30 steps the last one has 5.
    assert admission(DYNAMIC, running).reserved_blocks == 2
    assert admission(DYNAMIC).reserved_blocks == 0


holders = st.tuples(st.integers(1, 60), st.integers(1, 80))


@given(
    st.lists(holders, min_size=1, max_size=8),
    st.lists(holders, min_size=1, max_size=4),
    st.integers(1, 20),
    st.integers(0, 3),
    st.integers(0, 40),
)
def test_dynamic_admits_exactly_what_fits_at_every_step_of_its_life(
    running: list[Held], held: list[Held], block_size: int, other_blocks: int, spare_blocks: int
) -> None:
    def blocks(tokens: int) -> int:
        return -(-tokens // block_size)

    used_blocks = sum(blocks(tokens) for tokens, _ in running) + other_blocks
    total_blocks = used_blocks + spare_blocks
    begun = admission(
        DYNAMIC, running, block_size=block_size, total_blocks=total_blocks, used_blocks=used_blocks
    )
    batch = list(running)
    for tokens, rest in held:
        fits = all(
            other_blocks
            + sum(blocks(each + steps) for each, left in [*batch, (tokens, rest)] if left >= steps)
            <= total_blocks
            for steps in range(rest + 1)
        )
        assert begun.admit(tokens, rest) == fits
        if not fits:
            break
        batch.append((tokens, rest))


@given(
    st.sampled_from(list(ADMISSIONS.values())),
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.integers(),
)
def test_an_empty_batch_admits_whatever_comes(
    policy: AdmissionPolicy, tokens: int, rest: int, free_blocks: int
) -> None:
    begun = Admission(policy, block_size=16, total_blocks=10)
    begun.begin(min(10, free_blocks), [])
    assert begun.admit(tokens, rest)


# -- trust -----------------------------------------------------------------------


def after(answers: list[tuple[int, int]], running: list[Held]) -> Admission:
    begun = admission(DYNAMIC, running)
    for expected_tokens, actual_tokens in answers:
        begun.finished(expected_tokens, actual_tokens)
    return begun


@pytest.mark.parametrize(
    "answers",
    [[(10, 500)] * 50, [(100, 200), (200, 100)], [(1000, 100)] * 100 + [(100, 100)] * 500],
)
def test_predictions_that_are_not_too_long_in_the_mean_are_trusted(
    answers: list[tuple[int, int]],
) -> None:
    assert after(answers, []).trust == 1.0


def test_predictions_that_are_far_too_long_make_it_greedy() -> None:
    begun = after([(1000, 100)] * 3, [(10, 85)])
    assert begun.trust == 0.0
    assert begun.admit(80, 500)
    assert begun.reserved_blocks == 0


def test_in_between_less_is_reserved() -> None:
    begun = after([(118, 100)] * 1000, [(10, 70)])  # 1.18 is in the middle
    assert begun.trust == pytest.approx(0.5, abs=0.03)
    assert 3 <= begun.reserved_blocks <= 4  # of 7
    assert begun.admit(10, 70)  # 16 blocks at most, where there are 10
    assert not begun.admit(10, 70)


# -- guarantees, on a simulated instance -------------------------------------------


def truth(job: Job) -> int:
    return job.answer_tokens


jobs_at_random = st.lists(
    st.tuples(st.floats(0, 0.5), st.integers(1, 100), st.integers(2, 120)), min_size=1, max_size=40
)


@settings(max_examples=60)
@given(jobs_at_random, st.sampled_from(RESERVES), st.sampled_from([1, 4, 16]), st.integers(0, 30))
def test_right_predictions_never_lead_to_a_preemption(
    drawn: list[tuple[float, int, int]], policy: AdmissionPolicy, block_size: int, spare_blocks: int
) -> None:
    now, jobs = 0.0, []
    for gap_s, prompt_tokens, answer_tokens in drawn:
        now += gap_s
        jobs.append(Job(now, prompt_tokens, answer_tokens))
    largest = max(-(-(job.prompt_tokens + job.answer_tokens) // block_size) for job in jobs)
    run = decode(jobs, policy, truth, total_blocks=largest + spare_blocks, block_size=block_size)
    assert run.preemptions == 0
    assert run.refusals_when_empty == 0
    assert run.order == jobs
    assert all(job.end_s for job in jobs)


@settings(max_examples=40)
@given(
    jobs_at_random,
    st.sampled_from(list(ADMISSIONS.values())),
    st.integers(0, 30),
    st.randoms(use_true_random=False),
)
def test_everybody_is_served_in_order_whatever_is_predicted(
    drawn: list[tuple[float, int, int]], policy: AdmissionPolicy, spare_blocks: int, rng: Random
) -> None:
    jobs = [Job(0.0, prompt_tokens, answer_tokens) for _, prompt_tokens, answer_tokens in drawn]
    largest = max(-(-(job.prompt_tokens + job.answer_tokens) // 16) for job in jobs)
    run = decode(
        jobs, policy, lambda _: rng.choice([1, 50, 10**6]), total_blocks=largest + spare_blocks
    )
    assert run.refusals_when_empty == 0
    assert run.order == jobs


COUNT = 150
PER_S = {"mixed": 0.9, "long": 0.3, "short": 4.8, "two kinds": 0.6}
CASES = [("mixed", False), ("mixed", True), ("long", True), ("short", False), ("two kinds", True)]
SEEDS = (1, 2)
TOTAL_BLOCKS = 300
WINDOW = 4096


def jobs_of(kind: str, come_one_by_one: bool, seed: int) -> list[Job]:
    per_s = PER_S[kind] if come_one_by_one else None
    return draw_jobs(Random(seed), COUNT, kind, per_s=per_s)


@cache
def greedy(kind: str, come_one_by_one: bool, seed: int) -> Run:
    jobs = jobs_of(kind, come_one_by_one, seed)
    return decode(jobs, GREEDY, truth, total_blocks=TOTAL_BLOCKS)


def _shuffled(jobs: list[Job], rng: Random) -> Iterator[int]:
    answers = [job.answer_tokens for job in jobs]
    rng.shuffle(answers)
    return iter(answers)


def _inverted(jobs: list[Job], rng: Random) -> Iterator[int]:
    ordered = sorted(job.answer_tokens for job in jobs)
    opposite = dict(zip(ordered, reversed(ordered), strict=True))
    return (opposite[job.answer_tokens] for job in jobs)


GUESSES: dict[str, Callable[[list[Job], Random], Iterator[int]]] = {
    "the window": lambda jobs, rng: (WINDOW for _ in jobs),
    "ten times": lambda jobs, rng: (10 * job.answer_tokens for job in jobs),
    "half more": lambda jobs, rng: (3 * job.answer_tokens // 2 for job in jobs),
    "a tenth": lambda jobs, rng: (job.answer_tokens // 10 for job in jobs),
    "nothing": lambda jobs, rng: (1 for _ in jobs),
    "at random": lambda jobs, rng: (rng.randint(1, 2000) for _ in jobs),
    "shuffled": _shuffled,
    "inverted": _inverted,
}


def against_greedy(
    kind: str, come_one_by_one: bool, run_of: Callable[[list[Job], int], Run]
) -> tuple[float, float]:
    """Mean JCT and preemptions as parts of greedy's, over the seeds. What the first three
    answers took longer is taken off: nobody can know better before."""
    parts, preemptions, greedy_preemptions = [], 0, 0
    for seed in SEEDS:
        base = greedy(kind, come_one_by_one, seed)
        run = run_of(jobs_of(kind, come_one_by_one, seed), seed)
        later_s = max(0.0, run.settled_s - base.settled_s)
        parts.append((run.mean_jct_s - later_s) / base.mean_jct_s)
        preemptions += run.preemptions
        greedy_preemptions += base.preemptions
    return fmean(parts), preemptions / max(1, greedy_preemptions)


@pytest.mark.parametrize(("kind", "come_one_by_one"), CASES)
@pytest.mark.parametrize("name", GUESSES)
def test_no_misprediction_costs_more_than_a_twentieth(
    kind: str, come_one_by_one: bool, name: str
) -> None:
    def run_of(jobs: list[Job], seed: int) -> Run:
        drawn = zip(jobs, GUESSES[name](jobs, Random(seed)), strict=True)
        guesses = {id(job): min(guess, WINDOW) for job, guess in drawn}
        return decode(jobs, DYNAMIC, lambda job: guesses[id(job)], total_blocks=TOTAL_BLOCKS)

    jct, _ = against_greedy(kind, come_one_by_one, run_of)
    assert jct <= 1.05


@pytest.mark.parametrize(
    ("kind", "come_one_by_one"),
    [("mixed", False), ("mixed", True), ("long", True), ("short", False)],
)
def test_right_predictions_beat_greedy_under_pressure(kind: str, come_one_by_one: bool) -> None:
    def run_of(jobs: list[Job], seed: int) -> Run:
        return decode(jobs, DYNAMIC, truth, total_blocks=TOTAL_BLOCKS)

    jct, preemptions = against_greedy(kind, come_one_by_one, run_of)
    assert preemptions == 0
    assert jct < 0.97


def test_learnt_lengths_alone_avoid_most_preemptions() -> None:
    """Without any predictor: every answer is one of all that were seen."""

    def run_of(jobs: list[Job], seed: int) -> Run:
        lengths = Lengths()
        for job in draw_jobs(Random(99), 300, "mixed", per_s=None):
            lengths.observe(None, job.answer_tokens)

        def believed(job: Job) -> int:
            return lengths.total_tokens(None, job.produced_tokens, End.EXPECTED)

        return decode(jobs, DYNAMIC, believed, total_blocks=TOTAL_BLOCKS)

    jct, preemptions = against_greedy("mixed", False, run_of)
    assert preemptions < 0.5
    assert jct < 1.0


# -- which one is next ------------------------------------------------------------------


def gate(order: str) -> DecodeGate:
    lengths = OutputLengths(Lengths(), lambda name: None, window=100_000)
    return DecodeGate(
        GREEDY, End.EXPECTED, lengths=lengths, block_size=16, total_blocks=1000,
        entry_weight=ENTRY_ORDERS[order],
    )  # fmt: skip


def asks(name: str, output_tokens: int) -> SimpleNamespace:
    """A request of which nothing is predicted, and whose bound is less than is usual."""
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=1, num_tokens=2, num_computed_tokens=1,
        num_output_tokens=1, num_output_placeholders=0, max_tokens=output_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("order", ENTRY_ORDERS)
@given(st.lists(st.tuples(st.integers(2, 150), st.booleans()), min_size=1, max_size=60))
def test_nothing_is_overtaken_by_more_than_its_own_output_is_worth(
    order: str, plan: list[tuple[int, bool]]
) -> None:
    """Requests come and enter in turns, the first of the line."""
    decides, weight = gate(order), ENTRY_ORDERS[order]
    line: deque[SimpleNamespace] = deque()
    overtaken: Counter[str] = Counter()  # tokens of those that came later and entered before
    largest = max(tokens for tokens, _ in plan)
    for arrival, (tokens, enters) in enumerate(plan):
        decides.join(line, asks(str(arrival), tokens))
        while line and (enters or arrival == len(plan) - 1):
            entry = line.popleft()
            decides.begin_step(list, 0.0, free_blocks=1000, tokens_per_step=1000)
            assert decides.admit(entry, 0)
            for other in line:
                if int(other.request_id) < int(entry.request_id):
                    overtaken[other.request_id] += entry.max_tokens
                    bound = weight * other.max_tokens + largest
                    assert overtaken[other.request_id] <= bound
                    assert weight
            enters = False
    assert not line


def test_the_shortest_is_next_and_equals_go_by_arrival() -> None:
    decides, line = gate("shortest"), deque[SimpleNamespace]()
    for name, tokens in (("a", 90), ("b", 20), ("c", 90), ("d", 40)):
        decides.join(line, asks(name, tokens))
    assert [each.request_id for each in line] == ["b", "d", "a", "c"]
    decides.rejoin(line, line.pop(), was_running=True)
    decides.join(line, asks("e", 2))
    assert [each.request_id for each in line] == ["c", "e", "b", "d", "a"]
    for each in line:
        decides.forget(each.request_id)
    assert not decides.places
