"""What an instance tells: leaks at rest, unfinished work, and the times of requests."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Engine
from tests.engine.pair import Pair, prompt
from tests.eventually import eventually
from vllm_tetri.engine.load import release_port
from vllm_tetri.messages import Served
from vllm_tetri.types import Role


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path, Role.BOTH, arena_bytes=1 << 20)
    engine.endpoint.agent.close()  # its thread would read the load, too
    yield engine
    engine.close()


def reported(engine: Engine) -> tuple[str, ...]:
    found: tuple[str, ...] = engine.endpoint.read_load().leftovers
    return found


def test_requests_that_come_and_go_leave_nothing(engine: Engine) -> None:
    for name in ("a", "b"):
        engine.add(name, prompt(50))
        engine.run_until(lambda name=name: name in engine.finished)
    engine.run_until(lambda: engine.is_at_rest)
    assert engine.endpoint.leaks() == {}


def test_blocks_that_leak_are_reported_and_changes_logged(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm_tetri"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("vllm_tetri"), "propagate", False)
    caplog.set_level(logging.INFO, "vllm_tetri")
    pool = engine.scheduler.kv_cache_manager.block_pool
    leaked = pool.get_new_blocks(2)
    assert reported(engine) == ()  # it may be on its way
    eventually(lambda: reported(engine) == ("2 KV blocks",))
    for _ in range(5):
        assert reported(engine) == ("2 KV blocks",)
    engine.add("a", prompt(50))
    assert reported(engine) == ("2 KV blocks",)  # as far as is known
    engine.run_until(lambda: "a" in engine.finished)
    pool.free_blocks(leaked)
    eventually(lambda: reported(engine) == ())
    lines = [line for line in caplog.messages if line.startswith("leak:")]
    assert len(lines) == 2
    assert "2 KV blocks" in lines[0]
    assert "released" in lines[1]


def test_received_kv_without_a_request_is_a_leak_only_after_a_second(shm_pair: Pair) -> None:
    shm_pair.decode.endpoint.agent.close()
    shm_pair.sent("a", prompt(50))
    shm_pair.decode.step()
    assert shm_pair.decode.endpoint.leaks() == {"received KV transfers without a request": 1}
    assert reported(shm_pair.decode) == ()
    eventually(lambda: len(reported(shm_pair.decode)) == 1)


def test_unfinished_work_is_named_by_role(shm_pair: Pair) -> None:
    prefill, decode = shm_pair.prefill.endpoint, shm_pair.decode.endpoint
    assert prefill.unfinished(Role.BOTH) == decode.unfinished(Role.BOTH) == ""
    shm_pair.send("a", prompt(50))
    assert prefill.unfinished(Role.BOTH) == "1 unfinished requests, 1 hand-overs to other instances"
    shm_pair.prefilled("a")
    shm_pair.prefill.run_until(lambda: shm_pair.prefill.is_at_rest)
    assert prefill.unfinished(Role.BOTH) == ""
    assert decode.unfinished(Role.BOTH) == "1 transfers in the arena"


def test_an_engine_lets_go_of_the_port_of_its_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        release_port(f"http://127.0.0.1:{address[1] + 1}")
        socket.create_connection(address).close()
        release_port(f"http://127.0.0.1:{address[1]}")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        os.fstat(server.fileno())  # not another file's, which the object would close


def test_no_other_file_is_kept_open_by_that() -> None:
    """vLLM's workers end when the pipe to them is closed."""
    here, there = os.pipe()
    release_port("http://127.0.0.1:1")
    os.close(there)
    os.set_blocking(here, False)
    assert os.read(here, 1) == b""
    os.close(here)


def test_a_request_that_ends_is_told_with_its_times(engine: Engine) -> None:
    told: list[Any] = []
    engine.endpoint.agent.publish = lambda message, **_: told.append(message)
    began_s = time.monotonic()
    for name in ("a", "b"):  # the same prompt again is in the prefix cache
        engine.add(name, list(range(300)), max_tokens=5)
        engine.run_until(lambda name=name: name in engine.finished)
    engine.add("c", list(range(300)), max_tokens=5)
    engine.abort("c")  # before any step has it
    took_s = time.monotonic() - began_s
    first, again, cancelled = (each for each in told if isinstance(each, Served))
    assert (first.request, again.request, cancelled.request) == ("a", "b", "c")
    assert first.output_tokens == 5
    assert first.cached_tokens == 0 < again.cached_tokens < 300
    assert min(first.compute_s, first.output_s, again.compute_s, cancelled.queue_s) > 0
    assert cancelled.compute_s == cancelled.output_s == 0
    parts = (each.queue_s + each.compute_s + each.output_s for each in (first, again, cancelled))
    assert sum(parts) <= took_s
