"""An API server of Kubernetes that knows one Lease, and a clock that tests move."""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.router.fakes import eventually
from vllm_tetri.router.kube_api import Place
from vllm_tetri.router.kube_lease import KubeLease

CERTIFICATE = Path(__file__).parent.parent / "certificate.pem"  # for 127.0.0.1, by itself
CERTIFICATE_KEY = CERTIFICATE.with_name("certificate-key.pem")
NAME = "tetri"
_FOLDER = "/apis/coordination.k8s.io/v1/namespaces/serving/leases"
_START_S = 1_700_000_000


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: dict[str, tuple[float, asyncio.Future[None]]] = {}

    def __call__(self) -> float:
        return self.now

    async def sleep(self, who: str, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._sleepers[who] = self.now + seconds, future
        await future

    def is_asleep(self, who: str) -> bool:
        return who in self._sleepers and not self._sleepers[who][1].done()

    def move(self, seconds: float) -> None:
        self.now += seconds
        for due, future in self._sleepers.values():
            if due <= self.now and not future.done():
                future.set_result(None)


class FakeApi:
    """As the real one where it matters here: versions, conflicts, bearer tokens, errors.

    Attributes:
        lease: The object; None when there is none.
        tokens: Those that it accepts.
        forbidden: Methods that nobody may use.
        broken: With what it answers those of a token instead: a status and a body.
        requests: Method, token and status of all requests, as they came.
    """

    def __init__(self, clock: Clock) -> None:
        self.lease: dict[str, Any] | None = None
        self.tokens: set[str] = set()
        self.forbidden: set[str] = set()
        self.broken: dict[str, tuple[int, bytes]] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.server = ""
        self._clock = clock
        self._version = 0

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec

    @property
    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get(f"{_FOLDER}/{NAME}", self._answer)
        app.router.add_put(f"{_FOLDER}/{NAME}", self._answer)
        app.router.add_post(_FOLDER, self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        await self.gate.wait()
        token = request.headers["Authorization"].removeprefix("Bearer ")
        body = await request.json() if request.can_read_body else None
        if token in self.broken:
            status, raw = self.broken[token]
            answer = web.Response(status=status, body=raw, content_type="application/json")
        elif token not in self.tokens:
            answer = _failure(401, "Unauthorized")
        elif request.method in self.forbidden:
            answer = _failure(403, "leases is forbidden")
        else:
            answer = self._obey(request.method, body)
        self.requests.append((request.method, token, answer.status))
        return answer

    def _obey(self, method: str, body: Any) -> web.Response:
        known = self.lease
        if method == "GET":
            return web.json_response(known) if known else _failure(404, "leases not found")
        _require_valid(body)
        if method == "POST":
            if known is not None:
                return _failure(409, "leases already exists")
            assert "resourceVersion" not in body["metadata"]
            made = datetime.fromtimestamp(_START_S + self._clock.now, UTC)
            uid = f"uid-{self._version}"
            known = {"metadata": {"uid": uid, "creationTimestamp": f"{made:%Y-%m-%dT%H:%M:%SZ}"}}
        elif known is None:
            return _failure(404, "leases not found")
        elif any(body["metadata"][key] != known["metadata"][key] for key in ("uid", _VERSION)):
            return _failure(409, "the object has been modified")
        self.lease = copy.deepcopy(body)
        self.lease["metadata"] |= {key: known["metadata"][key] for key in ("uid", _MADE)}
        self.touch()
        return web.json_response(self.lease, status=201 if method == "POST" else 200)

    def touch(self) -> None:
        """The object has changed."""
        assert self.lease is not None
        self._version += 1
        self.lease["metadata"][_VERSION] = str(self._version)


_VERSION, _MADE = "resourceVersion", "creationTimestamp"


def _require_valid(body: Any) -> None:
    spec = body["spec"]
    assert (body["apiVersion"], body["kind"]) == ("coordination.k8s.io/v1", "Lease")
    assert body["metadata"]["name"] == NAME
    assert body["metadata"]["namespace"] == "serving"
    assert spec["leaseDurationSeconds"] > 0
    assert isinstance(spec["holderIdentity"], str)
    for key in ("acquireTime", "renewTime"):
        datetime.strptime(spec[key], "%Y-%m-%dT%H:%M:%S.%fZ")
        assert len(spec[key]) == len("2026-01-01T00:00:00.000000Z")


def _failure(status: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message}, status=status)


class Cluster:
    """The server, and routers' leases on it."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.api = FakeApi(self.clock)
        self.leases: list[KubeLease] = []  # those whose watchers ask
        self.held: list[tuple[float, int, int]] = []  # when, which, its epoch
        self._made: dict[str, KubeLease] = {}
        self._folder = folder

    def account(self, token: str) -> Path:
        folder = self._folder / token
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(token + "\n")
        (folder / "ca.crt").write_bytes(CERTIFICATE.read_bytes())
        (folder / "namespace").write_text("serving")
        self.api.tokens.add(token)
        return folder

    def place(self, token: str = "one") -> Place:
        return Place(self.api.server, self.account(token), "serving", NAME)

    def lease(self, token: str) -> KubeLease:
        sleep = partial(self.clock.sleep, token)
        made = KubeLease(self.place(token), clock=self.clock, sleep=sleep)
        self.leases.append(made)
        self._made[token] = made
        return made

    async def settle(self) -> None:
        """Until all of them wait."""
        for each in self.leases:
            each.hold()
        await eventually(
            lambda: all(
                not made.is_running or self.clock.is_asleep(token)
                for token, made in self._made.items()
            )
        )

    async def go(self, seconds: float, until: int | None = None) -> list[int | None]:
        """Let time pass, half a second at a time, or until that one holds it; who holds it
        then. There are never two."""
        for _ in range(int(2 * seconds)):
            await self.settle()
            held = [each.hold() for each in self.leases]
            assert sum(each is not None for each in held) <= 1
            self.held += [(self.clock.now, n, e) for n, e in enumerate(held) if e is not None]
            if until is not None and held[until] is not None:
                break
            self.clock.move(0.5)
        await self.settle()
        return [each.hold() for each in self.leases]

    async def close(self) -> None:
        self.api.gate.set()
        for each in self._made.values():
            each.close()
            await each.wait_closed()


@asynccontextmanager
async def kubernetes(folder: Path, host: str = "127.0.0.1") -> AsyncIterator[Cluster]:
    cluster = Cluster(folder)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE, CERTIFICATE_KEY)
    runner = web.AppRunner(cluster.api.app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, 0, ssl_context=tls)
    await site.start()
    cluster.api.server = f"https://{host}:{runner.addresses[0][1]}"
    try:
        yield cluster
    finally:
        await cluster.close()
        await runner.cleanup()
