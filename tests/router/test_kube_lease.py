"""A lease that is an object of Kubernetes; its API server is one of the tests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.router.fakes import eventually
from tests.router.kube import CERTIFICATE, Cluster, kubernetes
from vllm_tetri import cli
from vllm_tetri.errors import ConfigError
from vllm_tetri.router.kube_api import ApiError, LeaseApi, place_of
from vllm_tetri.router.kube_lease import DURATION_S, KubeLease
from vllm_tetri.router.lease import FileLease, Lease
from vllm_tetri.router.lease_option import lease_of

INSIDE = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
SICK = (503, b'{"message": "etcd is\\nill"}')


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with kubernetes(tmp_path) as made:
        yield made


async def test_one_of_two_holds_it_and_the_other_one_says_who(cluster: Cluster) -> None:
    first = cluster.lease("one")
    assert first.hold() is None  # it does not wait for the server
    await cluster.go(1)
    second = cluster.lease("two")
    epoch, other = await cluster.go(2 * DURATION_S)
    assert epoch is not None
    assert other is None
    assert cluster.held[0][0] >= 1000 + DURATION_S  # another one could have had a lost lease
    assert second.why_not == (
        f"another router watches: {cluster.api.spec['holderIdentity']} holds lease serving/tetri"
    )
    assert cluster.api.spec["leaseDurationSeconds"] == DURATION_S
    before = cluster.api.lease
    assert await cluster.go(4 * DURATION_S) == [epoch, None]
    assert cluster.api.lease != before  # it was renewed


async def test_one_that_cannot_reach_the_server_ends_before_the_next_begins(
    cluster: Cluster,
) -> None:
    cluster.lease("one")
    await cluster.go(20)
    cluster.lease("two")
    (epoch, _) = await cluster.go(20)
    assert epoch is not None
    cluster.api.broken["one"] = SICK
    cut = cluster.clock.now
    _, later = await cluster.go(2 * DURATION_S, until=1)
    assert later is not None
    assert later > epoch
    ended = max(now for now, who, _ in cluster.held if who == 0)
    assert cut < ended <= cut + 2 / 3 * DURATION_S
    assert cluster.clock.now >= ended + 1 / 3 * DURATION_S
    del cluster.api.broken["one"]
    assert await cluster.go(2 * DURATION_S) == [None, later]


async def test_without_a_server_nobody_decides_and_its_return_is_enough(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = cluster.lease("one")
    (epoch,) = await cluster.go(20)
    assert epoch is not None
    cluster.api.broken["one"] = SICK
    assert await cluster.go(2 * DURATION_S) == [None]
    assert "etcd is ill" in one.why_not
    (line,) = (each for each in caplog.messages if "etcd" in each)  # said once
    assert line.startswith("--flip-lease: lease serving/tetri: cannot")
    cluster.api.broken.clear()
    assert await cluster.go(2) == [epoch]
    assert "all is well again" in caplog.text


async def test_a_holder_without_answers_ends_by_its_own_clock(cluster: Cluster) -> None:
    one = cluster.lease("one")
    (epoch,) = await cluster.go(20)
    assert epoch is not None
    cluster.api.gate.clear()
    cluster.clock.move(2 / 3 * DURATION_S)
    assert one.hold() is None


async def test_one_that_ends_gives_it_back_at_once(cluster: Cluster) -> None:
    first = cluster.lease("one")
    (epoch,) = await cluster.go(40)
    cluster.lease("two")
    await cluster.go(6)
    first.close()
    first.close()
    assert first.hold() is None
    await first.wait_closed()
    cluster.leases.remove(first)
    assert cluster.api.spec["holderIdentity"] == ""
    (later,) = await cluster.go(DURATION_S / 3 + 1)
    assert epoch is not None
    assert later == epoch + 2  # given back, taken


async def test_one_that_has_not_had_it_for_long_lets_it_run_out(cluster: Cluster) -> None:
    """Or it would change hands faster than its epochs may grow."""
    first = cluster.lease("one")
    await cluster.go(5)
    first.close()
    await first.wait_closed()
    assert cluster.api.spec["holderIdentity"] != ""
    assert [method for method, *_ in cluster.api.requests].count("PUT") <= 1


async def test_of_two_who_take_it_at_a_time_one_is_refused(cluster: Cluster) -> None:
    last = cluster.lease("last")
    await cluster.go(40)
    last.close()
    await last.wait_closed()
    cluster.leases.clear()
    cluster.lease("one")
    cluster.lease("two")
    held = await cluster.go(1)
    assert sum(each is not None for each in held) == 1
    assert [status for method, _, status in cluster.api.requests if method == "PUT"][-2:].count(
        409
    ) == 1
    assert await cluster.go(2 * DURATION_S) == held


async def test_a_lease_that_is_removed_is_made_again_under_a_higher_epoch(
    cluster: Cluster,
) -> None:
    cluster.lease("one")
    cluster.lease("two")
    before = max(each or 0 for each in await cluster.go(20))
    assert before
    cluster.api.lease = None
    gone = cluster.clock.now
    held = await cluster.go(2 * DURATION_S)
    assert max(each or 0 for each in held) > before
    assert all(epoch > before for now, _, epoch in cluster.held if now > gone + DURATION_S)


async def test_a_watcher_that_rests_lets_another_one_have_it(cluster: Cluster) -> None:
    first = cluster.lease("one")
    assert await cluster.go(40) != [None]
    cluster.leases.clear()
    cluster.lease("two")
    (later,) = await cluster.go(2 * DURATION_S)
    assert later is not None
    cluster.leases.insert(0, first)
    assert await cluster.go(20) == [None, later]


async def test_who_may_read_and_not_write_is_told_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.lease("one")
    cluster.api.forbidden = {"POST", "PUT"}
    assert await cluster.go(30) == [None]
    (said,) = caplog.messages
    assert "cannot create it" in said
    assert "verbs get, create and update" in said


async def test_who_may_not_is_told_once_what_is_missing(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    one = cluster.lease("one")
    cluster.api.broken["one"] = (403, b'{"message": "leases is forbidden: User x cannot get"}')
    assert await cluster.go(30) == [None]
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    for words in ("get, create and update on leases", "serving/tetri", "User x cannot get"):
        assert words in said.getMessage()
        assert words in one.why_not


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 100_000,
        b'"' + b"x" * 300_000 + b'"',
        b'{"metadata": {"resourceVersion": "1"}}',
        b'{"metadata": {"resourceVersion": "", "creationTimestamp": "2026-01-01T00:00:00Z"}}',
        b'{"metadata": {"resourceVersion": "1", "creationTimestamp": "1960-01-01T00:00:00Z"}}',
        b'{"metadata": {"resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}}'[:-1]
        + b', "spec": {"leaseTransitions": -1}}',
    ],
    ids=range(10),
)
async def test_what_is_no_lease_is_not_believed(cluster: Cluster, body: bytes) -> None:
    one = cluster.lease("one")
    (epoch,) = await cluster.go(20)
    cluster.api.broken["one"] = (200, body)
    assert await cluster.go(11) == [None]
    assert "nobody watches here" in one.why_not
    cluster.api.broken.clear()
    assert await cluster.go(3) == [epoch]


@pytest.mark.parametrize("status", [301, 401, 404, 409, 422, 429, 500])
async def test_no_status_ends_it(cluster: Cluster, status: int) -> None:
    one = cluster.lease("one")
    cluster.api.broken["one"] = (status, b"no")
    assert await cluster.go(5) == [None]
    assert one.why_not.startswith("nobody watches here")
    cluster.api.broken.clear()
    assert await cluster.go(20) != [None]


async def test_a_token_that_was_renewed_is_read_again(cluster: Cluster) -> None:
    cluster.lease("one")
    (epoch,) = await cluster.go(20)
    cluster.api.tokens = {"newer"}
    (cluster.account("one") / "token").write_text("newer")
    cluster.api.tokens.discard("one")
    assert await cluster.go(20) == [epoch]
    assert cluster.api.requests[-1] == ("PUT", "newer", 200)


async def test_what_others_wrote_into_the_object_stays(cluster: Cluster) -> None:
    cluster.lease("one")
    (epoch,) = await cluster.go(20)
    assert cluster.api.lease is not None
    cluster.api.lease["metadata"]["labels"] = {"app": "mine"}
    cluster.api.lease["spec"]["strategy"] = "theirs"
    cluster.api.touch()
    assert await cluster.go(20) == [epoch]
    assert cluster.api.lease["metadata"]["labels"] == {"app": "mine"}
    assert cluster.api.spec["strategy"] == "theirs"


async def test_a_server_with_the_certificate_of_another_is_not_spoken_to(tmp_path: Path) -> None:
    async with kubernetes(tmp_path, host="127.0.0.2") as cluster:
        with pytest.raises(ApiError, match="ertificate"):
            await LeaseApi(cluster.place(), timeout_s=5.0).read()
        assert cluster.api.requests == []


async def test_a_server_that_hangs_is_left(cluster: Cluster) -> None:
    cluster.api.gate.clear()
    with pytest.raises(ApiError, match=r"no answer in 0\.2 s"):
        await LeaseApi(cluster.place(), timeout_s=0.2).read()


async def test_a_server_that_hangs_does_not_hold_up_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_tetri.router.kube_lease._END_S", 0.1)
    cluster.api.gate.clear()
    one = KubeLease(cluster.place(), duration_s=600.0)
    one.hold()
    await asyncio.sleep(0)
    one.close()
    await asyncio.wait_for(one.wait_closed(), 10.0)  # and not 100 s, when the request ends


async def test_it_runs_by_the_clock_of_the_machine(cluster: Cluster) -> None:
    one: Lease = KubeLease(cluster.place())
    assert one.hold() is None
    await eventually(lambda: cluster.api.lease)
    one.close()
    await asyncio.wait_for(one.wait_closed(), 5.0)
    never_asked = KubeLease(cluster.place())
    never_asked.close()
    await never_asked.wait_closed()


# -- the option ------------------------------------------------------------------


def account(folder: Path) -> Path:
    (folder / "token").write_text("secret-of-the-pod")
    (folder / "ca.crt").write_bytes(CERTIFICATE.read_bytes())
    (folder / "namespace").write_text("serving\n")
    return folder


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_a_pod_knows_its_server(tmp_path: Path, host: str, server: str) -> None:
    environ = INSIDE | {"KUBERNETES_SERVICE_HOST": host}
    place = place_of("tetri-flips", environ=environ, account=account(tmp_path))
    assert (place.server, place.namespace, place.name) == (server, "serving", "tetri-flips")


@pytest.mark.parametrize("name", ["", "Upper", "-a", "a-", "a.b", "a/b", "a" * 64, "ü", "a\n"])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a Lease"):
        place_of(name, environ=INSIDE, account=account(tmp_path))


@pytest.mark.parametrize("lost", ["token", "ca.crt", "namespace"])
def test_a_pod_without_a_service_account_is_told(tmp_path: Path, lost: str) -> None:
    (account(tmp_path) / lost).unlink()
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        place_of("tetri", environ=INSIDE, account=tmp_path)
    (tmp_path / lost).write_text("")
    if lost != "token":
        with pytest.raises(ConfigError, match="--flip-lease kubernetes:tetri"):
            place_of("tetri", environ=INSIDE, account=tmp_path)


def test_a_router_outside_of_a_cluster_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    words = ["--port", "0", "--control", "tcp://127.0.0.1:0", "--flip-lease", "kubernetes:tetri"]
    assert cli.main(["router", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no pod of a Kubernetes cluster" in line
    assert "--flip-lease FILE" in line


def test_anything_else_is_a_file(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert lease_of(None) is None
    made = lease_of(str(tmp_path / "lease"))
    assert isinstance(made, FileLease)
    made.close()
