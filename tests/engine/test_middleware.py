"""SIGTERM at an instance's API server."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvicorn

from vllm_tetri.engine.middleware import drain_on_sigterm
from vllm_tetri.handover import RANK_DRAINED

ENGINE = "trap 'exit 9' USR1; echo begun; while :; do sleep 0.02; done"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Stands in for vLLM's engine process: it ends with status 9 when it is told to drain."""
    with subprocess.Popen(["/bin/sh", "-c", ENGINE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        child = SimpleNamespace(name="EngineCore", pid=process.pid)
        monkeypatch.setattr(multiprocessing, "active_children", lambda: [child])
        yield process
        process.kill()


def handle_sigterm(drain_s: float) -> tuple[uvicorn.Server, asyncio.Event]:
    """vLLM's server, and the event that its handler of SIGINT sets."""
    server, ended = uvicorn.Server(uvicorn.Config(app="")), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, ended.set)
    drain_on_sigterm(server, drain_s)
    return server, ended


async def test_sigterm_drains_the_engine_and_a_second_one_ends_it_at_once(
    engine: subprocess.Popen[bytes],
) -> None:
    server, ended = handle_sigterm(60.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.to_thread(engine.wait, 5) == 9
    assert not ended.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(ended.wait(), 5)
    assert server.force_exit


async def test_an_engine_that_does_not_drain_is_ended_at_the_deadline(
    engine: subprocess.Popen[bytes],
) -> None:
    server, ended = handle_sigterm(-0.9)  # and a second of grace
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(ended.wait(), 5)
    assert server.force_exit


async def test_a_server_ends_when_its_last_rank_has_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [SimpleNamespace(name=f"EngineCore_DP{number}", pid=number) for number in (1, 2, 3)]
    monkeypatch.setattr(multiprocessing, "active_children", lambda: ranks)
    server, ended = handle_sigterm(60.0)
    for _ in range(2):  # at the same moment: none is lost
        os.kill(os.getpid(), RANK_DRAINED)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ended.wait(), 0.3)
    os.kill(os.getpid(), RANK_DRAINED)
    await asyncio.wait_for(ended.wait(), 5)
    assert not server.force_exit  # clients that still read a response may finish


async def test_without_an_engine_it_ends_at_once() -> None:
    _, ended = handle_sigterm(60.0)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(ended.wait(), 5)
