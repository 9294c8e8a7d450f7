"""Which instance flips, and when; driven through a small cluster with chance in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from random import Random

import pytest

from tests.policy.builders import instance, view
from vllm_tetri.policy.balance import COOL_DOWN_S, ROLLED_BACK_S, FlipOrder, Look
from vllm_tetri.policy.watcher import ORDER_SEEN_S, Watcher, WatchPolicy
from vllm_tetri.types import (
    Flip,
    FlipStage,
    InstanceLoad,
    InstanceState,
    InstanceView,
    Role,
    StepCoefficients,
)

LOOK_S = 0.2
TOKENS_PER_S, BASE_S, REQUEST_S = 1500.0, 0.013, 0.004
COST = StepCoefficients(base_s=BASE_S, request_s=REQUEST_S, prompt_s=1 / TOKENS_PER_S)
CODE, CHAT = (1650, 27), (1100, 208)  # tokens of prompt and answer, on average


@dataclass
class Engine:
    """An instance that computes its prompts one after the other and writes its answers
    all at a time, both without disturbing each other."""

    id: str
    role: str
    model: str = "tiny"
    cost: StepCoefficients = COST
    prompts: list[list[float]] = field(default_factory=list)  # tokens left, tokens of answer
    answers: list[float] = field(default_factory=list)  # tokens left
    done: Counter[str] = field(default_factory=Counter)
    flip: Flip | None = None
    flipped_s: float = 0.0

    def prefill(self, for_s: float) -> Iterator[float]:
        """The answers of the prompts that it finishes."""
        tokens = TOKENS_PER_S * for_s
        while self.prompts and tokens > 0:
            step = min(tokens, self.prompts[0][0])
            tokens -= step
            self.prompts[0][0] -= step
            self.done["prompt_tokens_done"] += step
            if self.prompts[0][0] <= 0:
                self.done["prefills_done"] += 1
                yield self.prompts.pop(0)[1]

    def to_write(self) -> tuple[float, float]:
        return sum(self.answers), self.done["output_tokens_done"]

    def decode(self, for_s: float) -> None:
        num = min(len(self.answers), 15)  # what has room in its KV pool
        tokens = for_s / (BASE_S + REQUEST_S * num)
        self.done["output_tokens_done"] += sum(min(tokens, left) for left in self.answers[:num])
        left = [max(0.0, left - tokens) for left in self.answers[:num]] + self.answers[num:]
        self.answers = [each for each in left if each > 0]

    def seen(self, now: float) -> InstanceView:
        one = instance(
            self.id,
            self.role,
            model=self.model,
            blocks_total=1250,
            running=min(1, len(self.prompts)) + len(self.answers),
            waiting=max(0, len(self.prompts) - 1),
            queued_prefill_tokens=int(sum(left for left, _ in self.prompts)),
            remaining_tokens=int(sum(self.answers)),
            light=len(self.answers),
            **{name: int(value) for name, value in self.done.items()},
            cost=self.cost,
            chunk_tokens=100_000,
        )
        flip = self.flip and replace(self.flip, age_s=now - self.flipped_s)
        return replace(one, flip=flip, seq=int(now / LOOK_S) + 1)


@dataclass
class Cluster:
    """Engines, and whoever flips them."""

    watcher: Watcher
    engines: list[Engine]
    rng: Random = field(default_factory=lambda: Random(1))
    now: float = 0.0
    looks: list[Look] = field(default_factory=list)
    orders: list[tuple[float, FlipOrder]] = field(default_factory=list)

    def run(self, for_s: float, per_s: float = 0.0, kind: tuple[int, int] = CODE) -> Cluster:
        """Let requests come by chance for a while."""
        until_s = self.now + for_s
        next_s = self.now + self.rng.expovariate(per_s) if per_s else inf
        while self.now < until_s:
            while next_s < self.now + LOOK_S:
                self._arrive(kind)
                next_s += self.rng.expovariate(per_s)
            for each in self.engines:
                for answer in list(each.prefill(LOOK_S)):
                    min(self.of("decode"), key=Engine.to_write).answers.append(answer)
                each.decode(LOOK_S)
            self.now += LOOK_S
            self._look()
        return self

    def of(self, role: str) -> list[Engine]:
        return [each for each in self.engines if each.role == role]

    @property
    def split(self) -> tuple[int, int]:
        return len(self.of("prefill")), len(self.of("decode"))

    def _arrive(self, kind: tuple[int, int]) -> None:
        prompt, answer = (mean * self.rng.uniform(0.3, 1.7) for mean in kind)
        least = min(self.of("prefill"), key=lambda one: sum(left for left, _ in one.prompts))
        least.prompts.append([prompt, answer])

    def _look(self) -> None:
        look = self.watcher.look(view(*(each.seen(self.now) for each in self.engines)), self.now)
        self.looks.append(look)
        if look.order is not None:
            self.orders.append((self.now, look.order))
            one = next(each for each in self.engines if each.id == look.order.instance)
            one.flip = Flip(1, Role(one.role), look.order.role, FlipStage.DONE)
            one.role, one.flipped_s = look.order.role.value, self.now


def engines(prefills: int, decodes: int, **options) -> list[Engine]:
    roles = ["prefill"] * prefills + ["decode"] * decodes
    return [Engine(f"i{index}", role, **options) for index, role in enumerate(roles)]


def cluster(prefills: int, decodes: int, policy: str = "balance", **options) -> Cluster:
    return Cluster(Watcher(WatchPolicy(policy), **options), engines(prefills, decodes))


@pytest.mark.parametrize("policy", ["balance", "threshold", "idle"])
def test_every_look_is_explained(policy: str) -> None:
    one = cluster(2, 2, policy, after_s=10.0).run(30.0, 2.0)
    assert all(look.explanation for look in one.looks)
    assert "tiny: " in one.looks[-1].explanation
    assert "no instance is there" in one.watcher.look(view(), one.now + 1).explanation


# Balance


@pytest.mark.parametrize("seed", range(4))
def test_balance_follows_a_swing_within_seconds(seed: int) -> None:
    one = cluster(2, 2)
    one.rng = Random(seed)
    assert one.run(40.0, 2.3, CODE).split == (3, 1)
    for _ in range(3):
        assert one.run(15.0, 1.8, CHAT).split == (2, 2)
        one.run(45.0, 1.8, CHAT)
        assert one.run(20.0, 2.3, CODE).split == (3, 1)
        one.run(40.0, 2.3, CODE)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("split", "per_s", "kind"), [((3, 1), 1.9, CODE), ((2, 2), 1.4, CHAT), ((2, 2), 0.2, CHAT)]
)
def test_balance_rests_under_a_steady_load_that_comes_by_chance(
    split: tuple[int, int], per_s: float, kind: tuple[int, int], seed: int
) -> None:
    one = cluster(*split)
    one.rng = Random(seed)
    one.run(400.0, per_s, kind)
    assert len(one.orders) <= 1


def test_balance_finds_the_split_from_a_wrong_one_and_takes_its_time_between_flips() -> None:
    one = Cluster(Watcher(WatchPolicy.BALANCE), engines(1, 7)).run(60.0, 4.8, CODE)
    times = [at_s for at_s, _ in one.orders]
    assert one.split in {(6, 2), (7, 1)}
    assert all(later - at_s >= COOL_DOWN_S for at_s, later in pairwise(times))


def test_a_long_queue_does_not_hide_what_a_flip_saves() -> None:
    one = cluster(1, 3)
    one.engines[0].prompts = [[1650.0, 27.0] for _ in range(300)]
    assert one.run(30.0, 2.2, CODE).split == (3, 1)


@pytest.mark.parametrize("kind", [CODE, CHAT])
def test_balance_leaves_one_instance_to_each_role(kind: tuple[int, int]) -> None:
    one = cluster(1, 1).run(60.0, 5.0, kind)
    assert not one.orders
    assert "no instance may flip" in one.looks[-1].explanation


def test_balance_flips_at_once_whoever_has_least_to_finish_and_says_why() -> None:
    one = cluster(1, 3)
    one.engines[1].answers = [400.0] * 3
    one.engines[3].answers = [400.0] * 3
    order = one.run(20.0, 2.2, CODE).orders[0][1]
    assert (order.instance, order.role, order.now) == ("i2", Role.PREFILL, True)
    assert re.match(r"1 prefill, 3 decode, [12].\d requests/s, \d+.\d queued", order.reason)


def test_nothing_happens_while_nobody_knows_how_fast_it_is() -> None:
    one = cluster(1, 3)
    for each in one.engines:
        each.cost = StepCoefficients()
    one.run(20.0, 2.2, CODE)
    assert not one.orders
    assert "too little is known" in one.looks[-1].explanation


def test_counters_of_an_instance_that_began_anew_count_for_nothing() -> None:
    one = cluster(3, 1).run(30.0, 1.9, CODE)
    one.engines[0].done.clear()
    one.engines[3].done.clear()
    assert not one.run(30.0, 1.9, CODE).orders


# What all of them keep to; each of these would flip i1, i2 or i3 if it might


class Overload(Cluster):
    """Too few prefill instances, which no order changes; instances can be made to say something
    else of themselves."""

    def __init__(self, prefills: int = 1, decodes: int = 3) -> None:
        super().__init__(Watcher(WatchPolicy.BALANCE), engines(prefills, decodes))
        self.said: dict[str, dict] = {}
        self.others: list[InstanceView] = []

    def _look(self) -> None:
        seen = [each.seen(self.now) for each in self.engines]
        said = [replace(one, **self.said.get(one.info.id, {})) for one in seen]
        self.looks.append(self.watcher.look(view(*said, *self.others), self.now))

    def look(self, for_s: float = LOOK_S, per_s: float = 2.5) -> list[Look]:
        first = len(self.looks)
        return self.run(for_s, per_s).looks[first:]

    def ordered(self) -> list[FlipOrder]:
        return ordered(self.look(20.0))


def ordered(looks: list[Look]) -> list[FlipOrder]:
    return [look.order for look in looks if look.order]


def flip(stage: FlipStage, age_s: float = 0.0) -> Flip:
    return Flip(1, Role.PREFILL, Role.DECODE, stage, age_s)


def test_an_order_is_not_given_again_until_reports_had_time_to_show_it() -> None:
    one = Overload()
    looks = one.look(30.0)
    ordered = [index for index, look in enumerate(looks) if look.order]
    gaps = {later - index for index, later in pairwise(ordered)}
    assert gaps <= {round(ORDER_SEEN_S / LOOK_S), round(ORDER_SEEN_S / LOOK_S) + 1}
    assert "an order is on its way" in looks[ordered[0] + 1].explanation


@pytest.mark.parametrize("stage", list(FlipStage))
def test_a_flip_that_the_view_shows_cools_a_new_watcher_down(stage: FlipStage) -> None:
    one = Overload()
    one.said["i0"] = {"flip": flip(stage, 1.0)}
    assert not one.ordered()
    one.said["i0"] = {"flip": flip(FlipStage.DONE, COOL_DOWN_S - 1), "age_s": 0.5}
    assert "the last flip was 4.5 s ago" in one.look()[-1].explanation
    one.said["i0"] = {"flip": flip(FlipStage.DONE, COOL_DOWN_S - 1), "age_s": 1.5}
    assert one.look()[-1].order


@pytest.mark.parametrize(
    "said",
    [
        {"state": InstanceState.FLIPPING},
        {"flip": flip(FlipStage.DRAINING, 99.0)},
        {"flip": flip(FlipStage.SWITCHING, 99.0)},
    ],
)
def test_nobody_flips_while_another_does(said: dict) -> None:
    one = Overload()
    one.said["i1"] = said
    assert not one.ordered()
    assert "i1 is flipping" in one.look()[-1].explanation


def test_whose_flip_failed_is_not_asked_again_so_soon() -> None:
    one = Overload(1, 2)
    one.said["i1"] = {"flip": flip(FlipStage.ROLLED_BACK, COOL_DOWN_S)}
    assert {order.instance for order in one.ordered()} == {"i2"}
    one.said["i2"] = one.said["i1"]
    assert not one.ordered()
    one.said["i2"] = {"flip": flip(FlipStage.ROLLED_BACK, ROLLED_BACK_S)}
    assert {order.instance for order in one.ordered()} == {"i2"}


@pytest.mark.parametrize("state", ["starting", "silent", "draining"])
def test_only_ready_instances_count_and_flip(state: str) -> None:
    one = Overload(1, 2)
    one.said["i1"] = {"state": InstanceState(state)}
    assert not one.ordered()
    one.others = [instance("other", "decode")]
    assert {order.instance for order in one.ordered()} <= {"i2", "other"}


def test_an_instance_that_does_both_neither_flips_nor_stands_in() -> None:
    one = Overload(1, 1)
    one.others = [instance("both", "both")]
    assert not one.ordered()


def test_instances_flip_among_those_of_their_model_only() -> None:
    one = Overload(1, 1)
    one.others = [instance(f"h{index}", "decode", model="huge") for index in range(3)]
    assert not one.ordered()
    explanation = one.look()[-1].explanation
    assert "huge: 0 prefill, 3 decode" in explanation
    assert "tiny: 1 prefill, 1 decode" in explanation


def test_every_model_gets_its_orders() -> None:
    one = Overload()
    huge = engines(1, 3, model="huge")
    for each in huge:
        each.id = f"huge-{each.id}"
    one.engines += huge
    names = [order.instance for order in ordered(one.look(20.0, 5.0))]
    assert {name.startswith("huge") for name in names} == {True, False}


def test_one_that_has_not_reported_yet_says_nothing_of_what_comes() -> None:
    """A router that starts anew knows instances before their first report."""
    one = Cluster(Watcher(WatchPolicy.BALANCE), engines(2, 2))
    one.run(30.0, 1.0)
    for each in one.engines:
        each.done["prompt_tokens_done"] += 1e6
        each.done["prefills_done"] += 600
    fresh = Watcher(WatchPolicy.BALANCE)
    looks = []
    for index in range(60):
        seen = [each.seen(one.now) for each in one.run(LOOK_S, 1.0).engines]
        if index == 0:
            seen[0] = replace(seen[0], load=InstanceLoad(), seq=0)
        looks.append(fresh.look(view(*seen), one.now))
    rates = [re.search(r"([0-9.]+) requests/s", look.explanation) for look in looks]
    assert max(float(rate[1]) for rate in rates if rate) < 5


def test_what_was_served_between_looks_far_apart_says_nothing_of_what_comes() -> None:
    """In another mode, which knows no roles, or while another router decided."""
    one = Cluster(Watcher(WatchPolicy.BALANCE), engines(2, 2))
    one.run(30.0, 1.0)
    one.now += 3600.0
    for each in one.engines:
        each.done["prompt_tokens_done"] += 30_000_000
        each.done["output_tokens_done"] += 5_000_000
    num_before = len(one.looks)
    one.run(30.0, 1.0)
    rates = [
        re.search(r"([0-9.]+) requests/s", each.explanation) for each in one.looks[num_before:]
    ]
    assert min(float(rate[1]) for rate in rates if rate) > 0.2
    assert max(float(rate[1]) for rate in rates if rate) < 5
    assert all(at < 40 for at, _ in one.orders)


def test_answers_that_are_longer_than_average_are_no_more_requests_than_there_are() -> None:
    one = Cluster(Watcher(WatchPolicy.BALANCE), engines(2, 2))
    one.run(30.0, 1.0, CHAT)
    for each in one.engines:
        each.answers = [2000.0] * len(each.answers)
    num = sum(len(each.answers) for each in one.engines)
    seen = [each.seen(one.now + LOOK_S) for each in one.engines]
    explanation = one.watcher.look(view(*seen), one.now + LOOK_S).explanation
    assert f"{num:.1f} decoding" in explanation


# The paper's


def busy(watcher: Watcher, until_s: float, *parts: float, start_s: float = 0.0) -> list[Look]:
    """Looks at instances that have work for such parts of every 10 s; the first two
    prefill, the others decode."""
    looks = []
    for index in range(round(start_s * 10), round(until_s * 10)):
        at = index % 100 / 100
        seen = [
            instance(f"i{place}", "prefill" if place < 2 else "decode", running=int(at < part))
            for place, part in enumerate(parts)
        ]
        looks.append(watcher.look(view(*seen), index / 10))
    return looks


def test_idle_flips_who_had_nothing_to_do_for_so_long() -> None:
    watcher = Watcher(WatchPolicy.IDLE, after_s=30.0)
    assert not ordered(busy(watcher, 30.0, 1, 0, 1, 1))
    order = ordered(busy(watcher, 30.2, 1, 0, 1, 1, start_s=30.0))[0]
    assert (order.instance, order.role, order.now) == ("i1", Role.DECODE, False)
    assert order.reason == "i1 was busy 0% of the last 30 s"


def test_work_between_two_looks_is_work() -> None:
    watcher = Watcher(WatchPolicy.IDLE, after_s=5.0)
    for index in range(200):
        seen = view(
            instance("i0", "prefill", running=1),
            instance("i1", "prefill", prompt_tokens_done=index // 10),
            instance("i2", "decode", running=1),
            instance("i3", "decode", output_tokens_done=index // 10),
        )
        assert watcher.look(seen, index / 10).order is None


@pytest.mark.parametrize(
    ("policy", "after_s", "parts", "flipped"),
    [
        ("idle", 9.6, (1, 0.05, 1, 1), set()),  # any work starts the time anew
        ("idle", 3.0, (1, 0.05, 1, 1), {"i1"}),
        ("idle", 20.0, (0.9, 0.06, 0.9, 0.9), set()),
        ("threshold", 20.0, (0.9, 0.06, 0.9, 0.9), {"i1"}),
        ("threshold", 20.0, (0.9, 0.12, 0.9, 0.9), set()),
        ("idle", 20.0, (1, 1, 0), set()),  # the last one of its role
        ("threshold", 20.0, (1, 1, 0), set()),
        ("idle", 20.0, (1, 0, 1, 0), set()),  # two roles with one at rest each
    ],
)
def test_who_flips_by_the_part_of_the_time_that_it_had_work(
    policy: str, after_s: float, parts: tuple[float, ...], flipped: set[str]
) -> None:
    looks = busy(Watcher(WatchPolicy(policy), after_s=after_s), 100.0, *parts)
    assert {each.instance for each in ordered(looks)} == flipped


@pytest.mark.parametrize("policy", ["idle", "threshold"])
def test_nobody_flips_to_a_role_that_has_little_to_do_too(policy: str) -> None:
    looks = busy(Watcher(WatchPolicy(policy), after_s=20.0), 100.0, 0, 0, 0, 0)
    assert not ordered(looks)
    assert "decode has little to do too" in looks[-1].explanation


def test_who_has_just_flipped_is_watched_anew() -> None:
    one = cluster(3, 1, "idle", after_s=20.0)
    one.engines[0].prompts = [[1e6, 1.0]]
    one.engines[3].answers = [1e6]
    assert [order.instance for _, order in one.run(21.0).orders] == ["i1"]
    assert [order.instance for _, order in one.run(30.0).orders] == ["i1"]
    one.engines[1].answers = [100.0]
    assert [order.instance for _, order in one.run(1.0).orders] == ["i1", "i2"]
