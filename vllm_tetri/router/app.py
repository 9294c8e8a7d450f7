"""The HTTP routes of the router. Decisions are made elsewhere; docs/api.md lists the routes.

Routes that are never split are proxied to one instance. Bodies are passed on unchanged, but for
hand-over parameters, which only the router may set, and so are responses, errors included.
"""

from __future__ import annotations

import logging
import time
from typing import Annotated

import msgspec

from vllm_tetri.messages import FlipRole
from vllm_tetri.router.adapters import LOAD, SERVING, UNLOAD
from vllm_tetri.router.auth import Keys, Limits
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.explain import explain, replayable
from vllm_tetri.router.incoming import CONTINUE, BodyReader, ClientRequest
from vllm_tetri.router.live import LiveView, page, plain_cluster
from vllm_tetri.router.merged import Merged
from vllm_tetri.router.metrics import targets
from vllm_tetri.router.replies import Reply, Response, json_response, refused
from vllm_tetri.router.request import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    ProxyRules,
    decode_order,
    parse_request,
)
from vllm_tetri.router.routes import Handler, Routes
from vllm_tetri.router.scheduler import GlobalScheduler
from vllm_tetri.types import FLIP_DEADLINE_S, InstanceId, InstanceState, Mode, RequestId, Role

Deadline = Annotated[float, msgspec.Meta(ge=0, le=86_400.0)] | None

_PREFLIGHT = "access-control-request-method"
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
_RESPONSE = RESPONSES + "/{response_id}"
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


