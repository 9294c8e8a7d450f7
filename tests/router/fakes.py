"""Instances without an engine: a real HTTP server and a real agent each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from msgspec.structs import replace as replace_struct

from tests.control.channel import eventually
from tests.policy.builders import COST
from vllm_tetri import cli, handover
from vllm_tetri.control.agent import Agent
from vllm_tetri.errors import ProtocolError
from vllm_tetri.handover import DecodeParams, Fetch, Prefilled, PrefillParams
from vllm_tetri.messages import (
    CacheReport,
    CancelTransfer,
    Dispatched,
    Move,
    ToEngine,
    TransferLost,
)
from vllm_tetri.policy.balance import FlipOrder, Look
from vllm_tetri.router.adapters import LOAD, UNLOAD
from vllm_tetri.router.app import App
from vllm_tetri.router.auth import Keys, Limits
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.scheduler import GlobalScheduler, RouterConfig
from vllm_tetri.router.server import Listener, listening
from vllm_tetri.security import Secret
from vllm_tetri.types import ClusterView, InstanceId, InstanceInfo, InstanceLoad, Role, TransferId

Handler = Callable[["FakeInstance", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

PERIOD_S = 0.05
PROMPT_TOKENS = 7
FREE = InstanceLoad(
    blocks_total=100_000,
    arena_total_bytes=1 << 20,
    chunk_tokens=512,
    handover_s=0.011,
    handover_token_s=1e-6,
    cost=COST,
)


def info_of(name: str, role: Role, url: str = "http://127.0.0.1:1", **more: Any) -> InstanceInfo:
    """An instance as it introduces itself."""
    usual = {
        "models": ("tiny",),
        "kv_endpoint": "127.0.0.1:1",
        "identity": {},
        "max_model_len": 2048,
        "block_size": 16,
        "pid": 1,
        "root": "/models/tiny",
    }
    return InstanceInfo(id=InstanceId(name), url=url, role=role, **{**usual, **more})


class Call(NamedTuple):
    """A request that reached an instance."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    method: str
    target: str
    raw: bytes


class FakeEngine:
    """The side of a fake instance that its agent talks to."""

    def __init__(self, fake: FakeInstance) -> None:
        self._fake = fake

    def read_load(self) -> InstanceLoad:
        self._fake.speaks.wait(10)  # an engine that is stuck reports nothing
        return self._fake.load

    def read_cache(self, seq: int, *, is_all: bool) -> CacheReport | None:
        if is_all:
            return CacheReport(self._fake.id, seq, 16, is_all=True, added=self._fake.cached)
        report, self._fake.cache_report = self._fake.cache_report, None
        return replace_struct(report, seq=seq + report.seq) if report is not None else None

    def unfinished(self, role: Role) -> str:
        return self._fake.unfinished

    def is_idle(self) -> bool:
        return not self._fake.is_busy

    def take(self, message: ToEngine) -> None:
        match message:
            case CancelTransfer(transfer=transfer):
                self._fake.cancelled.append(transfer)
            case TransferLost(transfer=transfer):
                self._fake.lost.append(transfer)
            case Move():
                self._fake.moves.append(message)

    def abandon(self, router: str) -> None:
        pass

    def on_drained(self) -> None:
        self._fake.has_left.set()


def refusing(refusal: Refusal) -> web.Response:
    status, kind = refusal.status, "application/json"
    return web.Response(body=refusal.body(), status=status, content_type=kind)


