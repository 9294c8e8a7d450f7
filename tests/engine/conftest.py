"""Pairs of engines without models, and the cells in which tests that step an engine run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Cell, Engine
from tests.engine.pair import CHUNK, Pair
from tests.transport.fake_nccl import FakeNccl
from vllm_tetri.engine import worker
from vllm_tetri.types import Role

# Test modules in which `make test` also runs a GPU's defaults. The rest of the matrix is slow.
BOTH = {
    "test_continuation",
    "test_decode_admission",
    "test_difference",
    "test_flip",
    "test_handover",
    "test_order",
    "test_pool",
    "test_robustness",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that step an engine in every cell."""
    if not {"Engine", "Pair"} & vars(metafunc.module).keys():
        return
    in_both = metafunc.module.__name__.rpartition(".")[2] in BOTH
    quick = {Cell(), Cell("v2", "async")} if in_both else {Cell()}
    cells = [Cell(runner, how) for runner in ("v1", "v2") for how in ("sync", "async")]
    params = [pytest.param(each, marks=() if each in quick else pytest.mark.slow) for each in cells]
    metafunc.parametrize("cell", params, ids=str, indirect=True, scope="module")


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
