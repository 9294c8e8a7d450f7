"""Requests that share a batch of one real engine, as in section 2.2 of TetriInfer's paper.

Light prompts have 18 tokens and heavy ones 512. Every load of a figure is compared with its first
one, which has nothing beside what is watched, on the same server and in the same round:

    3a, 3b  first token of a light prompt that comes right after light (3a) or heavy prompts (3b).
            The paper: 2 and 8 times longer with 7 and 63 light ones, more than 10 with heavy ones
    3c      first token of a heavy prompt after light ones. The paper: 3 times longer
    4a, 4b  time per token of a light decode while light (4a) or heavy prompts (4b) are computed,
            and the longest of each time. The paper: five times longer beside one heavy prompt
    4c, 4d  first token of a light (4c) or a heavy prompt (4d) beside light decodes. The paper: up
            to 2.5 times longer, from more than seven decodes on
    5       time per token of light decodes (60 tokens) in a batch that is light, or half heavy
            (513 tokens, of which 256 have come). The paper, at a batch of 128: 1.23 times longer,
            0.84 of the throughput. Tokens a second are those while all light ones run, if they
            ever do

When something is due follows from tokens that have come, so it does not depend on the engine's
speed. A prompt of figures 4a and 4b comes with a token of the watched decode, so the step that is
under way then is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from random import Random
from statistics import fmean
from typing import Any

from examples.benchmarks.client import Reply, Request, random_prompt
from examples.benchmarks.figures import tpot_s

LIGHT, HEAVY = 18, 512
PROMPTS = {"light": LIGHT, "heavy": HEAVY}
DECODE = 96  # tokens of a decode that is watched, or that is beside a prompt
BURSTS = (24, 48, 72)  # tokens of it that have come when prompts come
LIGHT_DECODE, HEAVY_DECODE, HALF_WAY = 60, 513, 256
BLOCK_TOKENS = 32  # the least of vLLM on CPUs
# A heavy decode has 9 blocks when light ones come, and 17 at its end.
LITTLE_KV = 5  # blocks per request of the largest batch
PAPER = {  # how many times longer, by how a load's name begins
    "3a: light prompt, 7": "2",
    "3a: light prompt, 63": "8",
    "3b: light prompt, 16": "> 10, number not stated",
    "3c: heavy prompt, 63": "3, number not stated",
    "4b: light decode, 1 ": "5",
    "4c: light prompt, 7 ": "1: rises beyond 7",
    "4c: light prompt, 127": "up to 2.5",
    "4d: heavy prompt, 127": "up to 2.5",
    "5, batch of 128: half": "1.23",
}
WARM_UP = "4b: light decode, 1 heavy prompts"
METRICS = ["probe_ms", "slowdown", "longest", "tokens_per_s", "throughput", "preemptions"]


def loads(rng: Random, batches: Sequence[int]) -> dict[str, list[Request]]:
    """Make every load, the plain one of a figure first."""
    found: dict[str, list[Request]] = {}
    for figure, watched, kind, counts in (
        ("3a", "light", "light", (0, 7, 63)),
        ("3b", "light", "heavy", (0, 1, 4, 16)),
        ("3c", "heavy", "light", (0, 63)),
    ):
        for count in counts:
            probe = Request(0.002, random_prompt(PROMPTS[watched], rng), 2)
            others = (Request(0.0, random_prompt(PROMPTS[kind], rng), 2) for _ in range(count))
            found[f"{figure}: {watched} prompt, {count} {kind} prompts"] = [probe, *others]
    for figure, kind, counts in (("4a", "light", (0, 1, 7, 63)), ("4b", "heavy", (0, 1, 4))):
        for count in counts:
            name = f"{figure}: light decode, {count} {kind} prompts"
            found[name] = list(_decode_beside(PROMPTS[kind], count, rng))
    for figure, kind in (("4c", "light"), ("4d", "heavy")):
        for count in (0, 7, 31, 127):
            name = f"{figure}: {kind} prompt, {count} light decodes"
            found[name] = list(_prompt_beside(PROMPTS[kind], count, rng))
    for size in batches:
        found[f"5, batch of {size}: all light"] = [_light(rng) for _ in range(size)]
        found[f"5, batch of {size}: half heavy"] = list(_half_heavy(size, rng))
    return found


def _decode_beside(prompt_tokens: int, count: int, rng: Random) -> Iterator[Request]:
    yield Request(0.0, random_prompt(LIGHT, rng), DECODE)
    for tokens in BURSTS:
        for _ in range(count):
            yield Request(0.0, random_prompt(prompt_tokens, rng), 1, after=(0, tokens))


def _prompt_beside(prompt_tokens: int, count: int, rng: Random) -> Iterator[Request]:
    last = len(BURSTS) + count - 1
    for place, tokens in enumerate(BURSTS):
        alone = (place - 1, 1) if place else None  # the next one when the last one is done
        after = (last, tokens) if count else alone
        yield Request(0.0, random_prompt(prompt_tokens, rng), 1, after=after)
    for _ in range(count):
        yield Request(0.0, random_prompt(LIGHT, rng), DECODE)


def _light(rng: Random, after: tuple[int, int] | None = None) -> Request:
    return Request(0.0, random_prompt(LIGHT, rng), LIGHT_DECODE, after=after)


def _half_heavy(size: int, rng: Random) -> Iterator[Request]:
    for _ in range(size // 2):
        yield _light(rng, after=(size - 1, HALF_WAY))
    for _ in range(size - size // 2):
        yield Request(0.0, random_prompt(LIGHT, rng), HEAVY_DECODE)


def _token_times(reply: Reply) -> list[float]:
    """Seconds after the start of the schedule at which tokens came."""
    gaps = (1e-6 * gap for gap in reply.gaps_us)
    return list(accumulate(gaps, initial=reply.due_s + reply.ttft_s))


def gaps_beside(watched: Reply, others: Sequence[Reply]) -> list[list[float]]:
    """Seconds between tokens of a decode while others wait for their first token, a list per burst:
    those that came at the same time. The step that was under way then is left out, unless it is the
    only one; of the last one most must have been before the last of their first tokens."""
    ends: dict[float, float] = {}
    for each in others:
        came = next((at for at in ends if abs(at - each.due_s) < 1e-3), each.due_s)
        ends[came] = max(ends.get(came, 0.0), each.due_s + each.ttft_s)
    steps, found = list(pairwise(_token_times(watched))), []
    for came, last in ends.items():
        later = [(begin, end) for begin, end in steps if end > came]
        inside = [each for each in later if sum(each) / 2 < last] or later[:1]
        found.append([end - begin for begin, end in inside[1:] or inside])
    return found


def _of_first_token(requests: Sequence[Request], replies: Sequence[Reply]) -> dict[str, float]:
    return {"probe_ms": 1e3 * replies[0].ttft_s}


def _of_decode(requests: Sequence[Request], replies: Sequence[Reply]) -> dict[str, float]:
    if len(replies) == 1:
        return {"probe_ms": 1e-3 * fmean(replies[0].gaps_us[BURSTS[0] :])}
    bursts = [each for each in gaps_beside(replies[0], replies[1:]) if each]
    if not bursts:  # the decode had ended before
        return {"probe_ms": math.nan, "longest_ms": math.nan}
    return {
        "probe_ms": 1e3 * fmean(gap for burst in bursts for gap in burst),
        "longest_ms": 1e3 * fmean(map(max, bursts)),
    }


def _of_prompt(requests: Sequence[Request], replies: Sequence[Reply]) -> dict[str, float]:
    return {"probe_ms": 1e3 * fmean(each.ttft_s for each in replies[: len(BURSTS)])}


def _of_batch(requests: Sequence[Request], replies: Sequence[Reply]) -> dict[str, float]:
    light = [each for each in replies if each.num_tokens == LIGHT_DECODE]
    times = [_token_times(each) for each in replies]
    watched = [_token_times(each) for each in light]
    begin, end = max(each[0] for each in watched), min(each[-1] for each in watched)
    if begin >= end:  # they did not all run at the same time: memory was too little
        begin, end = min(each[0] for each in watched), max(each[-1] for each in watched)
    came = sum(begin < at <= end for each in times for at in each)
    return {"probe_ms": 1e3 * fmean(map(tpot_s, light)), "tokens_per_s": came / (end - begin)}


Figures = Callable[[Sequence[Request], Sequence[Reply]], dict[str, float]]
_FIGURES: dict[str, Figures] = {
    "3a": _of_first_token, "3b": _of_first_token, "3c": _of_first_token,
    "4a": _of_decode, "4b": _of_decode, "4c": _of_prompt, "4d": _of_prompt,
    "5,": _of_batch,
}  # fmt: skip


def figures_of(load: str, requests: Sequence[Request], replies: Sequence[Reply]) -> dict[str, Any]:
    """Return what a load says of what is watched in it."""
    return _FIGURES[load[:2]](requests, replies)


def compare(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add to cells of one round how many times more they have than the plain load of their figure:
    time (`slowdown`), the longest gap of a burst (`longest`), tokens a second (`throughput`)."""
    plain: dict[str, Mapping[str, Any]] = {}
    found = []
    for cell in cells:
        first = plain.setdefault(cell["load"].partition(":")[0], cell)
        parts = {"slowdown": "probe_ms", "longest": "longest_ms", "throughput": "tokens_per_s"}
        more = {
            name: cell[metric] / first["probe_ms" if name == "longest" else metric]
            for name, metric in parts.items()
            if metric in cell
        }
        found.append({**cell, **more})
    return found
