"""A lease that is an object of Kubernetes; its API server is one of the tests."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.certificates import AUTHORITY
from tests.router.kube import Cluster, kubernetes
from vllm_tetri import cli
from vllm_tetri.errors import ConfigError
from vllm_tetri.router.flips import lease_of
from vllm_tetri.router.kube_lease import DURATION_S, KubeLease

DOWN = (503, b'{"message": "etcd is\\ndown"}')


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    async with kubernetes(tmp_path, monkeypatch) as made:
        yield made


async def test_one_of_two_routers_holds_it_and_the_other_names_the_holder(cluster: Cluster) -> None:
    first = cluster.lease("one")
    assert first.hold() is None  # it does not wait for the server
    await cluster.go(1)
    second = cluster.lease("two")
    epoch, other = await cluster.go(2 * DURATION_S)
    assert epoch is not None
    assert other is None
    assert cluster.held[0][0] >= 1000 + DURATION_S  # another one could have had a lost lease
    holder = cluster.api.spec["holderIdentity"]
    assert second.why_not == f"another router flips roles: {holder} holds lease serving/tetri"
    assert cluster.api.spec["leaseDurationSeconds"] == DURATION_S
    before = cluster.api.lease
    assert await cluster.go(4 * DURATION_S) == [epoch, None]
    assert cluster.api.lease != before  # it was renewed


async def test_a_holder_without_a_server_ends_before_the_next_begins(cluster: Cluster) -> None:
    cluster.lease("one")
    await cluster.go(20)
    cluster.lease("two")
    (epoch, _) = await cluster.go(20)
    assert epoch is not None
    cluster.api.broken["one"] = DOWN
    cut = cluster.clock.now
    _, later = await cluster.go(2 * DURATION_S, until=1)
    assert later is not None
    assert later > epoch
    ended = max(now for now, who, _ in cluster.held if who == 0)
    assert cut < ended <= cut + 2 / 3 * DURATION_S
    assert cluster.clock.now >= ended + 1 / 3 * DURATION_S
    del cluster.api.broken["one"]
    assert await cluster.go(2 * DURATION_S) == [None, later]


async def test_a_router_that_ends_gives_it_back_at_once(cluster: Cluster) -> None:
    cluster.lease("one")
    (epoch,) = await cluster.go(40)
    cluster.lease("two")
    await cluster.go(6)
    await cluster.end("one")
    assert cluster.api.spec["holderIdentity"] == ""
    (later,) = await cluster.go(DURATION_S / 3 + 1)
    assert epoch is not None
    assert later == epoch + 2  # given back, taken


async def test_a_renewed_token_is_read_again_and_other_contents_stay(cluster: Cluster) -> None:
    cluster.lease("one")
    (epoch,) = await cluster.go(20)
    (cluster.account("one") / "token").write_text("newer")
    cluster.api.tokens = {"newer"}
    assert cluster.api.lease is not None
    cluster.api.lease["metadata"]["labels"] = {"app": "mine"}
    cluster.api.spec["strategy"] = "OldestEmulationVersion"
    cluster.api.touch()
    assert await cluster.go(20) == [epoch]
    assert cluster.api.requests[-1] == ("PUT", "newer", 200)
    assert cluster.api.lease["metadata"]["labels"] == {"app": "mine"}
    assert cluster.api.spec["strategy"] == "OldestEmulationVersion"


MADE = b'{"metadata": {"resourceVersion": "1", "creationTimestamp": "%b"}%b}'


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (503, b'{"message": "etcd is\\ndown"}', "etcd is down"),
        (403, b'{"message": "User x cannot get"}', "the Role of docs/operations.md"),
        (401, b"no", "token of the service account"),
        (404, b"no", "HTTP 404"),
        (200, b"", "did not return a Lease"),
        (200, b"\xff\xfe", "did not return a Lease"),
        (200, b"[" * 100_000, "did not return a Lease"),
        (200, b'{"metadata": {"resourceVersion": "1"}}', "did not return a Lease"),
        (200, MADE % (b"1960-01-01T00:00:00Z", b""), "impossible values"),
        (
            200,
            MADE % (b"2026-01-01T00:00:00Z", b', "spec": {"leaseTransitions": -1}'),
            "impossible",
        ),
    ],
    ids=range(10),
)
async def test_an_error_of_the_server_is_logged_once_and_ends_with_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, status: int, body: bytes, words: str
) -> None:
    caplog.set_level(logging.INFO)
    one = cluster.lease("one")
    (epoch,) = await cluster.go(20)
    assert epoch is not None
    cluster.api.broken["one"] = (status, body)
    assert await cluster.go(20) == [None]
    assert one.why_not.startswith("this router does not flip roles: lease serving/tetri: ")
    assert words in one.why_not
    (line,) = (each for each in caplog.messages if words in each)
    assert line.startswith("--flip-lease: lease serving/tetri: ")
    cluster.api.broken.clear()
    assert await cluster.go(20) == [epoch]
    assert "can be used again" in caplog.text


async def test_a_server_with_a_wrong_certificate_gets_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kubernetes(tmp_path, monkeypatch, host="127.0.0.2") as cluster:
        one = cluster.lease("one")
        assert await cluster.go(1) == [None]
        assert "ertificate" in one.why_not
        assert cluster.api.requests == []


async def test_a_server_that_hangs_does_not_hold_up_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_tetri.router.kube_lease.END_S", 0.1)
    cluster.api.gate.clear()
    cluster.lease("one").hold()
    await asyncio.sleep(0)
    await asyncio.wait_for(cluster.end("one"), 2.0)  # and not when the request ends


# -- the option ------------------------------------------------------------------


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a service account, with the environment of a pod."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (tmp_path / "token").write_text("secret-of-the-pod")
    (tmp_path / "ca.crt").write_bytes(AUTHORITY.read_bytes())
    (tmp_path / "namespace").write_text("serving\n")
    return tmp_path


def test_a_pod_finds_its_lease(pod: Path) -> None:
    assert str(KubeLease("tetri-flips", account=pod)) == "lease serving/tetri-flips"


@pytest.mark.parametrize("name", ["", "Upper", "-a", "a-", "a.b", "a/b", "a" * 64, "ü", "a\n"])
def test_an_invalid_name_is_refused(pod: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid name of a Lease"):
        KubeLease(name, account=pod)


@pytest.mark.parametrize("text", [None, ""])
@pytest.mark.parametrize("lost", ["token", "ca.crt", "namespace"])
def test_a_pod_without_a_service_account_is_refused(pod: Path, lost: str, text: str | None) -> None:
    (pod / lost).unlink()
    if text is not None:
        (pod / lost).write_text(text)
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        KubeLease("tetri", account=pod)


def test_a_router_outside_of_a_cluster_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    words = ["--port", "0", "--control", "tcp://127.0.0.1:0", "--flip-lease", "kubernetes:tetri"]
    assert cli.main(["router", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not a pod with a service account" in line
    assert "--flip-lease FILE" in line


def test_without_the_extra_the_option_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_tetri.router.kube_lease", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[kubernetes\]'"):
        lease_of("kubernetes:tetri")