class App:
    """All routes around a scheduler, which it starts and closes; one that does not relay requests
    has the routes for operators only."""

    def __init__(
        self, scheduler: GlobalScheduler, *, keys: Keys, limits: Limits, relays: bool = True
    ) -> None:
        self._scheduler, self._keys = scheduler, keys
        self._bodies = BodyReader(limits)
        self._merged = Merged(scheduler.monitor, scheduler.upstream)
        self._live, self._routes = LiveView(scheduler), Routes()
        self._preflight = self._relay(_NO_BODY)
        self._add_own()
        understood = [("POST", path, None) for path in (CHAT, COMPLETIONS)]
        for method, path, rules in [*understood, *PROXIED] if relays else ():
            self._routes.add(method, path, self._relay(rules))

    def _add_own(self) -> None:
        for path, shown in {
            "/": page,
            "/v1/models": self._models,
            "/health": self._health,
            "/readyz": self._health,
            "/livez": self._alive,
            "/ping": self._health,
            "/metrics": self._metrics,
            "/load": self._load,
            "/openapi.json": self._openapi,
            "/tetri/v1/instances": self._instances,
            "/tetri/v1/cache": self._cache,
            "/tetri/v1/targets": self._targets,
            "/tetri/v1/history": self._history,
            "/tetri/v1/requests": self._requests,
            "/tetri/v1/requests/{id}": self._explain,
            "/tetri/v1/mode": self._mode,
        }.items():
            self._routes.add("GET", path, shown, has_head=True)
        self._routes.add("GET", "/tetri/v1/events", self._live.serve)
        for path, order in {
            LOAD: self._adapter,
            UNLOAD: self._adapter,
            "/ping": self._health,
            "/tetri/v1/instances/{id}/drain": self._drain,
            "/tetri/v1/instances/{id}/flip": self._flip,
            "/tetri/v1/requests/{id}/move": self._move,
            "/tetri/v1/mode": self._set_mode,
            "/tetri/v1/regret": self._record_regret,
        }.items():
            self._routes.add("POST", path, order)

    def start(self) -> None:
        """Let instances join. Raises `ConfigError`."""
        self._scheduler.monitor.start()

    def end_streams(self) -> None:
        """End what would go on until the router's last deadline."""
        self._live.close()

    async def close(self) -> None:
        """Close the scheduler. Idempotent."""
        await self._scheduler.close()

    async def serve(self, request: ClientRequest) -> Reply:
        """Serve a request that has a known key, or needs none; errors have the shape of OpenAI's.
        Raises `ConnectionResetError`: the client has left."""
        headers = request.headers
        try:
            origin = headers.get("origin")
            if origin and request.method == "OPTIONS" and _PREFLIGHT in headers:
                return await self._preflight(request)  # needs no key, as in vLLM
            client = self._keys.client_of(request.path, headers)
            if client is None:
                words = "this API needs a known key: send the header 'Authorization: Bearer KEY'"
                raise Refusal(401, words, kind="invalid_api_key")
            request.client = client
            if origin:
                request.cors = await self._merged.cors(origin)
            if request.expects not in ("", CONTINUE):
                raise Refusal(417, f"Expect: only {CONTINUE} is understood")
            if origin and request.method == "POST" and request.path.startswith("/tetri/"):
                _require_json(request)  # a browser asks before it sends that to another origin
            self._bodies.check_announced(request)
            return await self._routes.find(request)(request)
        except Refusal as refusal:
            return refused(refusal)
        except ConnectionResetError:
            raise
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            return refused(Refusal(500, "the router failed; see its log"))
        finally:
            self._bodies.release(request)

    def _relay(self, rules: ProxyRules | None) -> Handler:
        """Return the handler of a route; with rules, of one that is never split."""

        async def relay(http: ClientRequest) -> Reply:
            if rules is None:
                _require_json(http)
            raw = await self._bodies.read(http) if rules is None or rules.has_body else b""
            path, client = http.path if rules is None else http.target, http.client
            request = parse_request(
                path, raw, http.headers, client=client, method=http.method, rules=rules
            )
            return await self._scheduler.serve(request, http)

        return relay

    async def _models(self, _: ClientRequest) -> Response:
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
        return json_response({"object": "list", "data": data})

    async def _adapter(self, http: ClientRequest) -> Reply:
        _require_json(http)
        raw = await self._bodies.read(http)
        return await self._scheduler.adapters.order(http.path, raw, http.headers)

    async def _health(self, _: ClientRequest) -> Response:
        if not self._scheduler.placer.models():
            raise Refusal(503, "no instance is ready")
        return Response()

    async def _alive(self, _: ClientRequest) -> Response:
        return Response()

    async def _metrics(self, _: ClientRequest) -> Response:
        of_instances = await self._merged.metrics()
        return Response(
            body=self._scheduler.metrics.render() + of_instances.encode(),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _load(self, _: ClientRequest) -> Response:
        return json_response({"server_load": len(self._scheduler.table)})

    async def _openapi(self, _: ClientRequest) -> Response:
        body = await self._merged.openapi(self._routes.named())
        return Response(body, headers={"content-type": "application/json"})

    async def _instances(self, _: ClientRequest) -> Response:
        return json_response(plain_cluster(self._scheduler))

    async def _cache(self, _: ClientRequest) -> Response:
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
        return json_response({"instances": rows})

    async def _targets(self, _: ClientRequest) -> Response:
        found = targets(each.info for each in self._scheduler.monitor.view().instances)
        if not found:  # a router that has just started; after an error Prometheus keeps its targets
            raise Refusal(503, "no instance has joined; try again")
        return json_response(found)

    async def _drain(self, request: ClientRequest) -> Response:
        name = InstanceId(request.params["id"])
        raw = await self._bodies.read(request)
        order = decode_order(raw or b"{}", DrainOrder, "order to drain")
        self._scheduler.drain(name, force=order.force, deadline_s=order.deadline_s)
        return json_response({"id": name, "state": InstanceState.DRAINING}, status=202)

    async def _flip(self, request: ClientRequest) -> Response:
        name = InstanceId(request.params["id"])
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
        return json_response(content, status=202 if is_under_way else 200)

    async def _explain(self, request: ClientRequest) -> Response:
        return json_response(explain(self._scheduler.look_up(RequestId(request.params["id"]))))

    async def _history(self, _: ClientRequest) -> Response:
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
        return json_response({**mode, "instances": rows, "requests": found})

    async def _move(self, request: ClientRequest) -> Response:
        name = RequestId(request.params["id"])
        order = decode_order(await self._bodies.read(request), MoveBody, "order to move")
        source = self._scheduler.moves.order(name, InstanceId(order.to))
        return json_response({"id": name, "from": source, "to": order.to}, status=202)

    async def _mode(self, _: ClientRequest) -> Response:
        return json_response({"mode": self._scheduler.placer.mode})

    async def _set_mode(self, request: ClientRequest) -> Response:
        order = decode_order(await self._bodies.read(request), ModeOrder, "mode")
        self._scheduler.set_mode(order.mode)
        return json_response({"mode": self._scheduler.placer.mode})

    async def _record_regret(self, request: ClientRequest) -> Response:
        told = decode_order(await self._bodies.read(request), RegretBody, "regret")
        self._scheduler.metrics.regret.set(told.regret)
        self._scheduler.metrics.regret_error.set(told.error)
        return json_response({"regret": told.regret})

    async def _requests(self, _: ClientRequest) -> Response:
        return json_response(self._scheduler.table.plain(time.monotonic()))


def _require_json(request: ClientRequest) -> None:
    """Raise `Refusal` 400 for another content type, as vLLM judges it."""
    if request.headers.get("content-type", "").partition(";")[0].lower() != "application/json":
        raise Refusal(400, "Unsupported Media Type: Only 'application/json' is allowed")
