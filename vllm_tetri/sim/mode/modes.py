"""How requests find instances: one object per mode, made anew for every simulation.

A new mode is a class with the methods of `Router` and a line in `MODES`. It may keep
whatever it notes itself and what `Picture` shows, but look at no request's
`output_tokens`: nobody knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import cycle
from random import Random
from typing import Protocol

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.promise import Late
from vllm_tetri.policy.route import Route, Shortlist, Split, Submissions, Whole
from vllm_tetri.sim.mode.adaptive import AdaptiveMode, WholeMode
from vllm_tetri.sim.mode.dispatcher import Dispatcher
from vllm_tetri.sim.mode.mooncake import MooncakeMode
from vllm_tetri.sim.mode.splitwise import SplitwiseMode
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.views import MODEL, Picture, info_of
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import ClusterView, InstanceId, Role

_MOST_ENTRIES = 8
_NOBODY = Shortlist(ClusterView(), model=MODEL, splittable=True, own_tokens={})


class Router(Protocol):
    """What a mode decides."""

    def route(self, picture: Picture, ask: Ask, now: float) -> Route | Late:
        """A request came. `picture` was taken at most a report period ago. It is refused if
        the answer is `Late`."""

    def dispatch(
        self, prefill: InstanceId, picture: Picture, ask: Ask, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        """A chunk of a split request's prompt is done, and nobody has been chosen yet.

        Args:
            prefill: Who computes it, and decides on what it was told: up to two report
                periods old.
            may_wait: There will be another chunk; if not, the prompt is done.

        Returns:
            Who decodes it, `prefill` itself to keep it; None to be asked again. None
            keeps it too when there is no other chunk.
        """

    def ended(self, ask: Ask, now: float) -> None:
        """The client has the last token of a request that was not refused."""


class SplitMode:
    """Today's router and prefill instances: prompt here, answer there where possible."""

    def __init__(self, setting: Setting) -> None:
        self._submissions = Submissions()
        self._seen: Picture | None = None
        self._shortlist = _NOBODY
        self._dispatchers = {
            each.id: Dispatcher(
                info_of(each),
                setting.dispatch,
                setting.report_period_s,
                Random(f"{setting.seed} {each.id}"),
            )
            for each in setting.instances
            if each.role is not Role.DECODE
        }

    def route(self, picture: Picture, ask: Ask, now: float) -> Route:
        if picture is not self._seen:
            self._seen = picture
            own_tokens = self._submissions.unreported(picture.view, picture.at_s)
            self._shortlist = Shortlist(
                picture.view, model=MODEL, splittable=True, own_tokens=own_tokens
            )
        route = self._shortlist.choose()
        assert route is not None, "somebody is there"
        first = route.prefill if isinstance(route, Split) else route.instance
        self._submissions.add(first, ask.prompt_tokens, now)
        self._shortlist.sent(first, ask.prompt_tokens)
        return route

    def dispatch(
        self, prefill: InstanceId, picture: Picture, ask: Ask, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        return self._dispatchers[prefill].choose(picture, ask, now, may_wait=may_wait)

    def ended(self, ask: Ask, now: float) -> None:
        """Nothing to note."""


class _WholeMode:
    """Every request stays where it went first."""

    def dispatch(
        self, prefill: InstanceId, picture: Picture, ask: Ask, now: float, *, may_wait: bool
    ) -> Dispatch | None:
        return None

    def ended(self, ask: Ask, now: float) -> None:
        """Nothing to note."""


class LeastInFlight(_WholeMode):
    """Fewest requests that have not ended; the first of equals."""

    def __init__(self, setting: Setting) -> None:
        self._ids = [each.id for each in setting.instances]
        self._in_flight = [0] * len(self._ids)
        # Who has fewest, in order; an entry counts only if its number is right.
        self._order = [(0, place) for place in range(len(self._ids))]
        self._where: dict[int, int] = {}

    def route(self, picture: Picture, ask: Ask, now: float) -> Route:
        while self._order[0][0] != self._in_flight[self._order[0][1]]:
            heappop(self._order)
        place = self._order[0][1]
        self._count(place, 1)
        self._where[ask.id] = place
        return Whole(self._ids[place], "fewest in flight")

    def ended(self, ask: Ask, now: float) -> None:
        self._count(self._where.pop(ask.id), -1)

    def _count(self, place: int, change: int) -> None:
        self._in_flight[place] += change
        if len(self._order) < _MOST_ENTRIES * len(self._ids):
            heappush(self._order, (self._in_flight[place], place))
        else:
            self._order = sorted(zip(self._in_flight, range(len(self._ids)), strict=True))


class RoundRobin(_WholeMode):
    """One after the other."""

    def __init__(self, setting: Setting) -> None:
        self._turns = cycle([each.id for each in setting.instances])

    def route(self, picture: Picture, ask: Ask, now: float) -> Route:
        return Whole(next(self._turns), "its turn")


MODES: dict[str, Callable[[Setting], Router]] = {
    "split": SplitMode,
    "adaptive": AdaptiveMode,
    "whole": WholeMode,
    "least-in-flight": LeastInFlight,
    "round-robin": RoundRobin,
    "splitwise": SplitwiseMode,
    "mooncake": MooncakeMode,
}


def router_of(setting: Setting) -> Router:
    """The mode of a setting.

    Raises:
        ConfigError: There is none of that name.
    """
    if not isinstance(setting.mode, str):
        return setting.mode(setting)
    if setting.mode not in MODES:
        raise ConfigError(f"no mode {setting.mode!r}; there are {', '.join(MODES)}")
    return MODES[setting.mode](setting)
