"""Orders to move running outputs, and what came of them."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from itertools import count
from typing import Any

import aiohttp

from tests.e2e.cluster import Cluster, metrics
from tests.e2e.compare import difference, merged, reply_to


def outcomes(cluster: Cluster) -> Counter[str]:
    """How many moves ended how, since the start."""
    found = Counter[str]()
    line = r'tetri_moves_total{outcome="(\w+)".*} ([\d.]+)'
    for outcome, number in re.findall(line, metrics(cluster.url)):
        found[outcome] += int(float(number))
    return found


async def move_on(url: str, count: int = 2) -> None:
    """Order every output that runs to the next of that many decode instances, again and again."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/tetri/v1/requests") as response:
                rows = (await response.json())["requests"]
            for row in rows:
                if row["phase"] in ("decoding", "serving") and row["decode"].startswith("decode"):
                    other = (int(row["decode"].removeprefix("decode-")) + 1) % count
                    path = f"{url}/tetri/v1/requests/{row['id']}/move"
                    async with session.post(path, json={"to": f"decode-{other}"}) as response:
                        assert response.status in (202, 404, 409)
            await asyncio.sleep(0.05)


class Persistent:
    """Clients that ask for bodies in turn, and again for what the death of the router cut."""

    def __init__(self, url: str, bodies: list[Any], expected: list[Any]) -> None:
        self._url, self._bodies, self._expected = url, bodies, expected
        self._turns = count()
        self.is_over = False
        self.router_died_s: list[float] = []
        self.found = Counter[str]()
        self.wrong: list[Any] = []
        self.lost: list[str] = []  # for no death of the router

    async def run(self) -> None:
        while not self.is_over:
            turn = next(self._turns)
            at, name = turn % len(self._bodies), f"turn {turn}"  # each has a digest of its own
            while (reason := await self._ask(at, {**self._bodies[at], "user": name})) == "cut":
                await asyncio.sleep(0.2)
            self.found[reason] += 1

    async def _ask(self, at: int, body: Any) -> str:
        begin_s, problem = time.monotonic(), ""
        try:
            reply = await reply_to(self._url, body)
            if reply.status == 200 and b'"error"' not in reply.raw:
                differs = difference(merged(reply), self._expected[at])
                self.wrong += [(body, differs)] if differs else []
                return "wrong" if differs else "right"
            problem = f"{reply.status}: {reply.raw[-300:]!r}"
        except aiohttp.ClientError as error:
            problem = repr(error)
        if any(begin_s - 5 < each for each in self.router_died_s):  # and 5 s until it is back
            self.found["cut"] += 1
            return "cut"
        self.lost.append(problem)
        return "lost"
