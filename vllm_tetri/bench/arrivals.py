"""Requests of two kinds that come in phases, each at its time whatever became of others.

Prompts of *code* are long and its answers short, so it is mostly prefill; *conversation*
has long answers. Lengths come from traces, or are drawn from two distributions like
those of the Azure LLM inference traces of 2023. Times of traces are not used: arrivals
are Poisson, at a rate per kind. An answer's length is fixed by the client (`max_tokens`
with `ignore_eos`), which is what the predictor `oracle` goes by.
"""

from __future__ import annotations

import asyncio
import csv
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from statistics import fmean

import aiohttp

from vllm_tetri.bench.stats import quantile
from vllm_tetri.bench.workload import LogNormal
from vllm_tetri.errors import ConfigError, UnsupportedError

_LEAST_ANSWER = 2  # one of a single token is never handed over
_TOKEN_IDS = range(10, 500)  # every tokenizer has them
_COLUMNS = ("ContextTokens", "GeneratedTokens")


class Kind(StrEnum):
    """What requests of a phase are like."""

    CODE = "code"
    CONVERSATION = "conversation"


# Medians of prompts and answers are the traces', and sigmas such that their means after
# the cut of 3,500 and 512 tokens are about the traces': 1,670 and 27 tokens of code,
# 1,100 and 208 of conversation.
_SHAPES = {Kind.CODE: ((1470, 0.8), (13, 1.2)), Kind.CONVERSATION: ((1020, 0.4), (129, 1.5))}


@dataclass(frozen=True, slots=True)
class Length:
    """Of a request, in tokens."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: how long it is, and when it comes, in seconds of the imagined device."""

    at_s: float
    phase: int
    length: Length


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of it: its first and last token, in the device's seconds since it was
    due. That it was sent late, if it was, counts."""

    arrival: Arrival
    first_s: float
    done_s: float


class Source:
    """Lengths of one kind, the longest of them cut to `cut`."""

    def __init__(self, kind: Kind, known: Sequence[Length], cut: Length) -> None:
        self._known = known
        self._cut = cut
        prompt, answer = _SHAPES[kind]
        self._prompt = LogNormal(*prompt, least=1, most=cut.prompt_tokens)
        self._answer = LogNormal(*answer, least=_LEAST_ANSWER, most=cut.output_tokens)

    def draw(self, rng: Random) -> Length:
        """One request's, each time any of the known ones."""
        if not self._known:
            return Length(self._prompt.draw(rng), self._answer.draw(rng))
        found = rng.choice(self._known)
        answer_tokens = max(found.output_tokens, _LEAST_ANSWER)
        return Length(
            min(found.prompt_tokens, self._cut.prompt_tokens),
            min(answer_tokens, self._cut.output_tokens),
        )

    def text(self) -> str:
        """For captions; a trace's is its file's name."""
        return f"log-normal, prompts {self._prompt.text()}, answers {self._answer.text()} tokens"


