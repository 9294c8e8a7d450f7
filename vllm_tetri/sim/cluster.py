"""A whole cluster in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.promise import Late
from vllm_tetri.policy.route import Split
from vllm_tetri.sim.engine.instance import Instance
from vllm_tetri.sim.engine.machines import instance_of
from vllm_tetri.sim.engine.tetri import TetriInstance
from vllm_tetri.sim.job import Job, Refused, Served, served
from vllm_tetri.sim.links import Links, Transfer
from vllm_tetri.sim.log import Dispatched, Held, Log, Refusal, Routed
from vllm_tetri.sim.loop import Loop
from vllm_tetri.sim.mode.modes import router_of
from vllm_tetri.sim.setting import Setting
from vllm_tetri.sim.views import Pictures
from vllm_tetri.sim.workload import Ask
from vllm_tetri.types import InstanceId


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a simulation.

    Attributes:
        served: Every request that was not refused, as they were given.
        refused: The others.
        busy: Per instance the part of the time, from 0 s to the end, that it spent in steps.
        num_steps: Of all instances.
        preemptions: Of all instances.
        end_s: When the last token came, or the last refusal.
    """

    served: list[Served]
    refused: list[Refused]
    busy: dict[InstanceId, float]
    num_steps: int
    preemptions: int
    end_s: float


def simulate(setting: Setting, requests: Sequence[Ask]) -> list[Served]:
    """What becomes of every request, as they were given; of one that is refused, nothing.

    Raises:
        ConfigError: There are none, or one does not fit into an instance.
    """
    return run(setting, requests).served


def run(
    setting: Setting,
    requests: Sequence[Ask],
    *,
    on_end: Callable[[], object] = lambda: None,
    log: Log | None = None,
) -> Outcome:
    """The same, with figures of the instances.

    Args:
        on_end: Called after every request.
        log: Called with every decision.

    Raises:
        ConfigError: See `simulate`.
    """
    _check(setting, requests)
    return _Simulation(setting, requests, on_end, log).run()


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
        if longest > each.shape.window_tokens:
            raise ConfigError(
                f"a request of {longest} tokens is longer than the window of {each.id}: "
                f"{each.shape.window_tokens} tokens"
            )


class _Simulation:
    """Owner of everything in it. Implements `instance.Cluster`."""

    def __init__(
        self,
        setting: Setting,
        requests: Sequence[Ask],
        on_end: Callable[[], object],
        log: Log | None,
    ) -> None:
        self._setting = setting
        self._requests = requests
        self._on_end = on_end
        self._log = log
        self._loop = Loop()
        self._instances: dict[InstanceId, Instance] = {
            place.id: instance_of(place, self, self._loop) for place in setting.instances
        }
        for each in self._instances.values():
            each.log = log
        self._router = router_of(setting)
        self._pictures = Pictures(list(self._instances.values()), setting)
        self._picture = self._heard = self._pictures.take(0.0)
        # All of it before the router: what it has sent is where it was sent.
        self._front_s = max(place.shape.front_s for place in setting.instances)
        self._num_left = len(requests)
        self._links = None if setting.link is None else Links(setting.link, self._loop.at)
        self._served: dict[int, Served] = {}
        self._refused: list[Refused] = []
        self._end_s = 0.0

    def run(self) -> Outcome:
        loop = self._loop
        loop.at(self._setting.report_period_s, self._report)
        in_order = sorted(self._requests, key=attrgetter("arrival_s"))
        loop.run((ask.arrival_s, partial(self._arrive, ask)) for ask in in_order)
        self._check_rest()
        instances = list(self._instances.values())
        return Outcome(
            served=[self._served[ask.id] for ask in self._requests if ask.id in self._served],
            refused=self._refused,
            busy={each.place.id: each.busy_s / (self._end_s or 1.0) for each in instances},
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

    def _arrive(self, ask: Ask, now: float) -> None:
        if self._front_s:
            self._loop.at(now + self._front_s, partial(self._route, ask))
        else:
            self._route(ask, now)

    def _route(self, ask: Ask, now: float) -> None:
        route = self._router.route(self._picture, ask, now)
        if isinstance(route, Late):
            self._refused.append(Refused(ask, route.reason))
            if self._log is not None:
                self._log(Refusal(ask.id, route.reason, route.retry_after_s))
            self._one_less(now)
            return
        job = Job(ask, str(ask.id))
        job.is_split = isinstance(route, Split)
        job.prefill = route.prefill if isinstance(route, Split) else route.instance
        if self._log is not None:
            self._log(Routed(job.ask.id, job.prefill, job.is_split))
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
        if job.is_granted and self._setting.sends_chunks:
            self._send(job, now, is_last=False)

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
        elif self._setting.sends_chunks:
            self._send(job, now, is_last=False)

    def _dispatch(self, job: Job, now: float, *, may_wait: bool) -> None:
        assert job.prefill is not None
        chosen = self._router.dispatch(job.prefill, self._heard, job.ask, now, may_wait=may_wait)
        if chosen is None and may_wait:
            return
        if self._log is not None and chosen is not None:
            self._log(Dispatched(job.ask.id, chosen.instance))
        if chosen is None or chosen.instance == job.prefill:
            job.is_split = False
            return
        job.decode = chosen.instance
        self._tetri(chosen.instance).open(job)
        if self._log is not None and not job.is_granted:
            self._log(Held(job.ask.id, chosen.instance))

    def _hand_over(self, job: Job, now: float) -> None:
        assert job.decode is not None
        self._tetri(job.decode).expect(job, now)
        if self._links is not None:
            self._send(job, now, is_last=True)
            return
        hidden_tokens = job.hidden_tokens if self._setting.sends_chunks else 0
        exposed_tokens = job.ask.prompt_tokens - hidden_tokens
        seconds = self._setting.handover_base_s + exposed_tokens * self._setting.handover_token_s
        self._loop.at(now + seconds, partial(self._handed_over, job))

    def _send(self, job: Job, now: float, *, is_last: bool) -> None:
        """Over links: what is computed of its KV and did not leave yet. A preempted prompt
        computes some again that did."""
        tokens = job.computed_tokens - job.sent_tokens
        if self._links is None or tokens <= 0:
            return
        assert job.prefill is not None
        if job.transfer is None:
            assert job.decode is not None
            job.transfer = Transfer(job.prefill, job.decode, partial(self._arrived, job))
        job.sent_tokens += tokens
        bytes_each = self._instances[job.prefill].shape.kv_token_bytes
        assert bytes_each is not None, "links know what a token takes"
        self._links.send(job.transfer, tokens * bytes_each, now, is_last=is_last)

    def _arrived(self, job: Job, now: float) -> None:
        self._loop.at(now + self._setting.handover_base_s, partial(self._handed_over, job))

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
        if job.is_split and job.decode is not None and job.produced_tokens == 1:
            self._tetri(job.decode).drop(job, now)  # the first token was the last one
            job.decode = None
        self._served[job.ask.id] = served(job)
        self._router.ended(job.ask, now)
        self._one_less(now)

    def _one_less(self, now: float) -> None:
        self._num_left -= 1
        self._end_s = max(self._end_s, now)
        self._on_end()
