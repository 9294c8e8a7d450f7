"""The order of prompts, and what it promises to each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tetri.policy import queue
from vllm_tetri.policy.order import LEVEL_TOKENS, ORDERS, SRTF_BOUND, Prompt
from vllm_tetri.policy.queue import PromptQueue

POLICIES = list(ORDERS)
NON_PREEMPTIVE = ["fcfs", "sjf", "ljf"]
PREEMPTIVE = ["srtf", "mlfq"]


class Waiting(NamedTuple):
    """What a queue reads of a request."""

    request_id: str
    num_tokens: int
    priority: int


class Engine:
    """What a prefill instance does with its queue: a chunk after the other.

    Time is prompt tokens computed, so a step of a full chunk takes `chunk`.
    """

    def __init__(
        self, policy: str, sched_batch: int = 16, chunk: int = 10, kind: Any = PromptQueue
    ) -> None:
        self.queue: PromptQueue[Any] = kind(
            ORDERS[policy], sched_batch, 10**6, lambda request: self.left[request.request_id]
        )
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
        self.queue.add(Waiting(name, tokens, priority))

    def abort(self, name: str) -> None:
        if self.left.pop(name, None) is not None:
            self.queue.discard(name)
            if name in self.started:
                self.started.remove(name)

    def preempt(self, name: str) -> None:
        if name in self.started:
            self.started.remove(name)
            request = Waiting(name, self.left[name], 0)
            self.queue.put_back(request, is_lost=True)

    def step(self) -> None:
        shares: dict[str, int] = {}
        self.queue.order_waiting()
        if self.queue.order.is_preemptive:
            shares = self.queue.share_out(self.chunk, free_blocks=10**6)
        room, took = self.chunk, {}
        for name in list(self.started):
            took[name] = min(room, self.left[name], shares.get(name, room))
            room -= took[name]
        while room and len(self.queue):
            name = self.queue.start().request_id
            self.started.append(name)
            self.first_chunk.append(name)
            took[name] = min(room, self.left[name])
            room -= took[name]
        self.steps.append(took)
        self.time += sum(took.values())
        for name, tokens in took.items():
            if tokens:
                self.left[name] -= tokens
                self.queue.computed(name, tokens, self.left[name])
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


def test_equal_lengths_keep_their_order_of_arrival() -> None:
    for policy in POLICIES:
        assert run_at_once(policy, [7, 7, 7]).first_chunk == ["0", "1", "2"]


def test_batches_are_ordered_one_after_the_other() -> None:
    engine = run_at_once("sjf", [9, 8, 1, 2], sched_batch=2)
    assert engine.first_chunk == ["1", "0", "2", "3"]


def test_a_prompt_that_comes_while_a_batch_is_scheduled_waits_for_the_next() -> None:
    engine = Engine("sjf", sched_batch=2)
    engine.add("long", 50)
    engine.add("longer", 60)
    engine.step()
    engine.add("short", 1)
    engine.run()
    assert engine.first_chunk == ["long", "longer", "short"]


def test_what_the_prefix_cache_holds_counts_as_done() -> None:
    engine = Engine("sjf")
    engine.add("cached", 1000)
    engine.add("short", 100)
    engine.left["cached"] = 40
    assert engine.queue.start().request_id == "cached"
    assert engine.queue.unfinished_tokens == 140


@pytest.mark.parametrize("policy", POLICIES)
def test_priority_goes_before_length_within_a_batch(policy: str) -> None:
    engine = Engine(policy)
    engine.add("short", 1, priority=1)
    engine.add("urgent", 90, priority=0)
    engine.add("long", 100, priority=1)
    engine.run()
    assert engine.first_chunk[0] == "urgent"


def test_a_nearly_finished_prompt_is_not_interrupted() -> None:
    engine = Engine("srtf")
    engine.add("long", 12)
    engine.step()
    engine.add("short", 4)
    engine.step()
    assert engine.steps[1] == {"long": 2, "short": 4}


def test_only_a_much_shorter_prompt_interrupts_in_a_queue_of_levels() -> None:
    engine = Engine("mlfq")
    engine.add("long", 100)
    engine.step()
    engine.add("shorter", 70)
    engine.add("short", 20)
    engine.run()
    assert engine.first_chunk == ["long", "short", "shorter"]
    assert engine.done_at["short"] < engine.done_at["long"] < engine.done_at["shorter"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_left_of_the_prompt_that_goes_first_is_known(policy: str) -> None:
    engine = Engine(policy, sched_batch=2)
    assert engine.queue.first_tokens(has_place=True) == 0
    for index, tokens in enumerate((35, 4, 60, 12, 25)):
        engine.add(str(index), tokens)
        left, first_tokens = dict(engine.left), engine.queue.first_tokens(has_place=True)
        engine.step()
        took = engine.steps[-1]
        assert (first_tokens, min(first_tokens, 10)) in {(left[each], took[each]) for each in took}


def test_the_order_of_waiting_prompts_is_open_until_one_may_start() -> None:
    engine = Engine("sjf", sched_batch=2)
    engine.add("long", 50)
    assert engine.queue.first_tokens(has_place=False) == 0
    engine.add("short", 1)
    assert engine.queue.first_tokens(has_place=True) == 1


def stream_of_short_ones(policy: str) -> Engine:
    engine = Engine(policy, sched_batch=2)
    engine.add("long", 150)
    for index in range(100):
        engine.add(f"short {index}", 10)
        engine.step()
    return engine


@pytest.mark.parametrize("policy", PREEMPTIVE)
def test_long_prompt_is_not_starved_by_a_stream_of_short_ones(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stream_of_short_ones(policy).done_at["long"] <= SRTF_BOUND * 150 + (2 + 2) * 10
    monkeypatch.setattr("vllm_tetri.policy.queue.SRTF_BOUND", 10**9)  # it would without the bound
    assert "long" not in stream_of_short_ones(policy).done_at


def test_a_preempted_prompt_is_next_and_starts_again() -> None:
    engine = Engine("sjf", chunk=6)
    engine.add("a", 10)
    engine.add("b", 20)
    queue = engine.queue
    request = queue.start()
    queue.computed("a", 6, 4)
    queue.put_back(request, is_lost=True)
    assert queue.head() is request
    assert (queue.unfinished_tokens, len(queue.started)) == (30, 0)


def test_an_aborted_prompt_is_gone_wherever_it_was() -> None:
    engine = Engine("srtf", sched_batch=2)
    for name in "abc":
        engine.add(name, 10)
    queue = engine.queue
    queue.start()
    waited = [queue.discard(name) for name in ("a", "b", "c", "unknown")]
    assert waited == [False, True, True, False]
    assert (len(queue), len(queue.started), queue.unfinished_tokens) == (0, 0, 0)
    assert list(queue) == []


# Compiled classes have no subclasses in Python; what their source defines, has.
IN_PYTHON = run_path(str(Path(queue.__file__).with_name("queue.py")))


class Sorting(IN_PYTHON["PromptQueue"]):  # type: ignore[misc]
    """A queue that asks for every key and sorts everything before every step."""

    def order_waiting(self, *, is_chunk_open: bool = False) -> None:
        super().order_waiting(is_chunk_open=is_chunk_open)
        for entry in chain(self._scheduled, self.started.values()):
            entry.key = self.order.key(entry)
        if self.order.is_preemptive:
            self._scheduled.sort(key=self.order.key)

    def _plan(
        self, chunk_tokens: int, started: list[Prompt], waiting: Iterator[Prompt]
    ) -> dict[str, int]:
        shares = dict.fromkeys(self.started, 0)
        for entry in sorted([*started, *waiting], key=self.order.key):
            tokens = min(entry.remaining_tokens, max(0, chunk_tokens))
            chunk_tokens -= tokens
            if entry.id in shares:
                shares[entry.id] = tokens
        return shares


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
    assert engine.queue.unfinished_tokens == 0
    assert len(engine.queue) == len(engine.queue.started) == 0


def _came_before(engine: Engine, coming: Sequence[tuple[int, int]]) -> list[int]:
    """Tokens that came before each step and after the one before it."""
    came = [0] * len(engine.steps)
    step = 0
    for pause, tokens in coming:
        step += pause
        came[min(step, len(came) - 1)] += tokens
    return came


@given(
    st.sampled_from(PREEMPTIVE),
    arrivals,
    st.integers(1, 20),
    st.integers(1, 64),
    st.sets(st.integers(0, 40)),
)
def test_the_bound_holds_when_others_are_aborted(
    policy: str, coming: Sequence[tuple[int, int]], batch: int, chunk: int, aborted: set[int]
) -> None:
    engine = Engine(policy, batch, chunk)
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


@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400), st.integers(0, 1)), max_size=40),
    st.integers(1, 20),
    st.integers(1, 64),
    st.dictionaries(st.integers(0, 40), st.sampled_from(["abort", "preempt"])),
)
def test_steps_are_those_of_a_queue_that_sorts_everything(
    policy: str,
    coming: Sequence[tuple[int, int, int]],
    batch: int,
    chunk: int,
    events: dict[int, str],
) -> None:
    engines = Engine(policy, batch, chunk), Engine(policy, batch, chunk, Sorting)
    for engine in engines:
        for index, (pause, tokens, priority) in enumerate(coming):
            for _ in range(pause):
                engine.step()
            engine.add(str(index), tokens, priority)
            if index in events:
                getattr(engine, events[index])(str(index // 2))
        engine.run()
    assert engines[0].steps == engines[1].steps


@given(arrivals, st.integers(1, 20), st.integers(1, 64))
def test_prompts_of_a_level_start_in_the_order_in_which_they_came(
    coming: Sequence[tuple[int, int]], batch: int, chunk: int
) -> None:
    engine = play("mlfq", coming, batch, chunk)
    level = {str(i): (tokens // LEVEL_TOKENS).bit_length() for i, (_, tokens) in enumerate(coming)}
    for position, name in enumerate(engine.first_chunk):
        overtaking = [other for other in engine.first_chunk[:position] if int(other) > int(name)]
        assert all(level[other] < level[name] for other in overtaking)


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


def test_a_prompt_beyond_the_batch_goes_behind_what_is_started() -> None:
    engine = Engine("srtf", sched_batch=2, chunk=100)
    engine.add("a", 1000)
    engine.step()
    engine.add("b", 800)
    engine.step()
    engine.add("c", 50)
    engine.step()
    assert engine.steps[-1] == {"a": 0, "b": 100}


def test_what_a_prompt_finds_in_the_cache_counts_before_it_is_ordered() -> None:
    engine = Engine("fcfs", sched_batch=1, chunk=10)
    engine.add("long", 100)
    engine.step()
    engine.left["hit"] = 40
    engine.queue.add(Waiting("hit", 1000, 0))
    assert engine.queue.unfinished_tokens == 90 + 40
