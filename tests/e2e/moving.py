"""Orders to move running outputs, and what came of them."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections import Counter

import aiohttp

from tests.e2e.cluster import Cluster


def outcomes(cluster: Cluster) -> Counter[str]:
    """How many moves ended how, since the start."""
    found = Counter[str]()
    text = urllib.request.urlopen(f"{cluster.url}/metrics", timeout=30).read().decode()
    for outcome, number in re.findall(r'tetri_moves_total{outcome="(\w+)".*} ([\d.]+)', text):
        found[outcome] += int(float(number))
    return found


async def move_on(url: str) -> None:
    """Order every output that runs to the other decode instance, again and again."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/tetri/v1/requests") as response:
                rows = (await response.json())["requests"]
            for row in rows:
                if row["phase"] in ("decoding", "serving") and row["decode"].startswith("decode"):
                    other = {"decode-0": "decode-1", "decode-1": "decode-0"}[row["decode"]]
                    path = f"{url}/tetri/v1/requests/{row['id']}/move"
                    async with session.post(path, json={"to": other}) as response:
                        assert response.status in (202, 404, 409)
            await asyncio.sleep(0.05)
