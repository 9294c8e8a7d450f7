"""Pairs of engines without models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Engine
from tests.engine.pair import CHUNK, Pair
from vllm_tetri.types import Role


@pytest.fixture(params=["shm", "tcp"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(tmp_path, link=request.param, arena_bytes=1 << 20, transfer_timeout_s=5.0)
    yield pair
    pair.close()


@pytest.fixture
def shm_pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, arena_bytes=1 << 20, transfer_timeout_s=1.0)
    yield pair
    pair.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Makes engines, closed at the end."""
    made: list[Engine] = []

    def engine(role: Role, **options: Any) -> Engine:
        made.append(Engine(tmp_path, role, **{"num_blocks": 256, "chunk_size": CHUNK} | options))
        return made[-1]

    yield engine
    for each in made:
        each.close()
