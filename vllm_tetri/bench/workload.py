"""Requests with answers of known lengths: from a file or drawn, and sent all at once.

An answer's length must not show in `max_tokens`: that bounds what admission expects,
as it should, and would correct every wrong prediction. So the token that ends an
answer is forbidden before `min_tokens` and certain behind it, and `max_tokens` is as
generous as clients' often are. Only the predictor `oracle` looks at `min_tokens`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from vllm_tetri.errors import ConfigError, UnsupportedError

_END_TOKEN = 9
_CERTAIN = 100  # the largest bias that the API allows
_MAX_TOKENS = 2048
_LONGEST_CHARACTERS = 3000  # of a prompt, so that it fits into small windows
_FIRST_ORDINARY_TOKEN = 10
_VOCABULARY = 500  # every tokenizer has so many tokens


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Of lengths, in tokens."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: Random) -> int:
        length = round(rng.lognormvariate(math.log(self.median), self.sigma))
        return min(max(length, self.least), self.most)

    def text(self) -> str:
        return f"median {self.median:g}, sigma {self.sigma:g}, at most {self.most}"


# Medians of ShareGPT as the paper has them (section 5.1), tails like those of its turns.
# An answer of one token is never handed over.
PROMPT = LogNormal(median=18, sigma=1.7, least=2, most=1500)
ANSWER = LogNormal(median=128, sigma=1.1, least=2, most=1500)
BUILT_IN = f"log-normal, prompts {PROMPT.text()}, answers {ANSWER.text()} tokens"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: a text or token ids, and how long its answer will be."""

    prompt: str | list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of a request; times in seconds from when all were sent.

    Attributes:
        decode: Instance that decoded it.
        first_s: When its first token came.
        done_s: When its last token came.
    """

    decode: str
    output_tokens: int
    first_s: float
    done_s: float


def draw(count: int, rng: Random) -> list[Ask]:
    """Requests of the built-in distribution, of random tokens."""
    return [
        Ask(
            [rng.randrange(_FIRST_ORDINARY_TOKEN, _VOCABULARY) for _ in range(PROMPT.draw(rng))],
            ANSWER.draw(rng),
        )
        for _ in range(count)
    ]


def read(path: Path) -> list[Ask]:
    """Requests of a JSONL file with `prompt` and `output_tokens`, as `vllm bench serve
    --dataset-name custom` reads them; very long prompts are left out, and long answers
    cut as the built-in ones.

    Raises:
        ConfigError: It cannot be read, or a line holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from error
    found = [_ask(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    short = [each for each in found if len(each.prompt) <= _LONGEST_CHARACTERS]
    if not short:
        raise ConfigError(f"--prompts {path}: it holds no requests of usual length")
    return [Ask(each.prompt, min(each.output_tokens, ANSWER.most)) for each in short]


def pick(
    known: Sequence[Ask] | None, count: int, rng: Random, *, longest_tokens: int = ANSWER.most
) -> list[Ask]:
    """Requests for one run: each known one at most once as far as they go, or drawn.

    Args:
        longest_tokens: Longer answers are cut to this.
    """
    if known is None:
        found = draw(count, rng)
    elif len(known) >= count:
        found = rng.sample(known, count)
    else:
        found = rng.choices(known, k=count)
    return [Ask(each.prompt, min(each.output_tokens, longest_tokens)) for each in found]


def _ask(path: Path, number: int, line: str) -> Ask:
    wanted = '{"prompt": "text", "output_tokens": 2 or more}'
    try:
        raw = json.loads(line)
        prompt, tokens = raw["prompt"], raw["output_tokens"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--prompts {path}, line {number}: write {wanted}") from error
    if not (isinstance(prompt, str) and isinstance(tokens, int) and tokens >= 2):
        raise ConfigError(f"--prompts {path}, line {number}: write {wanted}")
    return Ask(prompt, tokens)


# -- sending -----------------------------------------------------------------------


def send(url: str, model: str, asks: Sequence[Ask], *, limit_s: float) -> list[Answered]:
    """Send all at once through the router at `url`, and wait for the last answer.

    Raises:
        UnsupportedError: A request failed, or not all were answered within `limit_s`.
    """
    try:
        return asyncio.run(asyncio.wait_for(_send(url, model, asks), limit_s))
    except TimeoutError as error:
        raise UnsupportedError(f"not all requests were answered within {limit_s:.0f} s") from error


async def _send(url: str, model: str, asks: Sequence[Ask]) -> list[Answered]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        started = time.monotonic()
        return await asyncio.gather(*(_one(session, model, each, started) for each in asks))


async def _one(session: aiohttp.ClientSession, model: str, ask: Ask, started: float) -> Answered:
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": _MAX_TOKENS,
        "min_tokens": ask.output_tokens - 1,
        "stop_token_ids": [_END_TOKEN],
        "logit_bias": {str(_END_TOKEN): _CERTAIN},
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_s, tokens = math.nan, 0
    async with session.post("/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise UnsupportedError(f"HTTP {answer.status}: {(await answer.text())[:200]}")
        async for event in _events(answer):
            if "error" in event:
                raise UnsupportedError(str(event["error"])[:200])
            if math.isnan(first_s) and event.get("choices"):
                first_s = time.monotonic() - started
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
        decode = answer.headers.get("x-tetri-decode", "")
        prefill = answer.headers.get("x-tetri-prefill", "")
    if tokens != ask.output_tokens:
        raise UnsupportedError(f"{tokens} of {ask.output_tokens} tokens came from {decode}")
    if not prefill or prefill == decode:
        raise UnsupportedError(f"a request was not handed over, but served by {decode} alone")
    return Answered(decode, tokens, first_s, time.monotonic() - started)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
