"""An instance says what it has left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import Engine
from tests.engine.test_handover import prompt
from tests.eventually import eventually
from vllm_tetri.engine import instance as instances
from vllm_tetri.types import Role


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path, Role.BOTH, arena_bytes=1 << 20)
    engine.instance._agent.close()  # whose thread would look, too
    yield engine
    engine.close()


def reported(engine: Engine) -> tuple[str, ...]:
    found: tuple[str, ...] = engine.instance._read_load().leftovers
    return found


def test_requests_that_come_and_go_leave_nothing(engine: Engine) -> None:
    for name in ("a", "b"):
        engine.add(name, prompt(50))
        engine.run_until(lambda name=name: name in engine.finished)
    engine.run_until(lambda: engine.is_at_rest)
    assert engine.leftovers() == ()


def test_blocks_that_leak_are_reported_and_logged_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for level in ("warning", "info"):
        monkeypatch.setattr(instances.logger, level, lambda text, *words: said.append(text % words))
    pool = engine.scheduler.kv_cache_manager.block_pool
    leaked = pool.get_new_blocks(2)
    eventually(lambda: reported(engine) == ("2 blocks",))
    for _ in range(5):
        assert reported(engine) == ("2 blocks",)
    engine.add("a", prompt(50))
    assert reported(engine) == ("2 blocks",)  # as far as is known
    engine.run_until(lambda: "a" in engine.finished)
    pool.free_blocks(leaked)
    eventually(lambda: reported(engine) == ())
    assert said == ["left although no request is here: 2 blocks", "nothing is left any more"]
