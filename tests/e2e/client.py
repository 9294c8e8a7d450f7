"""A small asynchronous OpenAI-style client that keeps everything it sees, and a load of many."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.cluster import Cluster, Stock, running
from tests.e2e.prompts import completion

TIMEOUT = aiohttp.ClientTimeout(total=110)


@dataclass
class Answer:
    """What a client can compare, and when it came."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None
    is_complete: bool = False  # the body, or the stream, ended as it should
    begin_s: float = field(default_factory=time.monotonic)
    end_s: float = 0.0
    pause_s: float = 0.0  # the longest wait for the next line

    @property
    def decode(self) -> str:
        return self.headers.get("x-tetri-decode", "")

    def same_as(self, other: Answer) -> bool:
        mine = (self.status, self.token_ids, self.text, self.finish_reason, self.usage)
        theirs = (other.status, other.token_ids, other.text, other.finish_reason, other.usage)
        return mine == theirs

    def unlike(self, other: Answer) -> str:
        """What differs from another one, in a few words."""
        names = ("status", "text", "finish_reason", "usage", "token_ids")
        found = [name for name in names if getattr(self, name) != getattr(other, name)]
        pairs = zip(self.token_ids, other.token_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        tokens = f"{same} tokens the same of {len(self.token_ids)} and {len(other.token_ids)}"
        return f"{', '.join(found)} differ, {tokens}, ended {self.is_complete}, {self.usage}"

    async def read(self, response: aiohttp.ClientResponse, *, is_streamed: bool) -> None:
        self.status, self.headers = response.status, dict(response.headers)
        if response.status != 200:
            self.error = json.loads(await response.text())["error"]
        elif not is_streamed:
            self._take(await response.json())
            self.is_complete = True
            self.pause_s = time.monotonic() - self.begin_s
        else:
            last_s = self.begin_s
            async for line in response.content:
                self.pause_s = max(self.pause_s, time.monotonic() - last_s)
                last_s = time.monotonic()
                if line.strip() == b"data: [DONE]":
                    self.is_complete = True
                elif line.startswith(b"data: "):
                    self._take(json.loads(line[6:]))

    def _take(self, body: dict[str, Any]) -> None:
        """Add a whole body or one event of a stream."""
        if usage := body.get("usage"):
            self.usage = {key: usage[key] for key in ("prompt_tokens", "completion_tokens")}
        self.error = body.get("error") or self.error
        for choice in body.get("choices", []):
            said = choice.get("delta") or choice.get("message") or choice
            self.text += (said["text"] if "text" in said else said.get("content")) or ""
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice["finish_reason"] or self.finish_reason


@asynccontextmanager
async def posted(url: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response to one request; chat or completion by its body."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(url + path, json=body) as response,
    ):
        yield response


async def ask(url: str, body: Any, answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    async with posted(url, body) as response:
        await answer.read(response, is_streamed=bool(body.get("stream")))
    answer.end_s = time.monotonic()
    return answer


async def split_once(cluster: Cluster) -> None:
    """Wait until a prefill instance knows where decode instances are: it is told ten times a
    second, and a router may know a moment before."""

    async def is_split() -> bool:
        answer = await ask(cluster.url, completion(1, max_tokens=2))
        return answer.headers["x-tetri-prefill"] != answer.decode

    async with asyncio.timeout(20):
        while not await is_split():
            await asyncio.sleep(0.05)


async def ask_all(url: str, bodies: list[Any]) -> list[Answer]:
    """All at once."""
    return list(await asyncio.gather(*(ask(url, body) for body in bodies)))


def stock_answers(
    model: Path, folder: Path, bodies: list[Any], serve: tuple[str, ...] = ()
) -> list[Answer]:
    """What stock says, started for these requests. Seeded ones are asked alone: its CPU worker ends
    at those of which a step computes a part."""

    async def ask_stock(url: str) -> list[Answer]:
        alone = [await ask(url, body) if "seed" in body else None for body in bodies]
        others = iter(await ask_all(url, [body for body in bodies if "seed" not in body]))
        return [each or next(others) for each in alone]

    with running(Stock(model, folder, serve=serve)) as stock:
        found = asyncio.run(ask_stock(stock.url))
    assert [each for each in found if not each.token_ids] == []
    return found


def assert_same(ours: list[Answer], theirs: list[Answer]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.same_as(other), f"{mine} != {other}"


async def struck(
    url: str, bodies: list[Any], strike: Callable[[list[Answer]], None]
) -> list[Answer]:
    """The answers to streamed requests, which are all well under way when something strikes."""
    seen = [Answer() for _ in bodies]
    asking = asyncio.gather(
        *(ask(url, body, each) for body, each in zip(bodies, seen, strict=True))
    )
    await until(lambda: all(len(each.token_ids) > 20 for each in seen), "all have begun")
    await asyncio.to_thread(strike, seen)
    return list(await asking)


async def order(url: str, name: str, role: str, **options: Any) -> tuple[int, dict[str, Any]]:
    path = f"{url}/tetri/v1/instances/{name}/flip"
    async with (
        aiohttp.ClientSession() as session,
        session.post(path, json={"role": role, **options}) as response,
    ):
        return response.status, await response.json()


async def instances(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return await asyncio.to_thread(cluster.instances)


async def flipped(cluster: Cluster, name: str, epoch: int) -> dict[str, Any]:
    """The instance as soon as the flip has ended and all is known of it."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        row = (await instances(cluster))[name]
        flip = row["flip"] or {"epoch": 0}
        if flip["epoch"] >= epoch and (flip["commit_s"] or flip["stage"] == "rolled_back"):
            return row
        await asyncio.sleep(0.02)
    raise AssertionError(f"{name} has not flipped: {row}")


async def flip(cluster: Cluster, name: str, role: str) -> None:
    """Change a role, and wait until it is changed."""
    await until(lambda: cluster.state_of(name) == "ready", f"{name} is ready", 60)
    status, answer = await order(cluster.url, name, role)
    assert status == 202, answer
    assert (await flipped(cluster, name, answer["epoch"]))["role"] == role


async def assert_as_stock(answers: list[Answer], url: str, bodies: list[Any]) -> None:
    """Each answer is what one stock instance says."""
    for answer, body in zip(answers, bodies, strict=True):
        expected = await ask(url, body)
        assert answer.same_as(expected), f"{body}: {answer} != {expected}"


async def assert_handed_over_as_stock(stock: Stock, cluster: Cluster, bodies: list[Any]) -> None:
    """Answers are those of one stock instance, to bodies one by one and to all at once, and KV was
    handed over for them."""
    alone = [await ask(cluster.url, body) for body in bodies]
    together = await ask_all(cluster.url, bodies)
    await assert_as_stock([*alone, *together], stock.url, bodies * 2)
    moved = cluster.instances()
    assert moved["prefill-0"]["kv_bytes_sent"] > 0
    assert moved["decode-0"]["kv_loads_failed"] == 0


async def until(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> float:
    """Wait for a condition, which may block; the seconds that it took."""
    begin_s = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - begin_s < timeout_s, f"not in {timeout_s:g} s: {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - begin_s


class Load:
    """Clients that ask for all bodies in turn, again and again, and keep what they got."""

    def __init__(self, url: str, bodies: list[Any], expected: list[Answer]) -> None:
        self._url = url
        self._next = cycle(zip(bodies, expected, strict=True))
        self._is_over = False
        self.all: list[Answer] = []
        self.wrong: list[str] = []  # not the expected ones, nor a beginning before an error
        self.failed: list[Answer] = []  # that ended with an error

    async def client(self) -> None:
        while not self._is_over:
            body, expected = next(self._next)
            answer = Answer()
            try:
                await ask(self._url, body, answer)
            except (aiohttp.ClientError, TimeoutError) as error:
                answer.error = {"message": f"connection: {error!r}"}
                answer.end_s = time.monotonic()
            self.all.append(answer)
            if answer.error:
                self.failed.append(answer)
                is_right = answer.token_ids == expected.token_ids[: len(answer.token_ids)]
                await asyncio.sleep(0.2)
            else:
                is_right = answer.is_complete and answer.same_as(expected)
            if not is_right:
                self.wrong.append(f"{answer.unlike(expected)}: {answer}")

    def end(self) -> None:
        """Ask for nothing more; what was asked for is still waited for."""
        self._is_over = True

    def has_served(self, name: str, since_s: float) -> bool:
        """Whether an instance has decoded something that was asked for after a time."""
        return any(a.decode == name and not a.error for a in self.all if a.begin_s >= since_s)

    async def until_served(self, name: str) -> None:
        begin_s = time.monotonic()
        await until(lambda: self.has_served(name, begin_s), f"{name} has decoded something")

    async def more(self, count: int) -> None:
        """Wait until that many more outputs have come."""
        wanted = len(self.all) + count
        await until(lambda: len(self.all) >= wanted, "clients are served", 600)


@asynccontextmanager
async def load(
    url: str, bodies: list[Any], expected: list[Answer], clients: int
) -> AsyncIterator[Load]:
    """Clients while the block runs; what they have asked for at its end is waited for."""
    made = Load(url, bodies, expected)
    tasks = [asyncio.create_task(made.client()) for _ in range(clients)]
    try:
        yield made
        assert not any(task.done() for task in tasks)
        made.end()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