class FakeInstance:
    def __init__(
        self,
        name: str,
        role: Role,
        *,
        decode: str = "",
        models: tuple[str, ...] = ("tiny",),
        identity: dict[str, str] | None = None,
    ) -> None:
        self.id = InstanceId(name)
        self.role = role
        self.decode = decode
        self.models = models
        self.pid = 4711
        self.identity = identity or {"model": "tiny"}
        self.load = InstanceLoad(blocks_total=100, arena_total_bytes=1 << 20)
        self.calls: list[Call] = []
        self.cancelled: list[TransferId] = []
        self.lost: list[TransferId] = []
        self.moves: list[Move] = []
        self.aborted = 0
        self.handler: Handler | None = None
        self.abilities: dict[str, Any] = {}
        self.is_healthy = True
        self.num_probes = self.num_asked = 0
        self.metrics = ""
        self.adapters: dict[str, tuple[str, str]] = {}  # path and digest by name
        self.load_gate, self.num_loads = asyncio.Event(), 0  # of orders to load one
        self.load_gate.set()
        self.cached = b""  # names of all blocks in the prefix cache
        self.cache_report: CacheReport | None = None  # sent once, that many reports too late
        self.can_load = True
        self.chunk_gate = asyncio.Event()
        self.chunk_gate.set()
        self.num_chunks = 3
        self.unfinished = ""
        self.is_busy = False  # and takes no step
        self.has_left = threading.Event()
        self.speaks = threading.Event()
        self.speaks.set()
        self.agent: Agent | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""
        self.secret: Secret | None = None

    async def start(self, *controls: str) -> None:
        await self.start_http()
        self.join(*controls)

    async def start_http(self) -> None:
        """Listen, at the same port as before."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get(handover.INSTANCE_PATH, self._tell)
        app.router.add_post(LOAD, self._load)
        app.router.add_post(UNLOAD, self._unload)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        former = int(self.url.rpartition(":")[2] or 0)
        site = web.TCPSite(self._runner, "127.0.0.1", former)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    def join(self, *controls: str) -> None:
        self.agent = Agent(
            controls, self.info(), FakeEngine(self), period_s=PERIOD_S, secret=self.secret
        )
        self.agent.start()

    def info(self) -> InstanceInfo:
        more = {"models": self.models, "identity": self.identity, "pid": self.pid}
        return info_of(self.id, self.role, self.url, **more, **self.abilities)

    async def close(self) -> None:
        self.speaks.set()
        if self.agent is not None:
            await asyncio.to_thread(self.agent.close)
        await self.stop_http()

    async def stop_http(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def leg(self, index: int = -1) -> object:
        return handover.from_params(self.calls[index][1].get("kv_transfer_params"))

    async def _health(self, _: web.Request) -> web.Response:
        self.num_probes += 1
        return web.Response(status=200 if self.is_healthy else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _tell(self, _: web.Request) -> web.Response:
        self.num_asked += 1
        return web.json_response({"id": self.id, "adapters": self.adapters})

    async def _load(self, request: web.Request) -> web.Response:
        order = await request.json()
        self.num_loads += 1
        await self.load_gate.wait()
        if not self.can_load:
            return refusing(Refusal(404, "no adapter is there"))
        if order["lora_name"] in self.adapters:
            return refusing(Refusal(400, "it has already been loaded"))
        self.adapters[order["lora_name"]] = (order["lora_path"], "d")
        return web.Response(text="loaded")

    async def _unload(self, request: web.Request) -> web.Response:
        if self.adapters.pop((await request.json())["lora_name"], None) is None:
            return refusing(Refusal(404, "no such adapter"))
        return web.Response(text="unloaded")

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        is_form = request.content_type.startswith("multipart")
        body = {} if is_form else json.loads(raw or b"{}")
        headers = request.headers.copy()
        self.calls.append(Call(request.path, body, headers, request.method, request.path_qs, raw))
        if body.get("model", "").startswith("lora") and body["model"] not in self.adapters:
            return refusing(Refusal(404, "the model does not exist"))
        try:
            if self.handler is not None:
                return await self.handler(self, request, body)
            return await self.answer(request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        try:
            leg = handover.from_params(body.get("kv_transfer_params"))
        except ProtocolError as error:
            return refusing(Refusal(400, str(error)))
        if isinstance(leg, PrefillParams):
            return self.prefilled(leg)
        if isinstance(leg, Fetch) and leg.target != self.id:
            return self.sent(leg)
        if body.get("stream"):
            return await self.stream(request)
        kind = "injected" if isinstance(leg, DecodeParams) else "whole"
        return web.json_response({"object": "answer", "by": self.id, "kind": kind})

    def prefilled(self, leg: PrefillParams) -> web.Response:
        if self.decode:
            self.announce(leg)
        prefilled = Prefilled(
            transfer=leg.transfer,
            decode=InstanceId(self.decode),
            num_tokens=PROMPT_TOKENS,
            digest="d1",
            reason="full" if not self.decode else "",
        )
        return web.json_response({"kv_transfer_params": handover.to_params(prefilled)})

    def sent(self, leg: Fetch) -> web.Response:
        """It holds the prefix that another one fetches, unless it has no names of blocks."""
        done = Prefilled(leg.transfer, leg.target, PROMPT_TOKENS, "d1", "fetches")
        params = handover.to_params(done) if self.cached else None
        return web.json_response({"kv_transfer_params": params})

    def announce(self, leg: PrefillParams) -> None:
        assert self.agent is not None
        self.agent.publish(Dispatched(leg.request, leg.transfer, InstanceId(self.decode)))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        for index in range(self.num_chunks):
            await answer.write(b'data: {"index": %d}\n\n' % index)
            await self.chunk_gate.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer


class Rank(FakeInstance):
    """A rank other than the first: its requests go to the first one's server."""

    first: FakeInstance

    async def start(self, *controls: str) -> None:
        self.url = self.first.url
        self.join(*controls)


