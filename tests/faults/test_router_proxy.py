"""Connections between the router and an instance fail: the client gets an answer or one
clear error, and nothing stays in the table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.faults.proxy import Kind, Proxy, Trouble
from tests.router.fakes import Cluster, FakeInstance, cluster
from vllm_tetri.types import Role

FIRST_BYTE_S = 0.5
DEADLINE_S = 5.0
HEAD_BYTES = 10  # within the status line and headers of an answer


class Proxied(FakeInstance):
    """An instance that is only reached through a proxy."""

    proxy: Proxy

    def join(self, *controls: str) -> None:
        self.proxy = Proxy.to(self.url)
        self.proxy.__enter__()
        self.url = self.proxy.url
        super().join(*controls)

    async def close(self) -> None:
        await super().close()
        self.proxy.__exit__(None, None, None)


@asynccontextmanager
async def broken(role: Role, trouble: Trouble) -> AsyncIterator[tuple[Cluster, Proxied]]:
    """A pair of instances, one of them with a proxy in trouble, and one that could help."""
    bad = Proxied("bad", role, decode="bad" if role is Role.DECODE else "good")
    good = FakeInstance("good", Role.DECODE)
    first = FakeInstance("first", Role.PREFILL, decode="bad")
    others = [good, first] if role is Role.DECODE else [good]
    async with cluster(bad, *others, first_byte_s=FIRST_BYTE_S) as made:
        bad.proxy.make(trouble)
        yield made, bad


def is_clear(status: int, answer: Any) -> bool:
    """Whether a client knows what it got: an answer, or an error in words."""
    if isinstance(answer, bytes):
        events = [line for line in answer.decode().split("\n\n") if line]
        last = events[-1].removeprefix("data: ") if events else ""
        return last == "[DONE]" or bool(json.loads(last)["error"]["message"])
    return status == 200 or bool(answer["error"]["message"])


TROUBLES = {
    "cut at once": Trouble(Kind.CUT, 0),
    "cut in the head": Trouble(Kind.CUT, HEAD_BYTES, up=False),
    "ended in the head": Trouble(Kind.END, HEAD_BYTES, up=False),
    "ended in the body": Trouble(Kind.END, 200, up=False),
    "cut in the body": Trouble(Kind.CUT, 200, up=False),
    "corrupt": Trouble(Kind.CORRUPT, 0, up=False),
    "half open": Trouble(Kind.HALF_OPEN, 0),
    "stalled": Trouble(Kind.STALL, 0, up=False),
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("name", TROUBLES)
async def test_a_client_gets_an_answer_or_a_clear_error(
    name: str, role: Role, is_streamed: bool
) -> None:
    async with broken(role, TROUBLES[name]) as (made, bad):
        async with asyncio.timeout(DEADLINE_S):
            status, answer, _ = await made.ask(stream=is_streamed)
        assert is_clear(status, answer), answer
        assert await made.table() == []

        bad.proxy.clear()
        async with asyncio.timeout(DEADLINE_S):
            status, answer, _ = await made.ask(stream=is_streamed)
        assert (status, is_clear(status, answer)) == (200, True)


async def test_a_slow_connection_is_no_trouble() -> None:
    async with broken(Role.DECODE, Trouble(Kind.DELAY, up=False, delay_s=0.05)) as (made, _):
        status, answer, headers = await made.ask(stream=True)
        assert (status, headers["x-tetri-decode"]) == (200, "bad")
        assert answer.endswith(b"data: [DONE]\n\n")
