"""A soak from start to end: what is asked, who is hit, and what is looked at meanwhile."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm_tetri.bench.soak import load, processes
from vllm_tetri.bench.soak.client import Answer, Client, Failed, loop
from vllm_tetri.bench.soak.cluster import Cluster
from vllm_tetri.bench.soak.faults import READY, Deck, Fault, Kind
from vllm_tetri.bench.soak.load import Request
from vllm_tetri.bench.soak.tally import Asked, End, Leftovers
from vllm_tetri.bench.soak.usage import Usage, usage_of
from vllm_tetri.errors import UnsupportedError

# Under load, before the first fault.
CALM_S = 20.0
_LOOK_S = 0.5
_SAMPLE_S = 5.0
_REST_S = 60.0
_WHOLE_S = 180.0  # an instance that died may be waited for by `up` before it starts again
_BUSY = ("running", "waiting", "held", "blocks_used", "arena_used_bytes")

States = Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to happen.

    Attributes:
        seconds: Of faults under load.
        every_s: Between two faults.
        stop_s: How long a stopped victim stays so.
        clients: That ask at a time.
    """

    seconds: float
    every_s: float
    stop_s: float
    clients: int
    kinds: Sequence[Kind]
    seed: int


@dataclass(slots=True)
class Seen:
    """Everything that was noted.

    Attributes:
        leftovers: What instances said that they had left.
        samples: Of what the cluster takes, the first and the last at rest.
        unrested: What was still busy when all clients had gone.
        unended: What outlived the cluster.
    """

    asked: list[Asked] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    leftovers: Leftovers = field(default_factory=Leftovers)
    samples: list[Usage] = field(default_factory=list)
    unrested: list[str] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)

    def count(self, end: End) -> int:
        """Requests that ended so."""
        return sum(each.end is end for each in self.asked)


