"""Who has a lease: rules one by one, and all of them in a world where much goes wrong."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tetri.policy.leadership import Candidate, Record

D = 15.0
MADE = 1_700_000_000


def record(version: str = "1", holder: str = "b", num_changes: int = 1, **more: float) -> Record:
    return Record(version, holder, MADE, num_changes, more.get("duration_s", D))


def candidate() -> Candidate:
    return Candidate("a", D)


def holder(now: float = 100.0, num_changes: int = 1) -> Candidate:
    one = candidate()
    one.on_written(record("1", "a", num_changes), now, now)
    return one


def test_a_lease_that_is_not_there_is_made_and_decides_a_duration_later() -> None:
    one = candidate()
    assert one.epoch(5.0) is None
    one.on_read(None, 100.0)
    assert one.may_write(100.0)
    one.on_written(record("1", "a", 0), 100.0, 101.0)
    for sent in (105.0, 110.0, 115.0):
        assert one.epoch(sent) is None
        one.on_written(record(str(sent), "a", 0), sent, sent + 0.1)
    assert one.epoch(115.9) is None
    assert one.epoch(116.0) == MADE


def test_the_lease_of_another_is_taken_when_nothing_changed_for_a_duration() -> None:
    one = candidate()
    one.on_read(record("1"), 100.0)
    one.on_read(record("2"), 110.0)
    assert one.pause_s(110.0) == D / 3
    for now in (115.0, 120.0, 124.9):
        one.on_read(record("2"), now)
        assert not one.may_write(now)
    assert one.pause_s(124.9) == pytest.approx(0.1)
    assert one.may_write(125.0)
    one.on_written(record("3", "a", 2), 125.0, 126.0)
    assert one.epoch(126.0) == MADE + 2


@pytest.mark.parametrize(
    ("seen", "wait_s"),
    [
        (record(duration_s=60.0), 60.0),  # its holder asks for longer
        (record(holder="", num_changes=4), 0.0),  # it was given back
        (record(holder="", num_changes=0), D),  # an operator made it without a holder
    ],
)
def test_how_long_a_lease_is_waited_for(seen: Record, wait_s: float) -> None:
    one = candidate()
    one.on_read(seen, 100.0)
    assert one.may_write(100.0 + wait_s / 2) is (wait_s == 0.0)
    assert one.may_write(100.0 + wait_s)


def test_a_holder_gives_up_by_when_it_sent_and_not_by_when_it_was_answered() -> None:
    one = holder(100.0)
    assert one.may_write(100.0)
    one.on_written(record("2", "a"), 105.0, 107.0)
    assert one.pause_s(107.0) == 3.0
    assert one.epoch(114.9) == MADE + 1
    assert one.epoch(115.0) is None  # two thirds after 105; others wait until 120 at least
    one.on_read(record("3", "a"), 116.0)  # a renewal whose answer was lost does not count
    assert one.epoch(116.0) is None
    one.on_written(record("4", "a"), 116.0, 117.0)
    assert one.epoch(117.0) == MADE + 1  # it came back in time


@pytest.mark.parametrize(
    "seen", [None, record("2", "b", 2), record("2", "", 1)], ids=["removed", "taken", "cleared"]
)
def test_it_ends_at_once_when_the_lease_is_not_its_own(seen: Record | None) -> None:
    one = holder(100.0)
    one.on_read(seen, 101.0)
    assert one.epoch(101.0) is None
    assert not one.may_give_back(1e9)


def test_one_whose_first_answer_was_lost_decides_when_it_has_renewed() -> None:
    one = candidate()
    one.on_read(record(holder="", num_changes=1), 100.0)
    one.on_read(record("2", "a", 2), 103.0)
    assert one.epoch(103.0) is None
    one.on_written(record("3", "a", 2), 103.0, 104.0)
    assert one.epoch(104.0) == MADE + 2


def test_it_gives_back_what_it_had_for_a_duration_only() -> None:
    one = holder(100.0)
    one.on_written(record("2", "a"), 105.0, 105.0)
    assert not one.may_give_back(114.9)
    assert one.may_give_back(115.0)
    one.resign()
    assert one.epoch(106.0) is None


# -- a world ---------------------------------------------------------------------


class Server:
    """Keeps one record, and compares versions."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self._versions = count(1)

    def make(self, now: float, name: str) -> Record | None:
        if self.record is not None:
            return None
        made_s = MADE + int(now)
        self.record = Record(str(next(self._versions)), name, made_s, 0, D)
        return self.record

    def write(self, old: Record | None, name: str, num_more: int) -> Record | None:
        if old is None or self.record is None or self.record.version != old.version:
            return None
        self.record = replace(
            self.record,
            version=str(next(self._versions)),
            holder=name,
            num_changes=old.num_changes + num_more,
        )
        return self.record


class Life:
    """One contender, with a clock of its own."""

    def __init__(self, name: str, rng: Random) -> None:
        self.candidate = Candidate(name, D)
        self.is_alive = True
        self._offset = rng.uniform(-1e6, 1e6)
        self.rate = rng.uniform(0.9, 1.1)

    def now(self, now: float) -> float:
        return self._offset + self.rate * now


