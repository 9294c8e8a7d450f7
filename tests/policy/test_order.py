"""The order of prompts, and what it promises to each of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.policy.order import ORDERS, SRTF_BOUND, PrefillQueues

POLICIES = list(ORDERS)
NON_PREEMPTIVE = ["fcfs", "sjf", "ljf"]


class Engine:
    """What a prefill instance does with the queues: a chunk after the other.

    Time is prompt tokens computed, so a step of a full chunk takes `chunk`.
    """

    def __init__(self, policy: str, sched_batch: int, chunk: int) -> None:
        self.queues = PrefillQueues(ORDERS[policy], sched_batch)
        self.chunk = chunk
        self.left: dict[str, int] = {}
        self.started: list[str] = []
        self.first_chunk: list[str] = []  # in order of start
        self.done_at: dict[str, int] = {}
        self.came_at: dict[str, int] = {}
        self.fcfs_tokens: dict[str, int] = {}
        self.time = 0
        self.steps: list[dict[str, int]] = []

    def add(self, name: str, tokens: int, priority: int = 0) -> None:
        self.left[name] = tokens
        self.came_at[name] = self.time
        self.fcfs_tokens[name] = sum(self.left.values())
        self.queues.add(name, tokens, priority)

    def abort(self, name: str) -> None:
        if self.left.pop(name, None) is not None:
            self.queues.remove(name)
            if name in self.started:
                self.started.remove(name)

    def refill(self, *, is_chunk_open: bool = False) -> None:
        batch = self.queues.pull(is_chunk_open=is_chunk_open)
        self.queues.enter([(name, self.left[name]) for name in batch])

    def step(self) -> None:
        self.refill()
        shares = self.queues.plan(self.chunk)
        room, took = self.chunk, {}
        for name in list(self.started):
            took[name] = min(room, self.left[name], shares.get(name, room))
            room -= took[name]
        while room:
            self.refill(is_chunk_open=True)
            if self.queues.head() is None:
                break
            name = self.queues.start()
            self.started.append(name)
            self.first_chunk.append(name)
            took[name] = min(room, self.left[name])
            room -= took[name]
        self.steps.append(took)
        self.time += sum(took.values())
        for name, tokens in took.items():
            if tokens:
                self.left[name] -= tokens
                self.queues.computed(name, tokens, self.left[name])
                if not self.left[name]:
                    del self.left[name]
                    self.started.remove(name)
                    self.done_at[name] = self.time

    def run(self) -> None:
        while self.left:
            self.step()


def run_at_once(
    policy: str, lengths: Sequence[int], *, sched_batch: int = 16, chunk: int = 10
) -> Engine:
    engine = Engine(policy, sched_batch, chunk)
    for index, tokens in enumerate(lengths):
        engine.add(str(index), tokens)
    engine.run()
    return engine


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["0", "1", "2", "3"]),
        ("sjf", ["1", "3", "0", "2"]),
        ("ljf", ["2", "0", "3", "1"]),
        ("srtf", ["1", "3", "0", "2"]),
    ],
)
def test_a_batch_starts_in_the_order_of_its_policy(policy: str, expected: list[str]) -> None:
    assert run_at_once(policy, [30, 5, 40, 20]).first_chunk == expected


def test_equal_lengths_keep_their_order_of_arrival() -> None:
    for policy in POLICIES:
        assert run_at_once(policy, [7, 7, 7]).first_chunk == ["0", "1", "2"]


def test_batches_are_ordered_one_after_the_other() -> None:
    engine = run_at_once("sjf", [9, 8, 1, 2], sched_batch=2)
    assert engine.first_chunk == ["1", "0", "2", "3"]


def test_a_partial_batch_goes_at_once() -> None:
    queues = PrefillQueues(ORDERS["sjf"], 16)
    queues.add("only", 5)
    assert queues.pull() == ["only"]


def test_a_prompt_that_comes_while_a_batch_is_scheduled_waits_for_the_next() -> None:
    engine = Engine("sjf", sched_batch=2, chunk=10)
    engine.add("long", 50)
    engine.add("longer", 60)
    engine.step()
    engine.add("short", 1)
    engine.run()
    assert engine.first_chunk == ["long", "longer", "short"]


def test_what_the_prefix_cache_holds_counts_as_done() -> None:
    queues = PrefillQueues(ORDERS["sjf"], 16)
    queues.add("cached", 1000)
    queues.add("short", 100)
    assert queues.pull() == ["cached", "short"]
    queues.enter([("cached", 40), ("short", 100)])
    assert queues.start() == "cached"
    assert queues.unfinished_tokens == 140


@pytest.mark.parametrize("policy", POLICIES)
def test_priority_goes_before_length_within_a_batch(policy: str) -> None:
    engine = Engine(policy, sched_batch=16, chunk=10)
    engine.add("short", 1, priority=1)
    engine.add("urgent", 90, priority=0)
    engine.add("long", 100, priority=1)
    engine.run()
    assert engine.first_chunk[0] == "urgent"


def test_a_shorter_prompt_interrupts_at_a_chunk_border() -> None:
    engine = Engine("srtf", sched_batch=16, chunk=10)
    engine.add("long", 100)
    engine.step()
    engine.add("short", 4)
    engine.step()
    assert engine.steps[1] == {"long": 6, "short": 4}  # and the chunk is full
    engine.add("two chunks", 20)
    engine.step()
    assert engine.steps[2] == {"long": 0, "two chunks": 10}


def test_a_nearly_finished_prompt_is_not_interrupted() -> None:
    engine = Engine("srtf", sched_batch=16, chunk=10)
    engine.add("long", 12)
    engine.step()
    engine.add("short", 4)
    engine.step()
    assert engine.steps[1] == {"long": 2, "short": 4}


def test_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    engine = Engine("srtf", sched_batch=2, chunk=10)
    engine.add("long", 50)
    for index in range(100):
        engine.add(f"short {index}", 10)
        engine.step()
    assert engine.done_at["long"] <= SRTF_BOUND * 50 + (2 + 2) * 10


def test_without_a_bound_it_would_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above tests something."""
    monkeypatch.setattr("vllm_tetri.policy.order.SRTF_BOUND", 10**9)
    engine = Engine("srtf", sched_batch=2, chunk=10)
    engine.add("long", 50)
    for index in range(100):
        engine.add(f"short {index}", 10)
        engine.step()
    assert "long" not in engine.done_at


