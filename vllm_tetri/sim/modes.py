"""How requests find instances: one object per mode, made anew for every simulation.

A new mode is a class with the methods of `Router` and a line in `MODES`. It may keep
whatever it notes itself and what `Picture` shows, but look at no request's
`output_tokens`: nobody knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from random import Random
from typing import Protocol

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.route import Route, Split, Submissions, Whole, choose_route
from vllm_tetri.sim.adaptive import AdaptiveMode, WholeMode
from vllm_tetri.sim.dispatcher import Dispatcher
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.views import MODEL, Picture, info_of
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import InstanceId, Role


class Router(Protocol):
    """What a mode decides."""

    def route(self, picture: Picture, ask: Ask, now: float) -> Route:
        """A request came. `picture` was taken at most a report period ago."""

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
        """The client has the last token of a request."""


class SplitMode:
    """Today's router and prefill instances: prompt here, answer there where possible."""

    def __init__(self, setting: Setting) -> None:
        self._submissions = Submissions()
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
        own_tokens = self._submissions.unreported(picture.view, picture.at_s)
        route = choose_route(picture.view, model=MODEL, splittable=True, own_tokens=own_tokens)
        assert isinstance(route, Split | Whole), "somebody is there, and nobody full"
        first = route.prefill if isinstance(route, Split) else route.instance
        self._submissions.add(first, ask.prompt_tokens, now)
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
        self._in_flight = {each.id: 0 for each in setting.instances}
        self._where: dict[int, InstanceId] = {}

    def route(self, picture: Picture, ask: Ask, now: float) -> Route:
        best = min(self._in_flight, key=self._in_flight.__getitem__)
        self._in_flight[best] += 1
        self._where[ask.id] = best
        return Whole(best, "fewest in flight")

    def ended(self, ask: Ask, now: float) -> None:
        self._in_flight[self._where.pop(ask.id)] -= 1


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