def ranks(*roles: Role) -> list[FakeInstance]:
    """Ranks of one server; the first one of several hands over to the last one."""
    first = FakeInstance("s-dp0", roles[0], decode=f"s-dp{len(roles) - 1}")
    found = [first, *(Rank(f"s-dp{at}", role) for at, role in enumerate(roles) if at)]
    for number, each in enumerate(found):
        each.abilities["rank"] = number
        if isinstance(each, Rank):
            each.first = first
    return found


@dataclass
class Cluster:
    scheduler: GlobalScheduler
    url: str
    client: aiohttp.ClientSession
    instances: dict[str, FakeInstance]
    listener: Listener

    def __getitem__(self, name: str) -> FakeInstance:
        return self.instances[name]

    @property
    def control(self) -> str:
        return self.scheduler.monitor.address

    async def add(self, instance: FakeInstance) -> FakeInstance:
        self.instances[instance.id] = instance
        await instance.start(self.control)
        await eventually(lambda: self.state(instance.id) == "ready")
        return instance

    def state(self, name: str) -> str:
        for each in self.scheduler.monitor.view().instances:
            if each.info.id == name:
                return each.state
        return "absent"

    async def get(self, path: str) -> Any:
        async with self.client.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def table(self) -> list[dict[str, Any]]:
        answer = await self.get("/tetri/v1/requests")
        assert answer["in_flight"] == len(answer["requests"])
        return answer["requests"]

    async def metrics(self) -> str:
        async with self.client.get(self.url + "/metrics") as response:
            assert response.status == 200
            return await response.text()

    async def order(self, path: str, body: Any = None) -> tuple[int, Any]:
        """An operator's order, below /tetri/v1/."""
        async with self.client.post(f"{self.url}/tetri/v1/{path}", json=body) as response:
            return response.status, await response.json()

    async def command(self, *words: str) -> int:
        return await asyncio.to_thread(cli.main, [*words, "--url", self.url])

    async def report(self, name: str, **load: Any) -> None:
        """An instance reports another load, until the router knows it."""
        self[name].load = replace(self[name].load, **load)
        await eventually(self.is_reported)

    def is_reported(self) -> bool:
        views = self.scheduler.monitor.view().instances
        return all(each.load == self[each.info.id].load for each in views)

    async def ask(
        self, path: str = "/v1/completions", headers: Any = None, **body: Any
    ) -> tuple[int, Any, Any]:
        body = {"model": "tiny", "prompt": "hello", **body}
        async with self.client.post(self.url + path, json=body, headers=headers) as response:
            is_json = response.content_type == "application/json"
            answer = await (response.json() if is_json else response.read())
            return response.status, answer, response.headers


@contextlib.asynccontextmanager
async def cluster(
    *instances: FakeInstance, first_byte_s: float = 5.0, **options: Any
) -> AsyncIterator[Cluster]:
    for instance in instances:
        instance.secret = options.get("secret")
    async with (
        door(first_byte_s=first_byte_s, **options) as (scheduler, listener, url),
        aiohttp.ClientSession() as client,
    ):
        made = Cluster(scheduler, url, client, {}, listener)
        try:
            for instance in instances:
                await made.add(instance)
            yield made
        finally:
            for each in made.instances.values():
                await each.close()


