"""What a soak looks at: who is ready, what is left, and whether all is at rest."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_tetri.bench.soak import processes
from vllm_tetri.bench.soak.client import Client
from vllm_tetri.bench.soak.cluster import Cluster
from vllm_tetri.bench.soak.faults import AWAY, PREDICTOR, READY, ROUTER, Fault
from vllm_tetri.bench.soak.tally import Asked, End, Leftovers
from vllm_tetri.bench.soak.usage import Usage, usage_of

LOOK_S = 0.5
_REST_S = 60.0
_WHOLE_S = 180.0  # an instance that died may be waited for by `up` before it starts again
_DYING_S = 0.2  # what was hit may look well for a moment
_QUIET_S = 2.0  # for two audits
_HAS_REQUESTS = ("running", "waiting", "held")
_BUSY = (*_HAS_REQUESTS, "blocks_used", "arena_used_bytes")
_GOES_ON = re.compile(r"request (\S+) goes on after")

Rows = Mapping[str, Mapping[str, Any]]
"""What a router says of instances, by name."""


@dataclass(frozen=True, slots=True)
class Rest:
    """A time without requests.

    Attributes:
        faults: That had happened until then.
        took_s: Until all was back and at rest, or until it was waited for no longer.
        missed: What was not back, and what was still busy, in words.
    """

    faults: int
    took_s: float
    missed: tuple[str, ...]


@dataclass(slots=True)
class Seen:
    """Everything that was noted.

    Attributes:
        leftovers: What instances said that they had left.
        samples: Of what the cluster takes, whole and at rest.
        under_faults_s: How long it was broken, without the rests between.
        resumed: Ids of requests that routers say they went on with.
        unended: What outlived the cluster.
    """

    asked: list[Asked] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    leftovers: Leftovers = field(default_factory=Leftovers)
    samples: list[Usage] = field(default_factory=list)
    under_faults_s: float = 0.0
    resumed: set[str] = field(default_factory=set)
    unended: list[str] = field(default_factory=list)

    def count(self, end: End) -> int:
        """Requests that ended so."""
        return sum(each.end is end for each in self.asked)


@dataclass(frozen=True, slots=True)
class Look:
    """What routers said at one moment; a router that did not answer said nothing of
    nobody."""

    routers: Mapping[str, Rows]
    predictors: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> Rows:
        """Of the router that knows most instances: one that starts knows none at first."""
        return max(self.routers.values(), key=len, default={})

    def states(self) -> dict[str, tuple[str, str]]:
        """Role and state of everybody."""
        found = {
            name: (ROUTER, READY if any(row["state"] == READY for row in rows.values()) else AWAY)
            for name, rows in self.routers.items()
        }
        found |= {name: (row["role"], row["state"]) for name, row in self.rows.items()}
        return found | {name: (PREDICTOR, state) for name, state in self.predictors.items()}

    def missing(self, instances: Collection[str], predictors: Collection[str]) -> list[str]:
        """Who is not of use to everybody else, in words."""
        found = []
        for router, rows in sorted(self.routers.items()):
            if not rows:
                found.append(f"{router} does not answer")
                continue
            away = [name for name in instances if rows.get(name, {}).get("state") != READY]
            found += [f"{name} is not ready for {router}" for name in sorted(away)]
        away = [name for name in predictors if self.predictors.get(name) != READY]
        return found + [f"{name} does not run" for name in sorted(away)]


class Watch:
    """Looks at a cluster. Used by one event loop.

    Args:
        instances: Names of all.
    """

    def __init__(
        self, cluster: Cluster, client: Client, seen: Seen, instances: Collection[str]
    ) -> None:
        self._cluster = cluster
        self._client = client
        self._seen = seen
        self._instances = instances
        self._predictors: set[str] = set()
        self.is_stopping = False  # somebody is stopped now

    async def find_predictors(self) -> list[str]:
        """Those that run now, which are all that there should be."""
        self._predictors = {
            name for name, state in (await self._look_for_predictors()).items() if state == READY
        }
        return sorted(self._predictors)

    async def look(self, *, at_predictors: bool = False) -> Look:
        """At routers and instances; faults and leftovers are noted.

        Args:
            at_predictors: Also while none of them is a victim; that reads every process
                of the machine.
        """
        began_s = time.monotonic()
        # What another fault did to a victim says nothing of the one before.
        newest = {each.victim: each for each in self._seen.faults}
        faults = [
            each
            for each in newest.values()
            if each.whole_s is None and each.at_s + _DYING_S < began_s
        ]
        at_predictors |= any(each.kind.role == PREDICTOR for each in faults)
        answers = await asyncio.gather(
            *(self._client.get(name, "/tetri/v1/instances") for name in self._client.routers)
        )
        routers = {
            name: {row["id"]: row for row in (answer or {}).get("instances", ())}
            for name, answer in zip(self._client.routers, answers, strict=True)
        }
        found = Look(routers, await self._look_for_predictors() if at_predictors else {})
        now = time.monotonic()
        if self.is_stopping:
            self._seen.leftovers.excuse()
        elif found.rows:
            # One that has requests again says what it saw when it had none.
            live = {
                name: row
                for name, row in found.rows.items()
                if row["state"] == READY and not any(row.get(field) for field in _HAS_REQUESTS)
            }
            self._seen.leftovers.note({name: row["leftovers"] for name, row in live.items()}, now)
        states = found.states()
        for fault in faults:
            fault.look(states, now)
        return found

    async def keep_looking(self) -> None:
        """Every now and then, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def rest(self) -> float:
        """Wait until everybody is back and nothing is left of any request; how long that
        took. Nobody asks meanwhile."""
        began_s = time.monotonic()
        missed = await self._until_whole() or await self._settle()
        if not missed:
            await self._sample()
        took_s = time.monotonic() - began_s
        self._seen.rests.append(Rest(len(self._seen.faults), took_s, tuple(missed)))
        return took_s

    async def _look_for_predictors(self) -> dict[str, str]:
        def look() -> dict[str, str]:
            found = {
                name: tree[0]
                for name, tree in self._cluster.members().items()
                if processes.is_predictor(name)
            }
            return {
                name: READY if processes.is_running(process) else AWAY
                for name, process in found.items()
            }

        return await asyncio.to_thread(look)

    async def _until_whole(self) -> list[str]:
        """Who did not come back."""
        deadline = time.monotonic() + _WHOLE_S
        while True:
            found = await self.look(at_predictors=bool(self._predictors))
            missing = found.missing(self._instances, self._predictors)
            if not missing or time.monotonic() >= deadline or not self._cluster.is_running():
                return missing
            await asyncio.sleep(LOOK_S)

    async def _settle(self) -> list[str]:
        """What did not come to rest for long enough that audits say so."""
        deadline, quiet_s = time.monotonic() + _REST_S, None
        while True:
            rows = (await self.look()).rows
            busy, now = [*busy_of(rows), *await self._in_routers()], time.monotonic()
            quiet_s = None if busy or not rows else quiet_s or now
            if quiet_s is not None and now - quiet_s >= _QUIET_S:
                return []
            if now >= deadline:
                return busy or ["no router answers"]
            await asyncio.sleep(LOOK_S)

    async def _in_routers(self) -> list[str]:
        """Requests that routers still have, in words."""
        names = list(self._client.routers)
        answers = await asyncio.gather(
            *(self._client.get(name, "/tetri/v1/requests") for name in names)
        )
        numbers = [len((answer or {}).get("requests", ())) for answer in answers]
        return [
            f"{name}: {number} requests"
            for name, number in zip(names, numbers, strict=True)
            if number
        ]

    async def _sample(self) -> None:
        def take() -> Usage:
            return usage_of(self._cluster.processes(), time.monotonic())

        self._seen.samples.append(await asyncio.to_thread(take))


def busy_of(rows: Rows) -> list[str]:
    """What instances still have, in words."""
    return [
        f"{name}: {field} {row[field]}"
        for name, row in sorted(rows.items())
        for field in (*_BUSY, "leftovers")
        if row.get(field) and row.get("state") == READY
    ]


def resumed_in(folder: Path) -> set[str]:
    """Ids of requests that routers went on with, by their logs."""
    return {
        name
        for path in folder.glob("router*.log")
        for name in _GOES_ON.findall(path.read_text(errors="replace"))
    }
