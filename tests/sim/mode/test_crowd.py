"""What is done once for many is what each would have done."""

from __future__ import annotations

import pytest

from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.route import Route, Whole
from vllm_tetri.sim.cluster import run, simulate
from vllm_tetri.sim.mode.adaptive import AdaptiveMode
from vllm_tetri.sim.mode.dispatcher import Dispatcher
from vllm_tetri.sim.mode.modes import LeastInFlight, SplitMode
from vllm_tetri.sim.setting import Place, Setting, Shape, places
from vllm_tetri.sim.views import Picture, info_of
from vllm_tetri.sim.workload import Ask, draw
from vllm_tetri.types import InstanceId

SHAPE = Shape(kv_blocks=200, chunk_tokens=128)


class _Together(AdaptiveMode):
    most_alone = 8


class _Alone(AdaptiveMode):
    """Everybody looks at every picture that anybody looks at, each at all of it."""

    most_alone = 1000

    def dispatch(
        self, prefill: InstanceId, picture: Picture, ask: Ask, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        for look in self._dispatchers.values():
            look.take(picture)
        return super().dispatch(prefill, picture, ask, now, may_wait=may_wait)


@pytest.mark.parametrize("kind", ["mixed", "hphd"])
def test_a_crowd_decides_as_all_who_look_at_every_picture(kind: str) -> None:
    asks = draw(kind, 250, 30.0, seed=4, accuracy=0.6)
    instances = places(6, 9, 3, shape=SHAPE)

    together = run(Setting(instances, _Together), asks)
    alone = run(Setting(instances, _Alone), asks)

    assert together.served == alone.served
    assert sum(each.is_split for each in together.served) > 20


class _EachItsPeers(SplitMode):
    """No prefill instance uses what another one made of a picture."""

    def dispatch(
        self, prefill: InstanceId, picture: Picture, ask: Ask, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        own = Picture(picture.view, picture.at_s)
        dispatcher = self._dispatchers[prefill]
        assert isinstance(dispatcher, Dispatcher)
        return dispatcher.choose(own, ask, now, may_wait=may_wait)


def test_prefill_instances_that_are_alike_see_the_same() -> None:
    asks = draw("mixed", 150, 12.0, seed=4)
    instances = places(4, 4, 1, shape=SHAPE)

    assert simulate(Setting(instances, "split"), asks) == simulate(
        Setting(instances, _EachItsPeers), asks
    )


class _Counting(LeastInFlight):
    """Counts them all for every request."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._names = [each.id for each in setting.instances]
        self._numbers = dict.fromkeys(self._names, 0)
        self._at: dict[int, InstanceId] = {}

    def route(self, picture: Picture, ask: Ask, now: float) -> Route:
        best = min(self._names, key=self._numbers.__getitem__)
        self._numbers[best] += 1
        self._at[ask.id] = best
        return Whole(best, "fewest")

    def ended(self, ask: Ask, now: float) -> None:
        self._numbers[self._at.pop(ask.id)] -= 1


def test_fewest_in_flight_is_found_without_counting() -> None:
    asks = draw("lpld", 600, 40.0, seed=4)
    instances = places(both=7, shape=SHAPE)

    assert simulate(Setting(instances, "least-in-flight"), asks) == simulate(
        Setting(instances, _Counting), asks
    )


def test_what_was_made_of_a_picture_is_kept_for_those_that_are_alike() -> None:
    prefill, other, decode, both = places(2, 1, 1, shape=SHAPE)
    picture = _picture((prefill, other, decode, both))

    assert picture.peers(info_of(prefill)) is picture.peers(info_of(other))
    assert picture.peers(info_of(both)) is not picture.peers(info_of(both))
    assert [peer.id for peer in picture.peers(info_of(prefill)).others] == ["both-0", "decode-0"]
    assert [peer.id for peer in picture.peers(info_of(both)).others] == ["decode-0"]


def _picture(instances: tuple[Place, ...]) -> Picture:
    seen: list[Picture] = []

    class Watching(SplitMode):
        def route(self, picture: Picture, ask: Ask, now: float) -> Route:
            seen.append(picture)
            return super().route(picture, ask, now)

    simulate(Setting(instances, Watching), draw("lpld", 1, 1.0, 0))
    return seen[0]