def read(path: Path, option: str) -> list[Length]:
    """Lengths of a CSV file with the columns of the Azure LLM inference traces.

    Raises:
        ConfigError: It cannot be read, is empty, or holds something else.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{option} {path}: it has no column {missing[0]}")
            found = [_length(f"{option} {path}, line {reader.line_num}", row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{option} {path}: {error}") from error
    if not found:
        raise ConfigError(f"{option} {path}: it holds no requests")
    return found


def _length(where: str, row: dict[str, str | None]) -> Length:
    try:
        prompt, answer = (int(row[name] or "") for name in _COLUMNS)
    except ValueError as error:
        raise ConfigError(f"{where}: {' and '.join(_COLUMNS)} are whole numbers") from error
    if prompt < 1 or answer < 1:
        raise ConfigError(f"{where}: {' and '.join(_COLUMNS)} are at least 1")
    return Length(prompt, answer)


def draw(
    kinds: Sequence[Kind],
    phase_s: float,
    rates: dict[Kind, float],
    sources: dict[Kind, Source],
    rng: Random,
) -> list[Arrival]:
    """Poisson arrivals of one phase after the other, in order of time.

    Args:
        kinds: What each phase has.
        rates: Requests per second of a phase.
    """
    found = []
    for phase, kind in enumerate(kinds):
        at_s = rng.expovariate(rates[kind])
        while at_s < phase_s:
            found.append(Arrival(phase * phase_s + at_s, phase, sources[kind].draw(rng)))
            at_s += rng.expovariate(rates[kind])
    return found


# -- sending -----------------------------------------------------------------------


def bodies(model: str, arrivals: Sequence[Arrival], rng: Random) -> list[bytes]:
    """The requests, of random tokens, ready to be sent."""
    return [
        json.dumps(
            {
                "model": model,
                "prompt": rng.choices(_TOKEN_IDS, k=each.length.prompt_tokens),
                "max_tokens": each.length.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for each in arrivals
    ]


def send(
    url: str,
    arrivals: Sequence[Arrival],
    requests: Sequence[bytes],
    *,
    started: float,
    scale: float,
    limit_s: float,
) -> list[Answered]:
    """Send each at its time through the router at `url`, and wait for the last answer.

    Args:
        started: Monotonic time of second 0.
        scale: Real seconds in one of the device's.

    Raises:
        UnsupportedError: A request failed, or not all were answered within `limit_s`.
    """
    try:
        return asyncio.run(
            asyncio.wait_for(_send(url, arrivals, requests, started, scale), limit_s)
        )
    except TimeoutError as error:
        raise UnsupportedError(f"not all requests were answered within {limit_s:.0f} s") from error


async def _send(
    url: str, arrivals: Sequence[Arrival], requests: Sequence[bytes], started: float, scale: float
) -> list[Answered]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        pairs = zip(arrivals, requests, strict=True)
        return await asyncio.gather(
            *(_one(session, arrival, body, started, scale) for arrival, body in pairs)
        )


async def _one(
    session: aiohttp.ClientSession, arrival: Arrival, body: bytes, started: float, scale: float
) -> Answered:
    due = started + arrival.at_s * scale
    await asyncio.sleep(due - time.monotonic())
    first_s, tokens = math.nan, 0
    headers = {"Content-Type": "application/json"}
    async with session.post("/v1/completions", data=body, headers=headers) as answer:
        if answer.status != 200:
            raise UnsupportedError(f"HTTP {answer.status}: {(await answer.text())[:200]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise UnsupportedError(str(event["error"])[:200])
            if math.isnan(first_s) and event.get("choices"):
                first_s = time.monotonic() - due
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    done_s = time.monotonic() - due
    if tokens != arrival.length.output_tokens or math.isnan(first_s):
        raise UnsupportedError(f"{tokens} of {arrival.length.output_tokens} tokens came")
    return Answered(arrival, first_s / scale, done_s / scale)


# -- figures -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slo:
    """In time is a request with its first token and its mean time per further token within."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Of some requests, in seconds of the imagined device.

    Attributes:
        tpot_s: From the first token to the last, per further token, with the hand-over.
        attained: Share of requests in time.
    """

    requests: int
    ttft_s: float
    ttft_p99_s: float
    tpot_s: float
    jct_s: float
    jct_p99_s: float
    attained: float


def figures(answered: Sequence[Answered], slo: Slo) -> Figures:
    """Of at least one request."""
    ttft_s = [each.first_s for each in answered]
    jct_s = [each.done_s for each in answered]
    tpot_s = [
        (each.done_s - each.first_s) / (each.arrival.length.output_tokens - 1) for each in answered
    ]
    pairs = zip(ttft_s, tpot_s, strict=True)
    return Figures(
        requests=len(answered),
        ttft_s=fmean(ttft_s),
        ttft_p99_s=quantile(ttft_s, 0.99),
        tpot_s=fmean(tpot_s),
        jct_s=fmean(jct_s),
        jct_p99_s=quantile(jct_s, 0.99),
        attained=fmean(ttft <= slo.ttft_s and tpot <= slo.tpot_s for ttft, tpot in pairs),
    )