@contextlib.asynccontextmanager
async def door(
    control: str = "tcp://127.0.0.1:0",
    first_byte_s: float = 5.0,
    *,
    keys: tuple[str, ...] = (),
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncIterator[tuple[GlobalScheduler, Listener, str]]:
    config = RouterConfig(
        control=control,
        first_byte_s=first_byte_s,
        num_clients=Keys(keys).num_clients,
        # A busy machine holds a test up for half a second.
        **{"period_s": PERIOD_S, "silent_after_s": 1.0, **options},
    )
    scheduler = GlobalScheduler(config)
    limits = limits or Limits()
    app = App(scheduler, keys=Keys(keys), limits=limits)
    async with listening(app, limits, ("127.0.0.1", 0), tls) as listener:
        scheme = "http" if tls is None else "https"
        yield scheduler, listener, "{}://{}:{}".format(scheme, *listener.address)


def both(name: str = "b") -> FakeInstance:
    return FakeInstance(name, Role.BOTH)


def pair() -> tuple[FakeInstance, FakeInstance]:
    return FakeInstance("p", Role.PREFILL, decode="d"), FakeInstance("d", Role.DECODE)


def trio(prefill: Handler | None = None, decode: Handler | None = None) -> tuple[FakeInstance, ...]:
    """Return p, which hands over to d1, and d2; with what they answer."""
    found = (
        FakeInstance("p", Role.PREFILL, decode="d1"),
        FakeInstance("d1", Role.DECODE),
        FakeInstance("d2", Role.DECODE),
    )
    for each, handler in zip(found, (prefill, decode, decode), strict=True):
        each.handler = handler
    return found


def four() -> tuple[FakeInstance, ...]:
    found = [FakeInstance(name, Role.PREFILL, decode="d1") for name in ("p1", "p2")]
    return *found, FakeInstance("d1", Role.DECODE), FakeInstance("d2", Role.DECODE)


async def hang(*_: Any) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


async def hang_up(_: FakeInstance, request: web.Request, __: Any) -> web.StreamResponse:
    """Reset the connection."""
    assert request.transport is not None
    request.transport.abort()
    return await hang()


async def answer_500(*_: Any) -> web.StreamResponse:
    return web.Response(status=500, text="engine died")


BUSY = {
    "message": "The engine has reached its prefill token backlog limit. Please try again later",
    "type": "Service Unavailable",
    "param": None,
    "code": 503,
}


async def full(*_: Any) -> web.StreamResponse:
    return web.json_response({"error": BUSY}, status=503)


def held_back(*instances: FakeInstance) -> tuple[FakeInstance, ...]:
    """Their answers wait for `let_go`."""

    async def wait(fake: FakeInstance, request: web.Request, body: Any) -> web.StreamResponse:
        await fake.chunk_gate.wait()
        return await fake.answer(request, body)

    for each in instances:
        each.handler = wait
        each.chunk_gate.clear()
    return instances


def let_go(*instances: FakeInstance) -> None:
    """Let instances respond."""
    for each in instances:
        each.chunk_gate.set()


async def begin(made: Cluster, count: int, **body: Any) -> list[asyncio.Task[Any]]:
    """Requests that have reached an instance each."""
    calls = sum(len(each.calls) for each in made.instances.values())
    tasks = [asyncio.create_task(made.ask(**body)) for _ in range(count)]
    await eventually(
        lambda: sum(len(each.calls) for each in made.instances.values()) == calls + count
    )
    return tasks


async def refused(made: Cluster, who: str, path: str = "/v1/completions", **body: Any) -> None:
    status, answer, headers = await made.ask(path, **body)
    assert (status, answer["error"]["code"]) == (503, 503)
    assert headers["x-tetri-error"] == "queue_full"
    assert f"all {who} are at their limits" in answer["error"]["message"]
    assert 1 <= int(headers["Retry-After"]) <= 60


async def until_reported(made: Cluster) -> None:
    """The router has the current report of every instance."""
    await eventually(made.is_reported)
    # Placements use what they took of it for 20 ms, and take it again when that is older.
    await asyncio.sleep(0.025)


async def metric(made: Cluster, line: str) -> float:
    for found in (await made.metrics()).splitlines():
        if found.startswith(line + " "):
            return float(found.rpartition(" ")[2])
    return 0.0


class Watching:
    """A watcher that counts its looks, and orders one flip if it is told to."""

    def __init__(self, role: Role | None = None) -> None:
        self.looks = 0
        self._role = role

    def look(self, view: ClusterView, now: float) -> Look:
        self.looks += 1
        if self._role is None or not any(each.info.id == "d2" for each in view.instances):
            return Look(None, f"look {self.looks}")
        return Look(FlipOrder(InstanceId("d2"), self._role, True, "7 s against 1 s"), "as told")