def test_a_preempted_prompt_is_next_and_starts_again() -> None:
    queues = PrefillQueues(ORDERS["sjf"], 16)
    queues.add("a", 10)
    queues.add("b", 20)
    queues.enter([("a", 10), ("b", 20)])
    queues.start()
    queues.computed("a", 6, 4)
    queues.put_back("a", 10)
    assert (queues.head(), queues.unfinished_tokens, queues.num_started) == ("a", 30, 0)


def test_an_aborted_prompt_is_gone_wherever_it_was() -> None:
    queues = PrefillQueues(ORDERS["srtf"], 2)
    for name in "abc":
        queues.add(name, 10)
    queues.enter([(name, 10) for name in queues.pull()])
    queues.start()
    for name in ("a", "b", "c", "unknown"):
        queues.remove(name)
    assert (len(queues), queues.num_started, queues.unfinished_tokens) == (0, 0, 0)
    assert queues.pull() == []


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PrefillQueues(ORDERS["sjf"], 0)


# -- properties -----------------------------------------------------------------

arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it comes
        st.one_of(st.integers(1, 30), st.integers(1, 400)),
    ),
    min_size=1,
    max_size=40,
)


def play(policy: str, coming: Sequence[tuple[int, int]], batch: int, chunk: int) -> Engine:
    engine = Engine(policy, batch, chunk)
    for index, (pause, tokens) in enumerate(coming):
        for _ in range(pause):
            engine.step()
        engine.add(str(index), tokens)
    engine.run()
    return engine


@given(st.sampled_from(POLICIES), arrivals, st.integers(1, 20), st.integers(1, 64))
def test_every_prompt_is_computed_once_in_full_chunks(
    policy: str, coming: Sequence[tuple[int, int]], batch: int, chunk: int
) -> None:
    engine = play(policy, coming, batch, chunk)
    computed = [sum(step.get(str(i), 0) for step in engine.steps) for i in range(len(coming))]
    assert computed == [tokens for _, tokens in coming]
    left = 0
    for step, came in zip(engine.steps, _came_before(engine, coming), strict=True):
        left += came
        assert sum(step.values()) == min(chunk, left)  # merged without a gap
        left -= sum(step.values())
    assert engine.queues.unfinished_tokens == 0
    assert len(engine.queues) == engine.queues.num_started == 0


def _came_before(engine: Engine, coming: Sequence[tuple[int, int]]) -> list[int]:
    """Tokens that came before each step and after the one before it."""
    came = [0] * len(engine.steps)
    step = 0
    for pause, tokens in coming:
        step += pause
        came[min(step, len(came) - 1)] += tokens
    return came


@given(arrivals, st.integers(1, 20), st.integers(1, 64))
def test_srtf_delays_no_prompt_beyond_its_bound(
    coming: Sequence[tuple[int, int]], batch: int, chunk: int
) -> None:
    engine = play("srtf", coming, batch, chunk)
    for name, done in engine.done_at.items():
        waited = done - engine.came_at[name]
        assert waited <= SRTF_BOUND * engine.fcfs_tokens[name] + (batch + 2) * chunk, name


@given(arrivals, st.integers(1, 20), st.integers(1, 64), st.sets(st.integers(0, 40)))
def test_the_bound_holds_when_others_are_aborted(
    coming: Sequence[tuple[int, int]], batch: int, chunk: int, aborted: set[int]
) -> None:
    engine = Engine("srtf", batch, chunk)
    for index, (pause, tokens) in enumerate(coming):
        for _ in range(pause):
            engine.step()
        engine.add(str(index), tokens)
        if index in aborted:
            engine.abort(str(index // 2))
    engine.run()
    for name, done in engine.done_at.items():
        waited = done - engine.came_at[name]
        assert waited <= SRTF_BOUND * engine.fcfs_tokens[name] + (batch + 2) * chunk


@given(st.sampled_from(NON_PREEMPTIVE), arrivals, st.integers(1, 20), st.integers(1, 64))
def test_prompts_wait_for_one_batch_at_most(
    policy: str, coming: Sequence[tuple[int, int]], batch: int, chunk: int
) -> None:
    """Fewer than a batch of later ones are started first."""
    engine = play(policy, coming, batch, chunk)
    for position, name in enumerate(engine.first_chunk):
        overtaking = [other for other in engine.first_chunk[:position] if int(other) > int(name)]
        assert len(overtaking) < batch


@given(st.lists(st.integers(1, 400), min_size=2, max_size=40), st.integers(1, 64))
def test_shortest_first_minimises_the_mean_of_a_full_batch(
    lengths: Sequence[int], chunk: int
) -> None:
    def mean_done(policy: str) -> float:
        engine = run_at_once(policy, lengths, sched_batch=len(lengths), chunk=chunk)
        return sum(engine.done_at.values()) / len(lengths)

    # A chunk completes everything in it at once, hence the rounding.
    for other in ("fcfs", "ljf"):
        assert mean_done("sjf") <= mean_done(other) + chunk
