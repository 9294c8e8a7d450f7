"""An overload from start to end: what a cluster can serve, ten times that, and afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
import psutil

from vllm_tetri.bench.overload.talker import Talker
from vllm_tetri.bench.overload.turn import End, Played, Turn, poisson
from vllm_tetri.bench.soak.cluster import Cluster
from vllm_tetri.bench.soak.usage import Usage, usage_of
from vllm_tetri.bench.soak.watch import busy_of
from vllm_tetri.errors import UnsupportedError

# Of the closed loop, before what it serves is counted.
RAMP_S = 5.0
CAPACITY_S = 15.0
NORMAL_S = 20.0
AFTER_S = 20.0
# Part of what a cluster can serve that is asked for before and after.
NORMAL_LOAD = 0.5
# A client below its share has so much of it, while another one asks for all too much.
MODEST_LOAD = 0.2
_SAMPLE_S = 1.0
_LOOK_S = 0.5
_LIMIT_S = 300.0
_REST_S = 300.0
_QUIET_S = 2.0
_GREEDY, _MODEST = 0, 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to happen.

    Attributes:
        times: Arrivals of the overload, in capacities.
        seconds: That it lasts.
        clients: That ask without a pause to find the capacity.
        keys: API keys: none, or those of a greedy client and of a modest one.
    """

    times: float
    seconds: float
    clients: int
    prompt_tokens: int
    answer_tokens: int
    keys: Sequence[str]
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A look at the cluster.

    Attributes:
        at_s: Monotonic.
        groups: What each member's processes take.
        rows: What the router says of instances.
    """

    at_s: float
    groups: dict[str, Usage]
    rows: dict[str, dict[str, Any]]


@dataclass(slots=True)
class Seen:
    """Everything that was noted.

    Attributes:
        capacity: Requests per second that were served without a pause.
        rest: The cluster before the overload.
        samples: During it and afterwards, once a second.
        unrested: What was still busy when all clients had gone.
        unended: What outlived the cluster.
    """

    capacity: float = 0.0
    closed: Played | None = None
    normal: Played | None = None
    overload: Played | None = None
    rest: Sample | None = None
    samples: list[Sample] = field(default_factory=list)
    unrested: list[str] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)


class Overload:
    """One run against a cluster that is being started. Used once, by one event loop.

    Args:
        tell: Told what happens, for whoever watches.
    """

    def __init__(
        self,
        cluster: Cluster,
        talker: Talker,
        plan: Plan,
        seen: Seen,
        tell: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._talker = talker
        self._plan = plan
        self._seen = seen
        self._tell = tell
        self._url = self._model = ""
        self._members: dict[str, list[psutil.Process]] = {}

    async def run(self) -> None:
        """From a cluster that starts to one that is at rest again.

        Raises:
            UnsupportedError: It did not start, or serves nothing.
        """
        self._tell("starting the cluster")
        facts = await self._cluster.ready()
        self._url, self._model = facts["url"], facts["model"]
        plan, seen = self._plan, self._seen
        headers = {"Authorization": f"Bearer {plan.keys[_GREEDY]}"} if plan.keys else {}
        async with aiohttp.ClientSession(headers=headers) as session:
            self._tell(f"{plan.clients} clients without a pause: what it can serve")
            seen.closed = await self._talker.play(self._turn("capacity", clients=plan.clients))
            seen.capacity = capacity_of(seen.closed)
            await self._settle(session)
            rate = seen.capacity
            self._tell(f"{NORMAL_LOAD * rate:.1f} requests a second: normal service")
            seen.normal = await self._talker.play(self._normal())
            await self._settle(session)
            self._members = await asyncio.to_thread(self._cluster.members)
            seen.rest = await self._sample(session)
            self._tell(f"{plan.times * rate:.0f} requests a second: overload")
            sampling = asyncio.create_task(self._sampling(session))
            try:
                seen.overload = await self._talker.play(self._overload())
            finally:
                sampling.cancel()
                with suppress(asyncio.CancelledError):
                    await sampling  # raises what went wrong in it
            self._tell("waiting until it is at rest")
            seen.unrested = await self._settle(session)

    # -- what is asked ---------------------------------------------------------------

    def _turn(self, name: str, **more: Any) -> Turn:
        plan = self._plan
        return Turn(
            url=self._url,
            model=self._model,
            prompt_tokens=plan.prompt_tokens,
            answer_tokens=plan.answer_tokens,
            limit_s=_LIMIT_S,
            seed=f"{plan.seed} {name}",
            keys=plan.keys,
            seconds=RAMP_S + CAPACITY_S,
            **more,
        )

    def _normal(self) -> Turn:
        rate, rng = NORMAL_LOAD * self._seen.capacity, Random(f"{self._plan.seed} normal times")
        return self._turn("normal", at_s=poisson(rate, 0.0, NORMAL_S, rng))

    def _overload(self) -> Turn:
        plan, capacity = self._plan, self._seen.capacity
        asked = arrivals(plan, capacity, Random(f"{plan.seed} overload times"))
        return self._turn(
            "overload", at_s=[at_s for at_s, _ in asked], whose=[whose for _, whose in asked]
        )

    # -- what is looked at -----------------------------------------------------------

    async def _rows(self, session: aiohttp.ClientSession) -> dict[str, dict[str, Any]]:
        """What the router says of instances; nothing if it does not answer."""
        try:
            url = f"{self._url}/tetri/v1/instances"
            async with asyncio.timeout(5.0), session.get(url) as response:
                found = (await response.json())["instances"]
                return {each["id"]: each for each in found}
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
            return {}

    async def _sample(self, session: aiohttp.ClientSession) -> Sample:
        def take() -> dict[str, Usage]:
            return {name: usage_of(each, now) for name, each in self._members.items()}

        now = time.monotonic()
        return Sample(now, await asyncio.to_thread(take), await self._rows(session))

    async def _sampling(self, session: aiohttp.ClientSession) -> None:
        """A sample every second, until cancelled."""
        while True:
            await asyncio.sleep(_SAMPLE_S)
            sample = await self._sample(session)
            self._seen.samples.append(sample)
            in_flight = sum(row["in_flight"] for row in sample.rows.values())
            self._tell(f"overload, and after it; {in_flight} requests in the cluster")

    async def _settle(self, session: aiohttp.ClientSession) -> list[str]:
        """Wait until nothing is left of any request; what still is after a while."""
        deadline, quiet_s = time.monotonic() + _REST_S, None
        busy = ["the router does not answer"]
        while (now := time.monotonic()) < deadline:
            rows = await self._rows(session)
            busy = busy_of(rows) if rows else ["the router does not answer"]
            quiet_s = None if busy else quiet_s or now
            if quiet_s is not None and now - quiet_s >= _QUIET_S:
                return []
            await asyncio.sleep(_LOOK_S)
        return busy or ["it was not at rest for long enough"]


def capacity_of(played: Played) -> float:
    """Requests per second that were served once everybody was at it.

    Raises:
        UnsupportedError: None, or something else became of one.
    """
    wrong = [each for each in played.replies if each.end is not End.SERVED]
    if wrong:
        first = wrong[0]
        raise UnsupportedError(
            f"without overload {len(wrong)} requests were not served: {first.words or first.end}; "
            "try fewer --clients"
        )
    ends = [each.at_s + each.done_s for each in played.replies]
    counted = sum(RAMP_S <= end < RAMP_S + CAPACITY_S for end in ends)
    if not counted:
        raise UnsupportedError(
            f"no request ended within {CAPACITY_S:g} s; try a shorter --answer or --prompt"
        )
    return counted / CAPACITY_S


def arrivals(plan: Plan, capacity: float, rng: Random) -> list[tuple[float, int]]:
    """Times of the overload and of what follows at once, and whose each request is."""
    found = [(at_s, _GREEDY) for at_s in poisson(plan.times * capacity, 0.0, plan.seconds, rng)]
    end_s, usual = plan.seconds + AFTER_S, NORMAL_LOAD * capacity
    if not plan.keys:
        return found + [(at_s, _GREEDY) for at_s in poisson(usual, plan.seconds, end_s, rng)]
    modest = MODEST_LOAD * capacity
    found += [(at_s, _MODEST) for at_s in poisson(modest, 0.0, end_s, rng)]
    rest = usual - modest
    return sorted(found + [(at_s, _GREEDY) for at_s in poisson(rest, plan.seconds, end_s, rng)])


async def overload(
    cluster: Cluster, talker: Talker, plan: Plan, seen: Seen, tell: Callable[[str], None]
) -> None:
    """Run, and end the client and the cluster whatever happens; see `Overload.run`."""
    try:
        await Overload(cluster, talker, plan, seen, tell).run()
    finally:
        tell("ending the cluster")

        def close() -> list[str]:
            talker.close()
            return cluster.close()

        closing = asyncio.ensure_future(asyncio.to_thread(close))
        while not closing.done():
            with suppress(asyncio.CancelledError):  # a second Ctrl-C does not leave it behind
                await asyncio.shield(closing)
        seen.unended += closing.result()