class Soak:
    """One run against a cluster that is being started. Used once, by one event loop.

    Args:
        tell: Told what happens, for whoever watches.
    """

    def __init__(
        self, cluster: Cluster, plan: Plan, seen: Seen, tell: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._seen = seen
        self._tell = tell
        self._names: set[str] = set()
        self._is_stopping = False  # somebody is stopped now

    async def run(self) -> None:
        """From a cluster that starts to one that is at rest again.

        Raises:
            UnsupportedError: It did not start, or does not answer one request after
                the other.
        """
        self._tell("starting the cluster")
        facts = await self._cluster.ready()
        self._names = {each["id"] for each in facts["instances"]}
        client = Client(facts["url"])
        try:
            known = await self._reference(client, facts["model"])
            self._tell("under load, before the first fault")
            await self._under_load(client, known, CALM_S, self._wait)
            await self._settle(client)
            await self._sample()
            await self._under_load(client, known, self._plan.seconds, self._break)
            self._tell("waiting until everything is back and at rest")
            await self._until_whole(client)
            await self._settle(client)
            await self._sample()
        finally:
            await client.close()

    async def _reference(self, client: Client, model: str) -> list[tuple[Request, Answer]]:
        """Every request and its answer, one at a time, asked twice."""
        models = await client.get("/v1/models")
        if models is None:
            raise UnsupportedError("the router does not answer before any fault")
        window_tokens = models["data"][0]["max_model_len"]
        asked = load.requests(model, window_tokens, Random(self._plan.seed))
        known = []
        for number, request in enumerate(asked, 1):
            self._tell(f"answers before any fault: {number} of {len(asked)}")
            try:
                answer = await client.answer(request)
                again = await client.answer(request.streamed())
            except Failed as error:
                raise UnsupportedError(f"no answer before any fault: {error}") from error
            if answer != again:
                raise UnsupportedError(
                    "the cluster answers the same greedy request differently when nothing else "
                    "runs, so answers cannot be compared; try --dtype float32 behind --"
                )
            known.append((request, answer))
        return known

    # -- under load ------------------------------------------------------------------

    async def _under_load(
        self,
        client: Client,
        known: Sequence[tuple[Request, Answer]],
        seconds: float,
        meanwhile: Callable[[Client, float], Coroutine[Any, Any, None]],
    ) -> None:
        end_s = time.monotonic() + seconds
        rng = Random(f"{self._plan.seed} {seconds}")
        is_over = False
        clients = [
            asyncio.create_task(
                loop(client, known, Random(rng.random()), self._seen.asked.append, lambda: is_over)
            )
            for _ in range(self._plan.clients)
        ]
        looking = asyncio.create_task(self._look(client))
        try:
            await meanwhile(client, end_s)
            is_over = True
            await asyncio.gather(*clients)
            if looking.done():
                looking.result()
        finally:
            for task in (*clients, looking):
                task.cancel()
            await asyncio.gather(*clients, looking, return_exceptions=True)

    async def _wait(self, _: Client, end_s: float) -> None:
        await asyncio.sleep(end_s - time.monotonic())

    async def _break(self, client: Client, end_s: float) -> None:
        """One fault after the other."""
        deck = Deck(self._plan.kinds, Random(f"{self._plan.seed} faults"))
        due_s = time.monotonic()
        while time.monotonic() < end_s and self._cluster.is_running():
            await asyncio.sleep(min(due_s, end_s) - time.monotonic())
            if time.monotonic() >= end_s:
                return
            drawn = deck.draw(await self._states(client))
            if drawn is None:
                await asyncio.sleep(_LOOK_S)  # nobody can be spared
                continue
            await self._hit(*drawn)
            due_s = max(due_s + self._plan.every_s, time.monotonic())

    async def _hit(self, kind: Kind, victim: str) -> None:
        hit = (await asyncio.to_thread(self._cluster.members)).get(victim, [])
        if not hit:
            return
        self._tell(f"{kind}: {victim}")
        self._seen.faults.append(Fault(kind, victim, time.monotonic()))
        if kind.is_deadly:
            processes.send(hit, signal.SIGKILL)
            return
        self._is_stopping = True
        try:
            processes.send(hit, signal.SIGSTOP)
            await asyncio.sleep(self._plan.stop_s)
        finally:
            processes.send(hit, signal.SIGCONT)
            self._is_stopping = False

    # -- what is looked at -----------------------------------------------------------

    async def _states(self, client: Client) -> dict[str, tuple[str, str]]:
        """Role and state of every instance."""
        return states_of(await self._rows(client))

    async def _rows(self, client: Client) -> dict[str, dict[str, Any]]:
        answer = await client.get("/tetri/v1/instances")
        rows = {row["id"]: row for row in (answer or {}).get("instances", ())}
        now = time.monotonic()
        if self._is_stopping:
            self._seen.leftovers.excuse()
        elif rows:
            live = {name: row for name, row in rows.items() if row["state"] == READY}
            self._seen.leftovers.note({name: row["leftovers"] for name, row in live.items()}, now)
        for fault in self._seen.faults:
            fault.look(states_of(rows), now)
        return rows

    async def _look(self, client: Client) -> None:
        """Look at the cluster every now and then, until cancelled."""
        next_s = time.monotonic() + _SAMPLE_S
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._rows(client)
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + _SAMPLE_S
                if self._seen.samples:  # the first one is taken at rest
                    await self._sample()

    async def _sample(self) -> None:
        def take() -> Usage:
            return usage_of(self._cluster.processes(), time.monotonic())

        self._seen.samples.append(await asyncio.to_thread(take))

    async def _until_whole(self, client: Client) -> None:
        """Until every instance of the start is ready again."""
        deadline = time.monotonic() + _WHOLE_S
        states: States = {}
        while time.monotonic() < deadline and self._cluster.is_running():
            states = await self._states(client)
            if all(states.get(name, ("", ""))[1] == READY for name in self._names):
                return
            await asyncio.sleep(_LOOK_S)
        missing = [name for name in sorted(self._names) if states.get(name, ("", ""))[1] != READY]
        self._seen.unrested += [f"{name} did not come back" for name in missing]

    async def _settle(self, client: Client) -> None:
        """Until nothing is left of any request, for long enough that audits say so."""
        deadline, quiet_s = time.monotonic() + _REST_S, None
        busy: list[str] = []
        while time.monotonic() < deadline:
            rows = await self._rows(client)
            busy = busy_of(rows)
            now = time.monotonic()
            quiet_s = None if busy or not rows else quiet_s or now
            if quiet_s is not None and now - quiet_s >= 2.0:
                return
            await asyncio.sleep(_LOOK_S)
        self._seen.unrested += busy or ["the router does not answer"]


def states_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Role and state of every instance."""
    return {name: (row["role"], row["state"]) for name, row in rows.items()}


def busy_of(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What instances still have, in words."""
    return [
        f"{name}: {field} {row[field]}"
        for name, row in sorted(rows.items())
        for field in (*_BUSY, "leftovers")
        if row.get(field) and row.get("state") == READY
    ]


async def soak(cluster: Cluster, plan: Plan, seen: Seen, tell: Callable[[str], None]) -> None:
    """Run, and end the cluster whatever happens; see `Soak.run`."""
    try:
        await Soak(cluster, plan, seen, tell).run()
    finally:
        tell("ending the cluster")
        closing = asyncio.ensure_future(asyncio.to_thread(cluster.close))
        while not closing.done():
            with suppress(asyncio.CancelledError):  # a second Ctrl-C does not leave it behind
                await asyncio.shield(closing)
        seen.unended += closing.result()
