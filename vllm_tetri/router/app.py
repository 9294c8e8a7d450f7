"""The HTTP routes of the router. Decisions are made elsewhere; docs/api.md lists the routes.

Routes that are never split are proxied to one instance. Bodies are passed on unchanged, but for
hand-over parameters, which only the router may set, and so are responses, errors included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from vllm_tetri.messages import FlipRole
from vllm_tetri.router.adapters import LOAD, SERVING, UNLOAD
from vllm_tetri.router.auth import Keys, Limits
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.explain import explain, replayable
from vllm_tetri.router.live import LiveView, page, plain_cluster
from vllm_tetri.router.merged import Merged
from vllm_tetri.router.metrics import targets
from vllm_tetri.router.request import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    ProxyRules,
    decode_order,
    parse_request,
)
from vllm_tetri.router.scheduler import GlobalScheduler
from vllm_tetri.router.server import CLIENT, DIRECT, BodyReader
from vllm_tetri.router.streamed import CORS, permit_origin
from vllm_tetri.types import FLIP_DEADLINE_S, InstanceId, InstanceState, Mode, RequestId, Role

Deadline = Annotated[float, msgspec.Meta(ge=0, le=86_400.0)] | None

_PREFLIGHT = "Access-Control-Request-Method"
_PERMISSION = {
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}

_json = partial(web.json_bytes_response, dumps=msgspec.json.encode)
_log = logging.getLogger(__name__)

# fmt: off
_GENERATION = (
    "/v1/messages", "/v1/chat/completions/batch", "/v1/systemone", "/cohere/v2/chat",
    "/generative_scoring", "/inference/v1/generate", "/invocations",
)
_POOLING = (
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank",
    "/v1/rerank", "/v2/rerank",
)
_AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")  # forms, not JSON
_TEXT = (
    "/tokenize", "/detokenize", "/v1/messages/count_tokens",
    "/v1/chat/completions/render", "/v1/chat/completions/derender",
    "/v1/completions/render", "/v1/completions/derender",
    "/v1/messages/render", "/v1/responses/render", "/cohere/v2/chat/render",
)
# fmt: on
_GETS = ("/version", "/tokenizer_info", "/server_info", "/docs", "/redoc")
_RESPONSE = RESPONSES + "/{response_id:[A-Za-z0-9._:-]{1,256}}"
_STORED = ProxyRules(is_stored=True)
_NO_BODY = ProxyRules(generates=False, has_body=False)  # some are open to every client
# Method, path and rules of every proxied route.
PROXIED: tuple[tuple[str, str, ProxyRules], ...] = (
    *(("POST", path, ProxyRules()) for path in (*_GENERATION, *_POOLING)),
    *(("POST", path, ProxyRules(has_json=False)) for path in _AUDIO),
    *(("POST", path, ProxyRules(generates=False)) for path in _TEXT),
    *(("GET", path, _NO_BODY) for path in _GETS),
    ("POST", RESPONSES, _STORED),
    ("GET", _RESPONSE, _STORED),
    ("POST", _RESPONSE + "/cancel", _STORED),
)


class ModeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /tetri/v1/mode`."""

    mode: Mode


class DrainOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /tetri/v1/instances/{id}/drain`, all of it optional."""

    force: bool = False
    deadline_s: Deadline = None


class MoveBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /tetri/v1/requests/{id}/move`."""

    to: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class RegretBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /tetri/v1/regret`."""

    regret: float
    error: float


class FlipBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /tetri/v1/instances/{id}/flip`."""

    role: Role
    now: bool = False
    deadline_s: Deadline = FLIP_DEADLINE_S
    force: bool = False
    reason: Annotated[str, msgspec.Meta(max_length=200)] = "ordered"


def build_app(
    scheduler: GlobalScheduler, *, keys: Keys, limits: Limits, relays: bool = True
) -> web.Application:
    """Build the application around a scheduler, which it starts and closes; one that does not
    relay requests has the routes for operators only."""
    bodies = BodyReader(limits)
    merged, live = Merged(scheduler.monitor, scheduler.upstream), LiveView(scheduler)
    routes = _Routes(scheduler, bodies, merged)
    guard = _guard(keys, bodies, merged, preflight=routes.serve(_NO_BODY))
    app = web.Application(middlewares=[guard])
    app.on_response_prepare.append(permit_origin)
    app.on_shutdown.append(live.close)
    app.add_routes([
        web.get("/", page),
        web.get("/v1/models", routes.models),
        web.post(LOAD, routes.adapter),
        web.post(UNLOAD, routes.adapter),
        web.get("/health", routes.health),
        web.get("/readyz", routes.health),
        web.get("/livez", routes.live),
        web.get("/ping", routes.health),
        web.post("/ping", routes.health),
        web.get("/metrics", routes.metrics),
        web.get("/load", routes.load),
        web.get("/openapi.json", routes.openapi),
        web.get("/tetri/v1/instances", routes.instances),
        web.post("/tetri/v1/instances/{id}/drain", routes.drain),
        web.post("/tetri/v1/instances/{id}/flip", routes.flip),
        web.get("/tetri/v1/cache", routes.cache),
        web.get("/tetri/v1/targets", routes.targets),
        web.get("/tetri/v1/history", routes.history),
        web.get("/tetri/v1/requests", routes.requests),
        web.get("/tetri/v1/requests/{id}", routes.explain),
        web.post("/tetri/v1/requests/{id}/move", routes.move),
        web.get("/tetri/v1/mode", routes.mode),
        web.post("/tetri/v1/mode", routes.set_mode),
        web.post("/tetri/v1/regret", routes.record_regret),
        web.get("/tetri/v1/events", live.serve, allow_head=False),
    ])  # fmt: skip
    app[DIRECT] = partial(guard, handler=routes.serve(None)) if relays else None
    understood = [("POST", path, None) for path in (CHAT, COMPLETIONS)]
    for method, path, rules in [*understood, *PROXIED] if relays else ():
        more = {"allow_head": False} if method == "GET" else {}
        app.add_routes([web.route(method, path, routes.serve(rules), **more)])

    async def run(_: web.Application) -> AsyncIterator[None]:
        try:
            scheduler.monitor.start()
            yield
        finally:
            await scheduler.close()

    app.cleanup_ctx.append(run)
    return app


class _Routes:
    def __init__(self, scheduler: GlobalScheduler, bodies: BodyReader, merged: Merged) -> None:
        self._scheduler = scheduler
        self._bodies = bodies
        self._merged = merged

    def serve(self, rules: ProxyRules | None) -> Handler:
        """Return the handler of a route; with rules, of one that is never split."""

        async def serve(http: web.Request) -> web.StreamResponse:
            client = http[CLIENT]
            kind = http.headers.get("Content-Type", "").partition(";")[0].lower()
            if rules is None and kind != "application/json":  # as vLLM judges it
                raise Refusal(400, "Unsupported Media Type: Only 'application/json' is allowed")
            raw = await self._bodies.read(http) if rules is None or rules.has_body else b""
            path = http.path if rules is None else http.rel_url.raw_path_qs
            request = parse_request(
                path, raw, http.headers, client=client, method=http.method, rules=rules
            )
            return await self._scheduler.serve(request, http)

        return serve

    async def models(self, _: web.Request) -> web.Response:
        now = int(time.time())
        data = [
            {
                "id": name,
                "object": "model",
                "created": now,
                "owned_by": "vllm",
                "root": adapter.path if adapter else info.root,
                "parent": info.models[0] if adapter else None,
                "max_model_len": None if adapter else info.max_model_len,
                "permission": [_PERMISSION | {"id": f"modelperm-{name}", "created": now}],
            }
            for name, info in self._scheduler.placer.models().items()
            for adapter in [info.adapters.get(name)]
        ]
        return _json({"object": "list", "data": data})

    async def adapter(self, http: web.Request) -> web.StreamResponse:
        raw = await self._bodies.read(http)
        return await self._scheduler.adapters.order(http.path, raw, http.headers)

    async def health(self, _: web.Request) -> web.Response:
        if not self._scheduler.placer.models():
            raise Refusal(503, "no instance is ready")
        return web.Response()

    async def live(self, _: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        of_instances = await self._merged.metrics()
        return web.Response(
            body=self._scheduler.metrics.render() + of_instances.encode(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def load(self, _: web.Request) -> web.Response:
        return _json({"server_load": len(self._scheduler.table)})

    async def openapi(self, http: web.Request) -> web.Response:
        routes = {
            (route.method, route.resource.canonical)
            for route in http.app.router.routes()
            if route.resource is not None
        }
        body = await self._merged.openapi(routes)
        return web.Response(body=body, content_type="application/json")

    async def instances(self, _: web.Request) -> web.Response:
        return _json(plain_cluster(self._scheduler))

    async def cache(self, _: web.Request) -> web.Response:
        blocks = self._scheduler.placer.cached_blocks()
        rows = [
            {
                "id": each.info.id,
                "blocks": blocks[each.info.id],
                "pool_blocks": each.load.kv_pool_blocks,
                "block_tokens": each.info.block_size,
            }
            for each in self._scheduler.monitor.view().instances
            if each.info.id in blocks
        ]
        return _json({"instances": rows})

    async def targets(self, _: web.Request) -> web.Response:
        found = targets(each.info for each in self._scheduler.monitor.view().instances)
        if not found:  # a router that has just started; after an error Prometheus keeps its targets
            raise Refusal(503, "no instance has joined; try again")
        return _json(found)

    async def drain(self, request: web.Request) -> web.Response:
        name = InstanceId(request.match_info["id"])
        raw = await self._bodies.read(request)
        order = decode_order(raw or b"{}", DrainOrder, "order to drain")
        self._scheduler.drain(name, force=order.force, deadline_s=order.deadline_s)
        return _json({"id": name, "state": InstanceState.DRAINING}, status=202)

    async def flip(self, request: web.Request) -> web.Response:
        name = InstanceId(request.match_info["id"])
        order = decode_order(await self._bodies.read(request), FlipBody, "order to flip")
        is_new, epoch = self._scheduler.flips.order(
            name,
            FlipRole(0, order.role, order.now, order.deadline_s, order.reason),
            force=order.force,
        )
        one = self._scheduler.monitor.view_of(name)
        flip = one.flip if one is not None else None
        is_under_way = is_new or (flip is not None and flip.is_under_way)
        content = {
            "id": name,
            "role": order.role,
            "epoch": epoch,
            "state": one.state if one is not None else InstanceState.SILENT,
            "is_new": is_new,
            "is_under_way": is_under_way,
        }
        return _json(content, status=202 if is_under_way else 200)

    async def explain(self, request: web.Request) -> web.Response:
        return _json(explain(self._scheduler.look_up(RequestId(request.match_info["id"]))))

    async def history(self, _: web.Request) -> web.Response:
        views = self._scheduler.monitor.view().instances
        rows = [
            {
                "id": each.info.id,
                "model": each.info.models[0],
                "role": each.info.role,
                "block_size": each.info.block_size,
                "arena_tokens": each.info.arena_tokens,
                "sizes_chunks": each.info.sizes_chunks,
                "step_limits": each.info.step_limits,
                "load": each.load,
            }
            for each in views
            if each.state in SERVING
        ]
        # The rest was served in another mode.
        since_s, names = self._scheduler.mode_since_s, self._scheduler.placer.models()
        ended = (each for each in self._scheduler.history.since(0.0) if each.arrival_s >= since_s)
        told = (each for each in replayable(ended) if each["model"] in names)
        found = [{**each, "model": names[each["model"]].models[0]} for each in told]
        mode = {"mode": self._scheduler.placer.mode, "mode_s": time.monotonic() - since_s}
        return _json({**mode, "instances": rows, "requests": found})

    async def move(self, request: web.Request) -> web.Response:
        name = RequestId(request.match_info["id"])
        order = decode_order(await self._bodies.read(request), MoveBody, "order to move")
        source = self._scheduler.moves.order(name, InstanceId(order.to))
        return _json({"id": name, "from": source, "to": order.to}, status=202)

    async def mode(self, _: web.Request) -> web.Response:
        return _json({"mode": self._scheduler.placer.mode})

    async def set_mode(self, request: web.Request) -> web.Response:
        order = decode_order(await self._bodies.read(request), ModeOrder, "mode")
        self._scheduler.set_mode(order.mode)
        return _json({"mode": self._scheduler.placer.mode})

    async def record_regret(self, request: web.Request) -> web.Response:
        told = decode_order(await self._bodies.read(request), RegretBody, "regret")
        self._scheduler.metrics.regret.set(told.regret)
        self._scheduler.metrics.regret_error.set(told.error)
        return _json({"regret": told.regret})

    async def requests(self, _: web.Request) -> web.Response:
        return _json(self._scheduler.table.plain(time.monotonic()))


def _guard(keys: Keys, bodies: BodyReader, merged: Merged, preflight: Handler) -> Middleware:
    """Reject requests without a known key, and give errors the shape of OpenAI's."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        try:
            if origin and request.method == "OPTIONS" and _PREFLIGHT in request.headers:
                request[CLIENT] = ""  # needs no key, as in vLLM
                return await preflight(request)
            client = keys.client_of(request.path, request.headers)
            if client is None:
                words = "this API needs a known key: send the header 'Authorization: Bearer KEY'"
                raise Refusal(401, words, kind="invalid_api_key")
            request[CLIENT] = client
            if origin:
                request[CORS] = await merged.cors(origin)
            bodies.check_announced(request)
            return await handler(request)
        except Refusal as refusal:
            return refusal.response()
        except web.HTTPException as error:
            if error.status < 400:
                raise
            words = f"{request.method} {request.path}: {error.reason}"
            if error.status == 404:
                words += "; a route that concerns one instance is served there: "
                words += "GET /tetri/v1/instances lists their addresses"
            response = Refusal(error.status, words).response()
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response
        except ConnectionResetError:
            return web.Response(status=499)  # the client has left and does not read it
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            return Refusal(500, "the router failed; see its log").response()
        finally:
            bodies.release(request)

    return guard
