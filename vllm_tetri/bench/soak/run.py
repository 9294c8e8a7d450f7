"""A soak from start to end: what is asked, who is hit, and when it rests."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from vllm_tetri.bench.soak import load, processes
from vllm_tetri.bench.soak.answers import Answer, Failed
from vllm_tetri.bench.soak.client import Client
from vllm_tetri.bench.soak.cluster import Cluster
from vllm_tetri.bench.soak.crowd import Crowd
from vllm_tetri.bench.soak.faults import ENGINE, PREDICTOR, Deck, Fault, Kind
from vllm_tetri.bench.soak.load import Request
from vllm_tetri.bench.soak.watch import LOOK_S, Seen, Watch, resumed_in
from vllm_tetri.errors import UnsupportedError

# Under load, before the first fault.
CALM_S = 20.0
# Faults that had to wait because nobody could be spared may make it last longer.
_PATIENCE = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to happen.

    Attributes:
        seconds: Of faults under load.
        every_s: Between two faults.
        rest_every: Faults between two rests.
        stop_s: How long a stopped victim stays so.
        clients: That ask at a time.
    """

    seconds: float
    every_s: float
    rest_every: int
    stop_s: float
    clients: int
    kinds: Sequence[Kind]
    seed: int

    @property
    def faults(self) -> int:
        """How many there are to be."""
        return max(1, round(self.seconds / self.every_s))

    @property
    def hits_predictors(self) -> bool:
        """Whether there have to be predictors."""
        return any(kind.role == PREDICTOR for kind in self.kinds)


class Soak:
    """One run against a cluster that serves. Used once, by one event loop.

    Args:
        tell: Told what happens, for whoever watches.
    """

    def __init__(
        self,
        cluster: Cluster,
        facts: Mapping[str, Any],
        plan: Plan,
        seen: Seen,
        tell: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._model = str(facts["model"])
        self._plan = plan
        self._seen = seen
        self._tell = tell
        self._client = Client({each["id"]: each["url"] for each in facts["routers"]})
        self._watch = Watch(
            cluster, self._client, seen, {each["id"] for each in facts["instances"]}
        )

    async def run(self) -> None:
        """From the first answer to a cluster that is at rest again.

        Raises:
            UnsupportedError: It does not answer one request after the other, or there is
                no predictor that could be hit.
        """
        looking = asyncio.create_task(self._watch.keep_looking())
        try:
            if not await self._watch.find_predictors() and self._plan.hits_predictors:
                raise UnsupportedError("no instance has a predictor process that could be hit")
            crowd = Crowd(
                self._client,
                await self._reference(),
                Random(self._plan.seed),
                self._plan.clients,
                self._seen.asked.append,
            )
            self._tell("under load, before the first fault")
            async with crowd:
                await asyncio.sleep(CALM_S)
                await self._rest(crowd)
                crowd.go_on()
                await self._break(crowd)
            if looking.done():
                looking.result()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await self._client.close()

    async def _reference(self) -> list[tuple[Request, Answer]]:
        """Every request and its answer, one at a time, asked twice."""
        models = await self._client.get(next(iter(self._client.routers)), "/v1/models")
        if models is None:
            raise UnsupportedError("the router does not answer before any fault")
        window_tokens = models["data"][0]["max_model_len"]
        asked = load.requests(self._model, window_tokens, Random(self._plan.seed))
        known = []
        for number, request in enumerate(asked, 1):
            self._tell(f"answers before any fault: {number} of {len(asked)}")
            try:
                answer = await self._client.answer(request)
                again = await self._client.answer(request.streamed())
            except Failed as error:
                raise UnsupportedError(f"no answer before any fault: {error}") from error
            if answer != again:
                raise UnsupportedError(
                    "the cluster answers the same greedy request differently when nothing else "
                    "runs, so answers cannot be compared; try --dtype float32 behind --"
                )
            known.append((request, answer))
        return known

    async def _break(self, crowd: Crowd) -> None:
        """One fault after the other, and rests between them and behind the last one."""
        plan, rested_at = self._plan, 0
        deck = Deck(plan.kinds, plan.faults, Random(f"{plan.seed} faults"))
        began_s = due_s = time.monotonic()
        end_s = due_s + _PATIENCE * plan.seconds
        while not deck.is_empty and time.monotonic() < end_s and self._cluster.is_running():
            if len(self._seen.faults) - rested_at == plan.rest_every:
                rested_s, rested_at = await self._rest(crowd), len(self._seen.faults)
                began_s, due_s, end_s = (each + rested_s for each in (began_s, due_s, end_s))
                crowd.go_on()
            drawn = deck.draw((await self._watch.look(at_predictors=plan.hits_predictors)).states())
            if drawn is None or not await self._hit(*drawn):
                if drawn is not None:
                    deck.put_back(drawn[0])
                await asyncio.sleep(LOOK_S)  # nobody can be spared
                continue
            # One that came late lets the next ones come earlier.
            due_s = max(due_s + plan.every_s, time.monotonic() + plan.every_s / 2)
            await asyncio.sleep(due_s - time.monotonic())
        self._seen.under_faults_s = time.monotonic() - began_s
        if len(self._seen.faults) > rested_at:
            await self._rest(crowd)

    async def _hit(self, kind: Kind, victim: str) -> bool:
        hit = (await asyncio.to_thread(self._cluster.members)).get(victim, [])
        if kind.role == ENGINE:
            hit = await asyncio.to_thread(processes.engine_of, hit)
        if not hit:
            return False
        self._tell(f"{kind}: {victim}")
        # Predictors are looked at themselves; nobody else has to notice.
        is_gone = kind.role == PREDICTOR
        self._seen.faults.append(Fault(kind, victim, time.monotonic(), was_gone=is_gone))
        if kind.is_deadly:
            processes.send(hit, signal.SIGKILL)
            return True
        self._watch.is_stopping = True
        try:
            processes.send(hit, signal.SIGSTOP)
            await asyncio.sleep(self._plan.stop_s)
        finally:
            processes.send(hit, signal.SIGCONT)
            self._watch.is_stopping = False
        return True

    async def _rest(self, crowd: Crowd) -> float:
        """Take the load away until everything is back and at rest; how long that took."""
        began_s = time.monotonic()
        self._tell("at rest: waiting until everybody is back and nothing is left")
        await crowd.pause()
        await self._watch.rest()
        return time.monotonic() - began_s


async def soak(
    cluster: Cluster, plan: Plan, seen: Seen, tell: Callable[[str], None], folder: Path
) -> None:
    """Run, and end the cluster whatever happens; see `Soak.run`.

    Args:
        folder: Of logs.

    Raises:
        UnsupportedError: The cluster did not start, or see `Soak.run`.
    """
    try:
        tell("starting the cluster")
        await Soak(cluster, await cluster.ready(), plan, seen, tell).run()
        seen.resumed = await asyncio.to_thread(resumed_in, folder)
    finally:
        tell("ending the cluster")
        closing = asyncio.ensure_future(asyncio.to_thread(cluster.close))
        while not closing.done():
            with suppress(asyncio.CancelledError):  # a second Ctrl-C does not leave it behind
                await asyncio.shield(closing)
        seen.unended += closing.result()
