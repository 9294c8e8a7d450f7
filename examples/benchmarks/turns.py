"""Conversations of several turns on several systems: what a prefix cache is worth.

Every conversation is a chat that sends all its messages again with each turn, as OpenAI clients
do; its outputs have an exact length. Conversations run side by side, and the next turn of each
follows some time after the last one ended. Every system gets the same user messages; all have
their prefix caches on. In every repeat systems come in random order, each started anew. With
`--scale` every engine has a modelled device of its own (`pace.py`) instead of a part of this CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import aiohttp

from examples.benchmarks import pace
from examples.benchmarks.cluster import (
    SYSTEMS,
    Site,
    add_site,
    conditions,
    get_json,
    parse,
    serving,
)
from examples.benchmarks.figures import Results

WORDS = (
    "river stone light paper garden window travel winter silver market "
    "summer letter morning orange forest bridge music kitchen number story"
)
# KV that instances sent, for hand-overs and as prefixes, and prompt tokens that came as prefixes.
COUNTERS = ("kv_bytes_sent", "fetched_tokens")
REPORTED_S = 1.0  # more than the time between two reports of an instance
TIMEOUT = aiohttp.ClientTimeout(total=600)


def text(num_words: int, rng: Random) -> str:
    return " ".join(rng.choices(WORDS.split(), k=num_words))


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[float, float, str, dict[str, Any]]:
    """Return seconds to the first token and to the end, the text, and the usage."""
    begun_s, first_s, words, usage = time.monotonic(), 0.0, list[str](), dict[str, Any]()
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if content := choice["delta"].get("content"):
                    first_s = first_s or time.monotonic() - begun_s
                    words.append(content)
    return first_s, time.monotonic() - begun_s, "".join(words), usage


async def converse(
    session: aiohttp.ClientSession, url: str, model: str, options: argparse.Namespace, seed: str
) -> list[dict[str, Any]]:
    """Hold one conversation; one row per turn."""
    rng, messages, rows = Random(seed), list[dict[str, str]](), list[dict[str, Any]]()
    await asyncio.sleep(rng.random() * options.pause)
    for turn in range(options.turns):
        num_words = options.later_words if turn else options.first_words
        messages.append({"role": "user", "content": text(num_words, rng)})
        body = {
            "model": model, "messages": messages, "max_tokens": options.output_len,
            "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        ttft_s, jct_s, answer, usage = await ask(session, url, body)
        details = usage.get("prompt_tokens_details") or {}
        rows.append(
            {
                "seed": seed,
                "turn": turn + 1,
                "ttft_s": round(ttft_s, 4),
                "jct_s": round(jct_s, 4),
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": details.get("cached_tokens", 0),
            }
        )
        messages.append({"role": "assistant", "content": answer})
        await asyncio.sleep(rng.random() * 2 * options.pause)
    return rows


async def measure(
    url: str, model: str, options: argparse.Namespace, repeat: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Hold all conversations of a repeat side by side, after one that does not count. Returns a
    row per turn, what instances counted meanwhile, and the size of their blocks."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        await converse(session, url, model, options, f"{options.seed} warm-up {repeat}")
        before = await counted(url)
        seeds = [f"{options.seed} {repeat} {each}" for each in range(options.conversations)]
        held = (converse(session, url, model, options, seed) for seed in seeds)
        rows = [row for rows in await asyncio.gather(*held) for row in rows]
        after = await counted(url)
    counts = {name: after[name] - before[name] for name in COUNTERS}
    caches = get_json(f"{url}/tetri/v1/cache").get("instances", ())
    return rows, {
        **counts,
        "block_tokens": max((each["block_tokens"] for each in caches), default=0),
    }


async def counted(url: str) -> dict[str, int]:
    """Sums over all instances, once reports do not change them any more; 0 for stock vLLM."""
    newest: dict[str, int] = {}
    while True:
        before = newest
        rows = get_json(f"{url}/tetri/v1/instances").get("instances", ())
        newest = {name: sum(each[name] for each in rows) for name in COUNTERS}
        if newest == before:
            return newest
        await asyncio.sleep(REPORTED_S)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of first and later turns, in ms, and the part of the later prompts that was cached."""
    later = [each for each in rows if each["turn"] > 1]
    prompts = sum(each["prompt_tokens"] for each in later)
    return {
        "first_ttft_ms": round(1e3 * fmean(each["ttft_s"] for each in rows if each["turn"] == 1)),
        "later_ttft_ms": round(1e3 * fmean(each["ttft_s"] for each in later)),
        "jct_ms": round(1e3 * fmean(each["jct_s"] for each in rows)),
        "cached": round(sum(each["cached_tokens"] for each in later) / max(1, prompts), 3),
    }


def paced(name: str, site: Site, options: argparse.Namespace) -> Site:
    """Give every engine of a system a modelled device, if that is wanted."""
    if not options.scale:
        return site
    system, device = SYSTEMS[name], pace.Pace(str(site.folder / "late"), options.scale)
    kv_tokens = options.kv_tokens // system.engines
    return pace.on_device(site, device, kv_tokens, is_ours=bool(system.up))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_site(parser)
    default = "stock,split-2p1d,adaptive-2p1d"
    parser.add_argument("--systems", default=default, help=f"of {', '.join(SYSTEMS)}; {default}")
    parser.add_argument("--repeats", type=int, default=1, help="how often each is started; 1")
    parser.add_argument("--conversations", type=int, default=6, help="side by side; 6")
    parser.add_argument("--turns", type=int, default=4, help="of each; 4")
    parser.add_argument("--first-words", type=int, default=300, help="of its first message; 300")
    parser.add_argument("--later-words", type=int, default=20, help="of every later one; 20")
    parser.add_argument("--output-len", type=int, default=150, help="tokens of an output; 150")
    parser.add_argument("--pause", type=float, default=1.0, help="mean s before a turn; 1")
    parser.add_argument("--scale", type=float, default=0.0, help="of modelled step times; 0: real")
    parser.add_argument("--kv-tokens", type=int, default=24576, help="of a system, if modelled")
    parser.add_argument("--output", type=Path, required=True, help="result file (JSON lines)")
    options, site = parse(parser)
    where = ("model", "folder", "output")  # of this machine
    given = {key: str(value) for key, value in vars(options).items() if key not in where}
    results = Results(options.output, conditions(site, given=given))
    for repeat in range(options.repeats):
        systems = options.systems.split(",")
        Random(f"{options.seed} {repeat}").shuffle(systems)
        for name in systems:
            if results.has(system=name, repeat=repeat):
                continue
            up = ("--placement", "shared-cores") if options.scale else ()
            with serving(name, paced(name, site, options), up=up) as url:
                rows, counts = asyncio.run(measure(url, site.name, options, repeat))
            cell = {**counts, **summary(rows)}
            results.add(system=name, repeat=repeat, **cell, turns=rows)
            print(f"repeat {repeat}, {name}: {cell}", flush=True)


if __name__ == "__main__":
    main()
