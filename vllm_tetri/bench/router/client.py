"""The client of `vllm-tetri bench router`: a process that plays one turn at a time.

A child of the benchmark: it reads turns as lines of JSON and answers each with a line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from vllm_tetri import handover
from vllm_tetri.bench.router.connection import Connection, connections
from vllm_tetri.bench.router.stub import DIRECT, MODEL
from vllm_tetri.handover import DecodeLeg, Given, PrefillLeg
from vllm_tetri.types import RequestId, TransferId

TOKENS = 16  # of an answer that comes at once
_GIVE_UP_S = 60.0
_LONGEST_GAP_S = 0.005
_WARM_UP = 5
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do.

    Attributes:
        url: Whom to ask.
        decode_url: With it `url` is a prefill instance, and both legs are asked here.
        headers: What the head of every answer has in it.
        pids: Processes whose CPU time belongs to the system.
        streams: How many flow at a time, the timed requests' one included.
        step_s: Seconds between two events of a stream that flows; 0: as fast as possible.
        requests: How many to time, one after the other; 0: only let it flow.
        loops: With it every stream is such requests instead, untimed.
        seconds: How long to let it flow, or loop.
        prompt_tokens: Length of the prompt.
        seed: Of the gaps between timed requests.
    """

    url: str
    decode_url: str = ""
    headers: str = ""
    pids: Sequence[int] = ()
    streams: int = 1
    step_s: float = 0.0
    requests: int = 0
    loops: bool = False
    seconds: float = 0.0
    prompt_tokens: int = 1
    seed: int = 0


@dataclass(slots=True)
class Found:
    """What a turn gave; times in seconds.

    Attributes:
        first_s: From sending a request to its first token.
        second_s: To its second one, the first that a decode instance wrote.
        events: Pieces that came while it flowed, or requests that ended in loops.
        reads: In how many reads they came.
        took_s: How long that was.
        cpu_s: What the system's processes used meanwhile, in ticks of 10 ms.
    """

    first_s: list[float] = field(default_factory=list)
    second_s: list[float] = field(default_factory=list)
    events: int = 0
    reads: int = 0
    took_s: float = 0.0
    cpu_s: float = 0.0


async def play(turn: Turn) -> Found:
    """Play one turn.

    Raises:
        ConnectionError: An answer is none.
        TimeoutError: It takes too long.
    """
    async with asyncio.timeout(_GIVE_UP_S):
        if turn.loops:
            return await _loop(turn)
        async with _flowing(turn) as streams:
            return await (_time(turn, streams) if turn.requests else _flow(turn, streams))


# -- kinds of turns --------------------------------------------------------------


async def _time(turn: Turn, streams: list[Connection]) -> Found:
    """Requests one after the other, at random moments of the others' steps."""
    rng, found, body = Random(turn.seed), Found(), _body(turn)
    asked = _request(turn.url, _prefill_body(body) if turn.decode_url else body)
    then = _request(turn.decode_url, _decode_body(body, turn))
    async with (
        connections(turn.url, 1, turn.headers) as (first,),
        connections(turn.decode_url or turn.url, 1, turn.headers) as (second,),
    ):
        with _measured(turn, streams, found):
            for index in range(turn.requests + _WARM_UP):
                await asyncio.sleep(rng.uniform(0, _LONGEST_GAP_S))
                started = time.perf_counter()
                await first.ask(asked)
                if turn.decode_url:
                    await second.ask(then)
                    times = (first.end_s, second.piece_s[0])
                else:
                    times = (first.piece_s[0], first.piece_s[1])
                if index >= _WARM_UP:
                    found.first_s.append(times[0] - started)
                    found.second_s.append(times[1] - started)
    return found


async def _flow(turn: Turn, streams: list[Connection]) -> Found:
    found = Found()
    with _measured(turn, streams, found):
        await asyncio.sleep(turn.seconds)
    return found


async def _loop(turn: Turn) -> Found:
    """Each stream asks again as soon as it has its answer."""
    found, request = Found(), _request(turn.url, _body(turn))

    async def repeat(connection: Connection, until_s: float) -> int:
        count = 0
        while time.perf_counter() < until_s:
            await connection.ask(request)
            count += 1
        return count

    async with connections(turn.url, turn.streams, turn.headers) as made:
        await asyncio.gather(*(each.ask(request) for each in made))
        with _measured(turn, made, found):
            until_s = time.perf_counter() + turn.seconds
            counts = await asyncio.gather(*(repeat(each, until_s) for each in made))
    found.events = sum(counts)
    return found


# -- around them -----------------------------------------------------------------


@asynccontextmanager
async def _flowing(turn: Turn) -> AsyncIterator[list[Connection]]:
    """Streams that all have begun, beside the timed request's."""
    url, body = turn.url, {**_body(turn), "step_s": turn.step_s}
    if turn.decode_url:
        url, body = turn.decode_url, _decode_body(body, turn)
    request, count = _request(url, body), turn.streams - min(turn.requests, 1)
    async with connections(url, count, turn.headers) as streams:
        await asyncio.gather(*(each.ask(request, pieces=2) for each in streams))
        yield streams
        if any(each.is_over for each in streams):
            raise ConnectionError("a stream ended that should have gone on")


@contextmanager
def _measured(turn: Turn, streams: Sequence[Connection], found: Found) -> Iterator[None]:
    processes = [psutil.Process(pid) for pid in turn.pids]
    pieces, reads = _pieces_and_reads(streams)
    used_s, started = cpu_s(processes), time.perf_counter()
    yield
    found.took_s = time.perf_counter() - started
    found.cpu_s = cpu_s(processes) - used_s
    now_pieces, now_reads = _pieces_and_reads(streams)
    found.events, found.reads = now_pieces - pieces, now_reads - reads


def _pieces_and_reads(streams: Sequence[Connection]) -> tuple[int, int]:
    return sum(each.num_pieces for each in streams), sum(each.num_reads for each in streams)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """What they have used since they began, in seconds."""
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


# -- what is asked ---------------------------------------------------------------


def _body(turn: Turn) -> dict[str, Any]:
    prompt = " token" * turn.prompt_tokens
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True,
    }  # fmt: skip


def _prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """What a router makes of it for a prefill instance."""
    leg = PrefillLeg(TransferId(DIRECT), RequestId("direct"))
    return {**body, "stream": False, handover.FIELD: handover.to_params(leg)}


def _decode_body(body: dict[str, Any], turn: Turn) -> dict[str, Any]:
    """The same for a decode instance."""
    leg = DecodeLeg(TransferId(DIRECT), "stub", Given([1]))
    ids = list(range(turn.prompt_tokens))
    return {**body, "prompt": ids, handover.FIELD: handover.to_params(leg)}


def _request(url: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body, separators=(",", ":")).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"Host: {urlsplit(url).netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
    )
    return "\r\n".join(lines).encode() + _HEAD_END + raw


def _main() -> None:
    for line in sys.stdin:
        try:
            answer = asdict(uvloop.run(play(Turn(**json.loads(line)))))
        except (OSError, TimeoutError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
