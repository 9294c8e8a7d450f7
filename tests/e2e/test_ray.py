"""Instances on the nodes of a Ray cluster; of its nodes each is a real raylet on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import ask, ask_all, assert_same, load, stock_answers, until
from tests.e2e.cluster import running
from tests.e2e.prompts import completion
from tests.e2e.rayed import CPUS, FIRST, SECOND, OnRay, RayCluster, ray_cluster, with_words
from tests.eventually import eventually
from tests.launch.fakes import FakeUp, is_alive
from tests.needed import lacking

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

STREAM = {"stream": True}
BODIES: list[dict[str, Any]] = [
    *[completion(40 + 90 * index, max_tokens=200, **STREAM) for index in range(3)],
    *[completion(50 + 130 * index, max_tokens=60, **STREAM) for index in range(3)],
]
CLIENTS = 4
ROLES = ("--prefill=1", "--decode=1", "--both=1")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    if find_spec("ray") is None:
        lacking("Ray", "run .ci/install suites")
    folder = tmp_path_factory.mktemp("fakes")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("FAKE_DIR", str(folder))  # of the processes on the nodes
        with ray_cluster() as made:
            yield made


@pytest.fixture
def fake(nodes: RayCluster) -> Iterator[FakeUp]:
    """An `up` with fake instances, which start in a moment."""
    folder = Path(os.environ["FAKE_DIR"])
    for path in folder.iterdir():
        path.unlink()
    up = FakeUp(folder)
    yield up
    if up.process is not None and up.process.poll() is None:
        up.end(signal.SIGINT)


def nothing_left(nodes: RayCluster, cpus: int = 2 * CPUS) -> None:
    eventually(lambda: nodes.left() == {"groups": [], "free": cpus}, 30, "Ray has everything back")


def test_without_room_there_is_one_error_and_nothing_left(nodes: RayCluster, fake: FakeUp) -> None:
    fake.start(f"--on={nodes.address}", "--cpus-each=2", "--prefill=2", "--start-timeout=5")
    status, output = fake.end()
    assert status == 1
    assert "no node of Ray had room for it within 5 s: it needs 2 CPU on one node" in output
    assert "has 3 CPU" in output
    assert "Traceback" not in output
    fake.nothing_left()
    nothing_left(nodes)


def test_a_wrong_address_is_one_error(fake: FakeUp) -> None:
    fake.start("--on=127.0.0.1:9")
    status, output = fake.end()
    assert status == 2
    assert "--on 127.0.0.1:9: " in output
    assert "`ray status`" in output
    assert not fake.pids()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_up_is_the_end_of_all(nodes: RayCluster, fake: FakeUp, number: int) -> None:
    content = fake.ready(f"--on={nodes.address}", *ROLES)
    assert {row["id"] for row in content["instances"]} == {"prefill-0", "decode-0", "both-0"}
    assert {nodes.of(row["pid"]) for row in content["instances"]} == {FIRST, SECOND}
    for name in ("prefill-0", "decode-0"):
        (start,) = fake.starts(name)
        assert start["secret_file"].startswith("/proc/")
        assert start["secret_file"] != content["secret_file"]  # a node has its own copy
    assert nodes.left()["free"] == 2 * CPUS - 3
    status, _ = fake.end(number)
    assert status == (-number if number == signal.SIGKILL else 0)
    eventually(lambda: not any(map(is_alive, fake.pids())), 30, "every process is gone")
    nothing_left(nodes)


def test_a_dead_instance_is_started_again(nodes: RayCluster, fake: FakeUp) -> None:
    fake.ready(f"--on={nodes.address}")
    os.kill(fake.starts("decode-0")[0]["pid"], signal.SIGKILL)
    eventually(lambda: len(fake.starts("decode-0")) == 2, 30, "it was started again")
    output = fake.interrupt()
    assert "decode-0: ended (signal 9" in output
    nothing_left(nodes)


async def test_a_node_dies_under_load(nodes: RayCluster, tiny_llama: Path, tmp_path: Path) -> None:
    """Streams go on elsewhere, and so do the instances of the node."""
    expected = await asyncio.to_thread(stock_answers, tiny_llama, tmp_path, BODIES)
    with running(OnRay(tiny_llama, tmp_path, nodes, *ROLES)) as cluster:
        assert_same(await ask_all(cluster.url, BODIES), expected)
        before = cluster.hosts()
        assert set(before.values()) == {FIRST, SECOND}
        lost = before["decode-0"]
        (survivor,) = {FIRST, SECOND} - {lost}
        async with load(cluster.url, BODIES, expected, CLIENTS) as clients:
            await clients.more(2 * CLIENTS)
            await asyncio.to_thread(nodes.kill, lost)
            there = dict.fromkeys(before, survivor)
            await until(lambda: cluster.hosts() == there, "all are on the other node", 120)
            await clients.more(2 * CLIENTS)
        assert not clients.wrong
        assert not [each.error for each in clients.failed]
        assert cluster.resumed() > 0
        again = await ask(cluster.url, BODIES[0])
        assert again.same_as(expected[0])
        print(f"\n{len(clients.all)} requests, {cluster.resumed():g} streams resumed")
        control = cluster.facts["control"]
        assert len(with_words("--tetri-control", control)) >= len(before)
    assert not with_words(control)
    nothing_left(nodes, CPUS)
