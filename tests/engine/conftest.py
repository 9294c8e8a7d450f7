"""Pairs of engines without models, and the cells in which tests that step an engine run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.engine.harness import Cell, Engine
from tests.engine.pair import CHUNK, Pair
from tests.transport.fake_nccl import FakeNccl
from vllm_tetri.engine import worker
from vllm_tetri.types import Role

# What vLLM's CPU build runs, and what it runs on GPUs unless told otherwise.
USUAL, GPU = Cell(), Cell("v2", "async")

# Test modules half of whose cases `make test` runs in a GPU's cell, the others in the usual one.
BOTH = {
    "test_continuation",
    "test_decode_admission",
    "test_difference",
    "test_fetch",
    "test_flip",
    "test_handover",
    "test_moves",
    "test_order",
    "test_pool",
    "test_robustness",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that step an engine in every cell."""
    if {"Engine", "Pair"} & vars(metafunc.module).keys():
        cells = [Cell(runner, how) for runner in ("v1", "v2") for how in ("sync", "async")]
        metafunc.parametrize("cell", cells, ids=str, indirect=True, scope="module")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` (no mark), `make test-all` (slow) and `make test-long` (long) run.

    `make test-all` runs every case in the two cells that vLLM takes by default, and one case in six
    of every test in the two others.
    """
    tests: dict[tuple[str, Cell], list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)  # none without parameters
        cell = callspec.params.get("cell") if callspec else None
        if isinstance(cell, Cell):
            tests.setdefault((item.nodeid.partition("[")[0], cell), []).append(item)
    for (test, cell), cases in tests.items():
        # Another case from test to test, the same ones whatever else is collected.
        for number, case in enumerate(cases, crc32(test.encode())):
            if mark := mark_of(cell, number, len(cases), case.path.stem in BOTH):
                case.add_marker(mark)


def mark_of(cell: Cell, number: int, count: int, in_both: bool) -> str:
    """Return the mark of the case `number`, of `count` in a row, in a cell."""
    if cell not in (USUAL, GPU):
        return "slow" if number % min(count, 6) == 0 else "long"
    is_quick = (count == 1 or number % 2 == (cell == GPU)) if in_both else cell == USUAL
    return "" if is_quick else "slow"


@pytest.fixture(scope="module", autouse=True)
def cell(request: pytest.FixtureRequest) -> Iterator[Cell]:
    """What the engines of a test are like."""
    found = getattr(request, "param", Engine.cell)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Engine, "cell", found)
        yield found


@pytest.fixture
def continues(cell: Cell) -> None:
    """Only where requests continue from prior output."""
    if cell == Cell("v1", "async"):
        pytest.skip("the V1 runner with asynchronous scheduling samples the first token again")


def make_pair(folder: Path, link: str) -> Iterator[Pair]:
    """Engines whose KV is in host memory, or (dma, ipc, nccl, staged) in a fake device's."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Engine, "on_device", link in ("dma", "ipc", "nccl", "staged"))
        monkeypatch.setattr(worker, "load_nccl", FakeNccl)
        kind = link.replace("staged", "tcp")
        pair = Pair(folder, link=kind, arena_bytes=1 << 20, transfer_timeout_s=5.0)
        yield pair
        pair.close()
        assert not [each for each in threading.enumerate() if each.name == "tetri-nccl"]


@pytest.fixture(params=["shm", "tcp"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from make_pair(tmp_path, request.param)


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
