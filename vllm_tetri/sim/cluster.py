"""A whole cluster in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.route import Split
from vllm_tetri.sim.instance import Instance
from vllm_tetri.sim.job import Job, Served, served
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.modes import router_of
from vllm_tetri.sim.setting import Place, Setting
from vllm_tetri.sim.stock import StockInstance
from vllm_tetri.sim.tetri import TetriInstance
from vllm_tetri.sim.views import Pictures
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import InstanceId


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a simulation.

    Attributes:
        served: Every request, as they were given.
        busy: Per instance the part of the time, from 0 s to the last token, that it spent
            in steps.
        num_steps: Of all instances.
        preemptions: Of all instances.
        end_s: When the last token came.
    """

    served: list[Served]
    busy: dict[InstanceId, float]
    num_steps: int
    preemptions: int
    end_s: float


def simulate(setting: Setting, requests: Sequence[Ask]) -> list[Served]:
    """What becomes of every request, as they were given.

    Raises:
        ConfigError: There are none, or one does not fit into an instance's KV pool.
    """
    return run(setting, requests).served


def run(
    setting: Setting, requests: Sequence[Ask], *, on_end: Callable[[], object] = lambda: None
) -> Outcome:
    """The same, with figures of the instances.

    Args:
        on_end: Called after every request.

    Raises:
        ConfigError: See `simulate`.
    """
    _check(setting, requests)
    return _Simulation(setting, requests, on_end).run()


def _check(setting: Setting, requests: Sequence[Ask]) -> None:
    if not requests:
        raise ConfigError("no requests to simulate")
    if len({ask.id for ask in requests}) < len(requests):
        raise ConfigError("two requests have the same id")
    longest = max(ask.prompt_tokens + ask.output_tokens for ask in requests)
    for each in setting.instances:
        tokens = each.shape.kv_blocks * each.shape.block_size
        if longest > tokens:
            raise ConfigError(
                f"a request of {longest} tokens does not fit into the KV pool of {each.id}: "
                f"{each.shape.kv_blocks} blocks of {each.shape.block_size} tokens"
            )


class _Simulation:
    """Owner of everything in it. Implements `instance.Cluster`."""

    def __init__(
        self, setting: Setting, requests: Sequence[Ask], on_end: Callable[[], object]
    ) -> None:
        self._setting = setting
        self._requests = requests
        self._on_end = on_end
        self._loop = Loop()
        self._instances: dict[InstanceId, Instance] = {
            place.id: self._make(place) for place in setting.instances
        }
        self._router = router_of(setting)
        self._pictures = Pictures(list(self._instances.values()), setting)
        self._picture = self._heard = self._pictures.take(0.0)
        self._num_left = len(requests)
        self._jobs: list[Job] = []
        self._end_s = 0.0

    def _make(self, place: Place) -> Instance:
        kind = StockInstance if place.shape.stock_budget else TetriInstance
        return kind(place, self, self._loop)

    def run(self) -> Outcome:
        loop = self._loop
        self._jobs = [Job(ask, str(ask.id)) for ask in self._requests]
        for job in self._jobs:
            loop.at(job.ask.arrival_s, partial(self._arrive, job))
        loop.at(self._setting.report_period_s, self._report)
        loop.run()
        self._check_rest()
        views: dict[int, NDArray[np.float64]] = {}
        instances = list(self._instances.values())
        return Outcome(
            served=[served(job, views) for job in self._jobs],
            busy={each.place.id: each.busy_s / self._end_s for each in instances},
            num_steps=sum(each.num_steps for each in instances),
            preemptions=sum(each.preemptions for each in instances),
            end_s=self._end_s,
        )

    def _check_rest(self) -> None:
        """Nothing is left of any request."""
        assert not self._num_left, f"{self._num_left} requests never ended"
        for each in self._instances.values():
            assert each.free_blocks == each.shape.kv_blocks, f"{each.place.id} keeps blocks"
            if isinstance(each, TetriInstance):
                assert not each.arena.used_tokens, f"{each.place.id} keeps KV"
                assert not each.prompts.unfinished_tokens, f"{each.place.id} keeps prompts"

    # -- router --------------------------------------------------------------------

    def _arrive(self, job: Job, now: float) -> None:
        route = self._router.route(self._picture, job.ask, now)
        job.is_split = isinstance(route, Split)
        job.prefill = route.prefill if isinstance(route, Split) else route.instance
        self._instances[job.prefill].submit(job, now)

    def _report(self, now: float) -> None:
        if not self._num_left:
            return
        assert len(self._loop), f"{self._num_left} requests wait for nothing"
        self._picture = self._pictures.take(now)
        period_s = self._setting.report_period_s
        # Instances hear of it with the router's next broadcast, half a period on average.
        self._loop.at(now + period_s / 2, self._broadcast)
        self._loop.at(now + period_s, self._report)

    def _broadcast(self, now: float) -> None:
        self._heard = self._picture

    # -- between instances -----------------------------------------------------------

    def computed(self, job: Job, now: float) -> None:
        if job.is_split and job.decode is None:
            self._dispatch(job, now, may_wait=True)

    def prefilled(self, job: Job, now: float) -> bool:
        if job.is_split and job.decode is None:
            self._dispatch(job, now, may_wait=False)
        if not job.is_split:
            return False
        if job.is_granted:
            self._hand_over(job, now)
        return True

    def granted(self, job: Job, now: float) -> None:
        if job.produced_tokens:
            self._hand_over(job, now)

    def _dispatch(self, job: Job, now: float, *, may_wait: bool) -> None:
        assert job.prefill is not None
        chosen = self._router.dispatch(job.prefill, self._heard, job.ask, now, may_wait=may_wait)
        if chosen is None and may_wait:
            return
        if chosen is None or chosen.instance == job.prefill:
            job.is_split = False
            return
        job.decode = chosen.instance
        self._tetri(chosen.instance).open(job)

    def _hand_over(self, job: Job, now: float) -> None:
        assert job.decode is not None
        self._tetri(job.decode).expect(job)
        exposed_tokens = job.ask.prompt_tokens - job.hidden_tokens
        seconds = self._setting.handover_base_s + exposed_tokens * self._setting.handover_token_s
        self._loop.at(now + seconds, partial(self._handed_over, job))

    def _handed_over(self, job: Job, now: float) -> None:
        assert job.prefill is not None
        assert job.decode is not None
        self._instances[job.prefill].release(job, now)
        self._tetri(job.decode).receive(job, now)

    def _tetri(self, instance: InstanceId) -> TetriInstance:
        found = self._instances[instance]
        assert isinstance(found, TetriInstance), f"{instance} takes no KV"
        return found

    def ended(self, job: Job, now: float) -> None:
        self._num_left -= 1
        self._end_s = max(self._end_s, now)
        self._router.ended(job.ask, now)
        self._on_end()
