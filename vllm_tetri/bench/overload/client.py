"""The client of `vllm-tetri bench overload`: a process that plays one turn at a time.

A child of the benchmark: it reads turns as lines of JSON and answers each with a line. One
event loop for all requests, each on a connection of its own, as from as many clients.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from random import Random
from urllib.parse import urlsplit

import uvloop

from vllm_tetri.bench.overload.exchange import Broken, Exchange
from vllm_tetri.bench.overload.turn import End, Played, Reply, Turn

_TOKEN_IDS = range(10, 500)  # every tokenizer has them
_BEFORE_FIRST_S = 0.2
_LONGEST_PAUSE_S = 1.0  # of a client that asks without an end and was refused


async def play(turn: Turn) -> Played:
    """Send everything at its time and wait for the last answer."""
    player = _Player(turn)
    used_s = time.process_time()
    replies = await (player.without_pause() if turn.clients else player.at_their_times())
    return Played(
        replies=replies,
        started_s=player.started_s,
        took_s=time.monotonic() - player.started_s,
        cpu_s=time.process_time() - used_s,
    )


class _Player:
    """One turn. Owner: the event loop."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._request = _writer(turn)
        host, port = urlsplit(turn.url).netloc.rsplit(":", 1)
        self._host, self._port = host, int(port)
        self.started_s = time.monotonic() + _BEFORE_FIRST_S

    async def at_their_times(self) -> list[Reply]:
        turn = self._turn
        asking = []
        for place, at_s in enumerate(turn.at_s):
            await asyncio.sleep(self.started_s + at_s - time.monotonic())
            whose = turn.whose[place] if turn.whose else 0
            asking.append(asyncio.create_task(self._ask(at_s, whose)))
        return list(await asyncio.gather(*asking))

    async def without_pause(self) -> list[Reply]:
        turn, found = self._turn, list[Reply]()

        async def loop() -> None:
            while (at_s := time.monotonic() - self.started_s) < turn.seconds:
                reply = await self._ask(max(0.0, at_s), 0)
                found.append(reply)
                if reply.end is not End.SERVED:
                    await asyncio.sleep(_LONGEST_PAUSE_S)

        await asyncio.sleep(self.started_s - time.monotonic())
        await asyncio.gather(*(loop() for _ in range(turn.clients)))
        return sorted(found, key=lambda each: each.at_s)

    async def _ask(self, at_s: float, whose: int) -> Reply:
        turn, due_s = self._turn, self.started_s + at_s
        sent_s, first_s, again_s = time.monotonic(), 0.0, 0
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout(turn.limit_s):
                loop = asyncio.get_running_loop()
                _, exchange = await loop.create_connection(Exchange, self._host, self._port)
                await exchange.ask(self._request(whose))
            end, again_s, words = exchange.outcome(turn.answer_tokens)
            first_s = max(0.0, exchange.first_s - due_s)
        except TimeoutError:
            end, words = End.BAD, f"no answer within {turn.limit_s:g} s"
        except (OSError, Broken) as error:
            end, words = End.BAD, f"{type(error).__name__}: {error}"
        finally:
            if exchange is not None:
                exchange.close()
        return Reply(
            end=end,
            at_s=at_s,
            late_s=max(0.0, sent_s - due_s),
            first_s=first_s,
            done_s=max(0.0, time.monotonic() - due_s),
            retry_after_s=again_s,
            whose=whose,
            words=words,
        )


def _writer(turn: Turn) -> Callable[[int], bytes]:
    """Makes one HTTP request after the other, with prompts of random tokens."""
    rng, netloc = Random(turn.seed), urlsplit(turn.url).netloc
    rest = json.dumps(
        {
            "model": turn.model,
            "max_tokens": turn.answer_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )

    def write(whose: int) -> bytes:
        prompt = rng.choices(_TOKEN_IDS, k=turn.prompt_tokens)
        raw = f'{rest[:-1]}, "prompt": {prompt}}}'.encode()
        lines = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(raw)}",
        ]
        if turn.keys:
            lines.append(f"Authorization: Bearer {turn.keys[whose]}")
        return "\r\n".join([*lines, "", ""]).encode() + raw

    return write


def _allow_files() -> None:
    """A connection is a file. What is allowed by default is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _main() -> None:
    _allow_files()
    # Without a buffer, as PYTHONUNBUFFERED has it, print loses what a full pipe did not take.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        for line in sys.stdin:
            played = uvloop.run(play(Turn(**json.loads(line))))
            out.write(json.dumps(asdict(played)).encode() + b"\n")
            out.flush()


if __name__ == "__main__":
    _main()
