"""FastServe (section 4 of its paper): a multi-level feedback queue over the steps of requests.

Each level has a quantum, the first that of the shortest step there is, every other one twice that
of the level above. A request joins the first level whose quantum holds its prompt, skipping those
above (skip-join), and sinks by one level when its steps have taken the quantum of its own. Every
step takes the requests of the highest levels, first come first served within one, as many as memory
holds; prompts are computed whole. What has waited for `starving_s` goes to the top.

Requests that are interrupted keep their KV in the host's memory. The paper moves it ahead of its
use; here that costs no time at all, which flatters it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from vllm_tetri.sim.cluster import ENGINES
from vllm_tetri.sim.config import EngineKind, InstanceConfig
from vllm_tetri.sim.engine.instance import Cluster, Share
from vllm_tetri.sim.engine.stock import StockInstance
from vllm_tetri.sim.request import SimRequest

_TIMES = 2  # by which a quantum is longer than that of the level above


@dataclass(frozen=True)
class FastServe(EngineKind):
    """Levels with quanta, and for how long a request waits at most before it goes to the top."""

    starving_s: float = 10.0
    can_hand_over = has_prefix_cache = False


@dataclass(slots=True)
class _Job:
    level: int
    turn: int  # of arrival in its level
    ran_s: float  # when its last step ended, or it came
    left_s: float  # of its quantum


class FastServeInstance(StockInstance):
    """A simulated `FastServe`. What waits is a prompt, or is interrupted and has its KV outside."""

    def __init__(self, config: InstanceConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        assert isinstance(config.engine.kind, FastServe)
        self._starving_s = config.engine.kind.starving_s
        self._first_s = config.engine.cost.step_s(1, 0, 0, 0)
        self._jobs: dict[SimRequest, _Job] = {}
        self._ran: list[SimRequest] = []  # in the newest step
        self._turns = count()

    def submit(self, request: SimRequest, now: float) -> None:
        tokens = request.target_tokens
        prompt_s = self.engine.cost.step_s(0, 0, tokens, (tokens - 1) / 2)
        level = 0
        while self._quantum_s(level) < prompt_s:
            level += 1
        self._jobs[request] = _Job(level, next(self._turns), now, self._quantum_s(level))
        super().submit(request, now)

    def put_back(self, request: SimRequest) -> None:
        request.target_tokens = request.num_computed_tokens
        self.waiting.append(request)

    def on_end(self, request: SimRequest) -> None:
        del self._jobs[request]

    def compose(self, now: float) -> list[Share]:
        self._age(now)
        self.batch.settle()
        chosen = self._choose()
        for request in [each for each in self.batch if each not in chosen]:
            self.batch.put_last(request)
            self.preempt_newest(now)
        shares: list[Share] = []
        waiting, self.waiting = self.waiting, type(self.waiting)()
        for request in waiting:
            if request not in chosen:
                self.waiting.append(request)
            elif request.num_output_tokens:
                self.free_blocks -= self.blocks(request.num_computed_tokens)
                self.batch.join(request)
            else:
                self.started.append(request)
                shares.append((request, self.take_blocks(request, request.missing_tokens)))
        self.grow(now)
        self._ran = [*self.batch, *(request for request, _ in shares)]
        return shares

    def _quantum_s(self, level: int) -> float:
        return self._first_s * float(_TIMES**level)

    def _age(self, now: float) -> None:
        """Count the newest step, and let what starves rise."""
        for request in self._ran:
            job = self._jobs.get(request)
            if job is None:  # it has ended
                continue
            job.ran_s, job.left_s = now, job.left_s - self.step_s
            if job.left_s <= 0:
                self._enter(job, job.level + 1)
        self._ran = []
        for job in self._jobs.values():
            if job.level and now - job.ran_s >= self._starving_s:
                self._enter(job, 0)

    def _enter(self, job: _Job, level: int) -> None:
        job.level, job.turn, job.left_s = level, next(self._turns), self._quantum_s(level)

    def _choose(self) -> set[SimRequest]:
        """Choose the requests of the next step."""
        chosen: set[SimRequest] = set()
        left = self.engine.kv_blocks
        for request, _ in sorted(
            self._jobs.items(), key=lambda item: (item[1].level, item[1].turn)
        ):
            tokens = request.num_computed_tokens + 1
            blocks = self.blocks(tokens if request.num_output_tokens else request.target_tokens)
            if blocks <= left and len(chosen) < self.engine.max_requests:
                chosen.add(request)
                left -= blocks
        return chosen


ENGINES[FastServe] = FastServeInstance
