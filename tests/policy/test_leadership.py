"""Who has a lease: rules one by one, and all of them in a world where much goes wrong."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tetri.policy.leadership import Candidate, LeaseStep, Record

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


def test_it_looks_before_anything_else() -> None:
    assert candidate().step(5.0) is LeaseStep.READ
    assert candidate().epoch(5.0) is None
    assert not candidate().may_give_back(1e9)


def test_a_lease_that_is_not_there_is_made_and_decides_a_duration_later() -> None:
    one = candidate()
    one.on_read(None, 100.0)
    assert one.step(100.0) is LeaseStep.CREATE
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
    for now in (115.0, 120.0, 124.9):
        assert one.step(now) is not LeaseStep.TAKE
        one.on_read(record("2"), now)
    assert one.pause_s(124.9) == pytest.approx(0.1)
    assert one.step(125.0) is LeaseStep.TAKE
    one.on_written(record("3", "a", 2), 125.0, 126.0)
    assert one.epoch(126.0) == MADE + 2


def test_a_holder_that_asks_for_longer_is_waited_for_longer() -> None:
    one = candidate()
    one.on_read(record(duration_s=60.0), 100.0)
    assert one.step(159.0) is LeaseStep.READ
    assert one.step(160.0) is LeaseStep.TAKE


def test_what_was_given_back_is_taken_at_once_but_not_what_somebody_made_by_hand() -> None:
    one = candidate()
    one.on_read(record(holder="", num_changes=4), 100.0)
    assert one.step(100.0) is LeaseStep.TAKE
    one = candidate()
    one.on_read(record(holder="", num_changes=0), 100.0)
    assert one.step(100.0) is LeaseStep.WAIT
    assert one.step(115.0) is LeaseStep.TAKE


def test_a_holder_gives_up_by_when_it_sent_and_not_by_when_it_was_answered() -> None:
    one = holder(100.0)
    assert [one.step(104.9), one.step(105.0)] == [LeaseStep.WAIT, LeaseStep.RENEW]
    one.on_written(record("2", "a"), 105.0, 107.0)
    assert one.epoch(114.9) == MADE + 1
    assert one.epoch(115.0) is None  # two thirds after 105; others wait until 120 at least
    one.on_written(record("3", "a"), 116.0, 117.0)
    assert one.epoch(117.0) == MADE + 1  # it came back in time


def test_after_a_failure_it_looks_again_and_decides_as_long_as_it_may() -> None:
    one = holder(100.0)
    one.on_error()
    assert one.step(105.0) is LeaseStep.READ
    assert one.pause_s(105.0) == 0.0
    assert one.epoch(106.0) == MADE + 1
    one.on_read(record("2", "a"), 106.0)  # a renewal whose answer was lost
    assert one.step(106.0) is LeaseStep.RENEW
    assert one.epoch(109.9) == MADE + 1
    assert one.epoch(110.0) is None  # what was not answered does not count


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
    one.on_error()
    one.on_read(record("2", "a", 2), 103.0)
    assert one.epoch(103.0) is None
    assert one.step(103.0) is LeaseStep.RENEW
    one.on_written(record("3", "a", 2), 103.0, 104.0)
    assert one.epoch(104.0) == MADE + 2


def test_it_gives_back_what_it_had_for_a_duration_only() -> None:
    one = holder(100.0)
    one.on_written(record("2", "a"), 105.0, 105.0)
    assert not one.may_give_back(114.9)
    assert one.may_give_back(115.0)
    one.resign()
    assert one.epoch(106.0) is None
    assert one.step(106.0) is LeaseStep.RENEW


def test_an_answer_that_names_another_holder_wins_nothing() -> None:
    one = candidate()
    one.on_written(record("1", "b"), 100.0, 100.0)
    assert one.epoch(100.0) is None


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
        if not life.is_alive:
            return
        one, sent = life.candidate, life.now(self.now)
        step = one.step(sent)
        if step is LeaseStep.WAIT:
            self.at(one.pause_s(sent) / life.rate + 1e-6, lambda: self._turn(life))
            return
        there_s, back_s = self._delay_s(), self._delay_s()
        is_lost, is_unanswered = (self.rng.random() < self._loss for _ in range(2))
        old = one.record
        answers: list[Record | None] = []
        if not is_lost:
            self.at(there_s, lambda: answers.append(self._serve(step, one.name, old)))
        timeout_s = D / 6
        if is_lost or is_unanswered or there_s + back_s > timeout_s:
            self.at(timeout_s, lambda: self._fails(life))
        else:
            self.at(there_s + back_s, lambda: self._hears(life, step, sent, answers[0]))

    def _serve(self, step: LeaseStep, name: str, old: Record | None) -> Record | None:
        if step is LeaseStep.READ:
            return self.server.record
        if step is LeaseStep.CREATE:
            return self.server.make(self.now, name)
        return self.server.write(old, name, int(step is LeaseStep.TAKE))

    def _hears(self, life: Life, step: LeaseStep, sent: float, answer: Record | None) -> None:
        now = life.now(self.now)
        if step is LeaseStep.READ:
            life.candidate.on_read(answer, now)
        elif answer is None:  # a conflict
            self._fails(life)
            return
        else:
            life.candidate.on_written(answer, sent, now)
        self.at(life.candidate.pause_s(now) / life.rate + 1e-6, lambda: self._turn(life))

    def _fails(self, life: Life) -> None:
        life.candidate.on_error()
        self.at(D / 10, lambda: self._turn(life))


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
