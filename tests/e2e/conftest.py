"""One stock instance and one cluster, started once, side by side."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import ask_all
from tests.e2e.cluster import Cluster, Stock, post, running, side_by_side
from tests.e2e.prompts import completion
from vllm_tetri.types import Mode

FORKED = Path(__file__).parents[1] / "forked"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run last what leaves the shared cluster changed."""
    items.sort(key=lambda item: item.path.stem == "test_capabilities")


@pytest.fixture(scope="session", autouse=True)
def _forked() -> Iterator[None]:
    """Servers fork their engine processes; those of `test_smollm2` spawn them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", str(FORKED), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def _started(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stock, Cluster]]:
    folder = tmp_path_factory.mktemp("e2e")
    # Whole prompts: on CPUs vLLM's engine ends when it cuts one with a seed (patches/0001).
    serve = ("--scheduling-policy", "priority", "--max-num-batched-tokens", "8192")
    stock = Stock(tiny_llama, folder, serve=serve)
    roles = ("--prefill", "1", "--decode", "1", "--routers", "2")
    with side_by_side(stock, Cluster(tiny_llama, folder, roles=roles)) as both:
        # A GPU's first step compiles kernels, for seconds in which nothing can be aborted.
        for each in both:
            asyncio.run(ask_all(each.url, [completion(100), completion(60, temperature=0.8)]))
        yield both
        both[1].audit()


@pytest.fixture(scope="session")
def stock(_started: tuple[Stock, Cluster]) -> Stock:
    return _started[0]


@pytest.fixture(autouse=True)
def _stock_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Should the instance for all tests end, the test says so in which it did, and all later."""
    stock = request.getfixturevalue("stock") if "stock" in request.fixturenames else None
    if stock is not None:
        stock.must_run("stock vLLM")
    yield
    if stock is not None:
        stock.must_run("stock vLLM")


@pytest.fixture
def cluster(_started: tuple[Stock, Cluster]) -> Iterator[Cluster]:
    """The shared cluster; every test leaves it at rest."""
    yield _started[1]
    _started[1].rest()


@pytest.fixture(scope="module")
def _four(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, roles = tmp_path_factory.mktemp("many"), ("--prefill", "2", "--decode", "2")
    with running(Cluster(tiny_llama, folder, roles=roles)) as cluster:
        yield cluster
        cluster.audit()


@pytest.fixture
def many(_four: Cluster) -> Iterator[Cluster]:
    """Every test leaves it at rest."""
    yield _four
    _four.rest()


@pytest.fixture(scope="module")
def own_started(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster of the test's module alone, with the options `OWN` that this module has; audited at
    the end if it has `IS_AUDITED`."""
    folder = tmp_path_factory.mktemp("own")
    with running(Cluster(tiny_llama, folder, **request.module.OWN)) as cluster:
        yield cluster
        if getattr(request.module, "IS_AUDITED", False):
            cluster.audit()


@pytest.fixture
def own(request: pytest.FixtureRequest, own_started: Cluster) -> Iterator[Cluster]:
    """Every test leaves it at rest, within `REST_S` if this module has that."""
    yield own_started
    own_started.rest(getattr(request.module, "REST_S", 1.5))


@pytest.fixture
def free(cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster, whose mode a test may change."""
    yield cluster
    post(f"{cluster.url}/tetri/v1/mode", {"mode": Mode.SPLIT})
