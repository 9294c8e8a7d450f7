"""An API server of Kubernetes that knows one Lease, and a clock that tests move."""

from __future__ import annotations

import asyncio
import copy
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.certificates import AUTHORITY, CERTIFICATE, CERTIFICATE_KEY
from tests.needed import needed
from tests.router.fakes import eventually

needed("kubernetes_asyncio")

from vllm_tetri.router.kube_lease import KubeLease  # noqa: E402

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
    """An API server that knows one Lease, with versions, conflicts, tokens and errors.

    Attributes:
        lease: The object; None when there is none.
        tokens: Bearer tokens that it accepts.
        broken: Status and body that it responds with instead, by token.
        requests: Method, token and status of all requests.
    """

    def __init__(self, clock: Clock) -> None:
        self.lease: dict[str, Any] | None = None
        self.tokens: set[str] = set()
        self.broken: dict[str, tuple[int, bytes]] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._clock = clock
        self._version = 0

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec

    async def respond(self, request: web.Request) -> web.Response:
        await self.gate.wait()
        token = request.headers["Authorization"].removeprefix("Bearer ")
        body = await request.json() if request.can_read_body else None
        if token in self.broken:
            status, raw = self.broken[token]
            response = web.Response(status=status, body=raw, content_type="application/json")
        elif token not in self.tokens:
            response = _failure(401, "Unauthorized")
        else:
            response = self._obey(request.method, body)
        self.requests.append((request.method, token, response.status))
        return response

    def _obey(self, method: str, body: Any) -> web.Response:
        known = self.lease
        if method == "GET":
            return web.json_response(known) if known else _failure(404, "leases not found")
        _require_valid(body)
        if method == "POST":
            if known is not None:
                return _failure(409, "leases already exists")
            made = datetime.fromtimestamp(_START_S + self._clock.now, UTC)
            known = {"metadata": {_MADE: f"{made:%Y-%m-%dT%H:%M:%SZ}"}}
        elif known is None:
            return _failure(404, "leases not found")
        elif body["metadata"][_VERSION] != known["metadata"][_VERSION]:
            return _failure(409, "the object has been modified")
        self.lease = copy.deepcopy(body)
        self.lease["metadata"][_MADE] = known["metadata"][_MADE]
        self.touch()
        return web.json_response(self.lease, status=201 if method == "POST" else 200)

    def touch(self) -> None:
        """Give the object its next version."""
        assert self.lease is not None
        self._version += 1
        self.lease["metadata"][_VERSION] = str(self._version)


_VERSION, _MADE = "resourceVersion", "creationTimestamp"


def _require_valid(body: Any) -> None:
    spec = body["spec"]
    assert (body["apiVersion"], body["kind"]) == ("coordination.k8s.io/v1", "Lease")
    assert (body["metadata"]["name"], body["metadata"]["namespace"]) == (NAME, "serving")
    assert spec["leaseDurationSeconds"] > 0
    assert isinstance(spec["holderIdentity"], str)
    for key in ("acquireTime", "renewTime"):  # the API takes exactly six decimals
        assert re.fullmatch(r"[-0-9]{10}T[:0-9]{8}[.][0-9]{6}([+]00:00|Z)", spec[key])


def _failure(status: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message}, status=status)


class Cluster:
    """The server, and routers' leases on it."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.api = FakeApi(self.clock)
        self.leases: dict[str, KubeLease] = {}  # by token
        self.held: list[tuple[float, int, int]] = []  # when, which, its epoch
        self._folder = folder

    def account(self, token: str) -> Path:
        folder = self._folder / token
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(token)
        (folder / "ca.crt").write_bytes(AUTHORITY.read_bytes())
        (folder / "namespace").write_text("serving")
        self.api.tokens.add(token)
        return folder

    def lease(self, token: str) -> KubeLease:
        sleep = partial(self.clock.sleep, token)
        made = KubeLease(NAME, account=self.account(token), clock=self.clock, sleep=sleep)
        self.leases[token] = made
        return made

    async def end(self, token: str) -> None:
        """Close the lease of one router."""
        made = self.leases.pop(token)
        await made.close()
        await made.close()
        assert made.hold() is None

    def hold(self) -> list[int | None]:
        return [each.hold() for each in self.leases.values()]

    async def settle(self) -> None:
        """Until all of them wait."""
        self.hold()
        await eventually(lambda: all(map(self.clock.is_asleep, self.leases)))

    async def go(self, seconds: float, until: int | None = None) -> list[int | None]:
        """Let time pass, half a second at a time, or until that one holds it; who holds it
        then. There are never two."""
        for _ in range(int(2 * seconds)):
            await self.settle()
            held = self.hold()
            assert sum(each is not None for each in held) <= 1
            self.held += [(self.clock.now, n, e) for n, e in enumerate(held) if e is not None]
            if until is not None and held[until] is not None:
                break
            self.clock.move(0.5)
        await self.settle()
        return self.hold()

    async def close(self) -> None:
        self.api.gate.set()
        for token in list(self.leases):
            await self.end(token)


@asynccontextmanager
async def kubernetes(
    folder: Path, environ: pytest.MonkeyPatch, host: str = "127.0.0.1"
) -> AsyncIterator[Cluster]:
    """Run an API server, and let this process look like a pod of its cluster."""
    cluster = Cluster(folder)
    app = web.Application()
    app.router.add_route("*", f"{_FOLDER}/{NAME}", cluster.api.respond)
    app.router.add_post(_FOLDER, cluster.api.respond)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE, CERTIFICATE_KEY)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, 0, ssl_context=tls).start()
    environ.setenv("KUBERNETES_SERVICE_HOST", host)
    environ.setenv("KUBERNETES_SERVICE_PORT", str(runner.addresses[0][1]))
    try:
        yield cluster
    finally:
        await cluster.close()
        await runner.cleanup()