class World:
    """Contenders over a network that delays, loses, and delivers after everybody gave up."""

    def __init__(self, rng: Random, *, loss: float, slowest_s: float) -> None:
        self.rng = rng
        self.server = Server()
        self.lives: list[Life] = []
        self.now = 0.0
        self.reigns: list[tuple[int, str, float]] = []  # epoch, whose, since
        self._loss = loss
        self._slowest_s = slowest_s
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def at(self, delay_s: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def born(self) -> Life:
        life = Life(f"r{next(self._order)}", self.rng)
        self.lives.append(life)
        self.at(self.rng.uniform(0, 2), lambda: self._turn(life))
        return life

    def run(self, until: float) -> None:
        tick = self.now
        while self._events and self._events[0][0] <= until:
            due = self._events[0][0]
            while tick < due:
                self.now = tick
                self._check()
                tick += 0.2
            self.now, _, event = heapq.heappop(self._events)
            event()
            self._check()
        self.now = until

    def holder(self) -> Life | None:
        held = [
            each
            for each in self.lives
            if each.is_alive and each.candidate.epoch(each.now(self.now)) is not None
        ]
        assert len(held) <= 1, f"{len(held)} decide at {self.now}"
        return held[0] if held else None

    def ends(self, life: Life) -> None:
        """In good order: it gives back what it may."""
        life.is_alive = False
        if life.candidate.may_give_back(life.now(self.now)):
            old = life.candidate.record
            self.at(self._delay_s(), lambda: self.server.write(old, "", 1))

    def _check(self) -> None:
        life = self.holder()
        if life is None:
            return
        epoch = life.candidate.epoch(life.now(self.now))
        assert epoch is not None
        if self.reigns and self.reigns[-1][:2] == (epoch, life.candidate.name):
            return
        assert not self.reigns or epoch > self.reigns[-1][0], f"epoch fell back at {self.now}"
        self.reigns.append((epoch, life.candidate.name, self.now))

    def _delay_s(self) -> float:
        return self.rng.uniform(0, self._slowest_s) * self.rng.random() ** 3

    def _turn(self, life: Life) -> None:
        if life.is_alive:
            self._ask(life, lambda: self.server.record, partial(self._has_read, life))

    def _ask(
        self, life: Life, serve: Callable[[], Record | None], hears: Callable[[Record | None], None]
    ) -> None:
        there_s, back_s = self._delay_s(), self._delay_s()
        is_lost, is_unanswered = (self.rng.random() < self._loss for _ in range(2))
        answers: list[Record | None] = []
        if not is_lost:
            self.at(there_s, lambda: answers.append(serve()))
        timeout_s = D / 6
        if is_lost or is_unanswered or there_s + back_s > timeout_s:
            self._again(life, timeout_s + D / 10)
        else:
            self.at(there_s + back_s, lambda: hears(answers[0]))

    def _has_read(self, life: Life, found: Record | None) -> None:
        one, sent = life.candidate, life.now(self.now)
        one.on_read(found, sent)
        if not one.may_write(sent):
            self._again(life, one.pause_s(sent) / life.rate)
        elif found is None:
            hears = partial(self._has_written, life, sent)
            self._ask(life, lambda: self.server.make(self.now, one.name), hears)
        else:
            write = partial(self.server.write, found, one.name, int(found.holder != one.name))
            self._ask(life, write, partial(self._has_written, life, sent))

    def _has_written(self, life: Life, sent: float, written: Record | None) -> None:
        if written is None:  # a conflict
            self._again(life, D / 10)
            return
        now = life.now(self.now)
        life.candidate.on_written(written, sent, now)
        self._again(life, life.candidate.pause_s(now) / life.rate)

    def _again(self, life: Life, delay_s: float) -> None:
        self.at(delay_s + 1e-6, lambda: self._turn(life))


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_never_two_decide_and_epochs_grow_whatever_goes_wrong(seed: int) -> None:
    """Deaths, ends, removals, lost and late messages, and clocks that run apart."""
    rng = Random(seed)
    world = World(rng, loss=rng.choice([0.0, 0.1, 0.3]), slowest_s=rng.choice([0.2, 3.0, 40.0]))
    for _ in range(rng.randint(2, 4)):
        world.born()
    for until in range(10, 400, 10):
        world.run(float(until))
        life = rng.choice([world.holder() or world.lives[-1], rng.choice(world.lives)])
        event = rng.random()
        if event < 0.15 and life.is_alive:
            life.is_alive = False
            world.born()
        elif event < 0.3 and life.is_alive:
            world.ends(life)
            world.born()
        elif event < 0.4:
            world.server.record = None
            if rng.random() < 0.3:
                world.server.make(world.now, "")  # somebody made an empty one


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_somebody_takes_over_within_two_durations_of_a_death(seed: int) -> None:
    rng = Random(seed)
    world = World(rng, loss=0.0, slowest_s=0.5)
    for _ in range(3):
        world.born()
    until = 40.0
    for _ in range(4):
        world.run(until + rng.uniform(0, 10))
        life = world.holder()
        assert life is not None
        assert world.reigns[-1][1] == life.candidate.name
        life.is_alive = False
        world.born()
        died = world.now
        until = died + 2 * D
        world.run(until)
        assert world.reigns[-1][1] != life.candidate.name
        assert world.reigns[-1][2] <= died + 2 * D


def test_the_next_one_begins_within_a_look_when_it_is_given_back() -> None:
    world = World(Random(1), loss=0.0, slowest_s=0.5)
    world.born()
    world.born()
    world.run(60.0)
    life = world.holder()
    assert life is not None
    world.ends(life)
    world.run(60.0 + D / 3 + 2)
    assert len(world.reigns) == 2
