"""The routes of the door. Thin: everything that decides is elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from vllm_tetri.router.answers import Refusal
from vllm_tetri.router.call import CHAT, COMPLETIONS, parse_call
from vllm_tetri.router.flips import DEADLINE_S
from vllm_tetri.router.inflow import VISIT, Inflow, Visit
from vllm_tetri.router.json_body import decode_order
from vllm_tetri.router.keys import Keys
from vllm_tetri.router.limits import Limits
from vllm_tetri.router.metrics import LOAD_COUNTERS, LOAD_GAUGES
from vllm_tetri.router.passthrough import Passthrough
from vllm_tetri.router.routes import add_whole_routes
from vllm_tetri.router.scheduler import GlobalScheduler
from vllm_tetri.types import Flip, InstanceId, InstanceState, InstanceView, Mode, Role

MAX_DEADLINE_S = 86_400.0
_DOCUMENTED = (
    *LOAD_GAUGES,
    "prefills_done",
    "decodes_done",
    "preemptions",
    "flips",
    "cpu_s",
)
# Beyond the documented shape: who did what.
_OTHERS = (
    "reserved_blocks",
    "step_s",
    "remaining_tokens",
    *LOAD_COUNTERS,
    "chunks_done",
    "prompt_tokens_done",
    "answer_tokens_done",
    "prefill_tokens_per_s",
    "decode_base_s",
    "decode_request_s",
    "cost",
    "context_tokens",
    "chunk_tokens",
    "handover_s",
    "handover_token_s",
    "kv_bytes_sent",
    "kv_bytes_received",
    "kv_loads_failed",
    "leftovers",
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ModeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /tetri/v1/mode`."""

    mode: Mode


class LeaveOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /tetri/v1/instances/{id}/leave`, all of it optional."""

    force: bool = False
    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DEADLINE_S)] | None = None


class FlipOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /tetri/v1/instances/{id}/flip`."""

    role: Role
    now: bool = False
    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_DEADLINE_S)] | None = DEADLINE_S
    force: bool = False
    reason: Annotated[str, msgspec.Meta(max_length=200)] = "ordered"


_log = logging.getLogger(__name__)


def build_app(
    scheduler: GlobalScheduler, *, keys: Keys | None = None, limits: Limits | None = None
) -> web.Application:
    """The application around a scheduler, which it starts and closes. For a `Listener`.

    Args:
        keys: Who may ask; None lets everybody in.
    """
    inflow = Inflow(limits or Limits())
    door = _Door(scheduler, inflow)
    app = web.Application(middlewares=[_shape_errors, _guard(keys or Keys(), inflow)])
    app.router.add_post(CHAT, door.generate)
    app.router.add_post(COMPLETIONS, door.generate)
    app.router.add_get("/v1/models", door.models)
    app.router.add_get("/health", door.health)
    app.router.add_get("/ping", door.health)
    app.router.add_post("/ping", door.health)
    app.router.add_get("/metrics", door.metrics)
    app.router.add_get("/tetri/v1/instances", door.instances)
    app.router.add_post("/tetri/v1/instances/{id}/leave", door.leave)
    app.router.add_post("/tetri/v1/instances/{id}/flip", door.flip)
    app.router.add_get("/tetri/v1/requests", door.requests)
    app.router.add_get("/tetri/v1/mode", door.mode)
    app.router.add_post("/tetri/v1/mode", door.set_mode)
    add_whole_routes(app.router, Passthrough(scheduler, inflow))

    async def start(_: web.Application) -> None:
        await scheduler.start()

    async def close(_: web.Application) -> None:
        await scheduler.close()

    app.on_startup.append(start)
    app.on_cleanup.append(close)
    return app


class _Door:
    def __init__(self, scheduler: GlobalScheduler, inflow: Inflow) -> None:
        self._scheduler = scheduler
        self._inflow = inflow

    async def generate(self, request: web.Request) -> web.StreamResponse:
        party = request[VISIT].party
        self._scheduler.shares.check_room(party)  # before the body comes
        raw = await self._inflow.read(request)
        call = parse_call(request.path, raw, request.headers, party=party)
        return await self._scheduler.serve(call, request)

    async def models(self, _: web.Request) -> web.Response:
        data = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm-tetri",
                "root": info.models[0],
                "parent": None,
                "max_model_len": info.max_model_len,
            }
            for name, info in sorted(self._scheduler.models().items())
        ]
        return _json({"object": "list", "data": data})

    async def health(self, _: web.Request) -> web.Response:
        if not self._scheduler.models():
            raise Refusal(503, "no instance is ready")
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._scheduler.metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def instances(self, _: web.Request) -> web.Response:
        monitor = self._scheduler.monitor
        workers = self._scheduler.table.workers()
        rows = [_plain_instance(each, workers[each.info.id]) for each in monitor.view().instances]
        answer = {"instances": rows, "departed": monitor.departed}
        watcher = self._scheduler.flips.newest.explanation
        return _json({**answer, "watcher": watcher, "mode": self._scheduler.mode})

    async def leave(self, request: web.Request) -> web.Response:
        name = InstanceId(request.match_info["id"])
        raw = await self._inflow.read(request)
        order = decode_order(raw or b"{}", LeaveOrder, "order to leave")
        self._scheduler.leave(name, force=order.force, deadline_s=order.deadline_s)
        return _json({"id": name, "state": InstanceState.LEAVING}, status=202)

    async def flip(self, request: web.Request) -> web.Response:
        name = InstanceId(request.match_info["id"])
        order = decode_order(await self._inflow.read(request), FlipOrder, "order to flip")
        ordered = self._scheduler.flips.order(
            name,
            order.role,
            is_now=order.now,
            deadline_s=order.deadline_s,
            force=order.force,
            reason=order.reason,
        )
        one = self._scheduler.monitor.view_of(name)
        state = one.state if one is not None else InstanceState.SILENT
        flip = one.flip if one is not None else None
        is_under_way = ordered.is_new or (flip is not None and flip.is_under_way)
        said = {
            "id": name,
            "role": order.role,
            "epoch": ordered.epoch,
            "state": state,
            "is_new": ordered.is_new,
            "is_under_way": is_under_way,
        }
        return _json(said, status=202 if is_under_way else 200)

    async def mode(self, _: web.Request) -> web.Response:
        return _json({"mode": self._scheduler.mode})

    async def set_mode(self, request: web.Request) -> web.Response:
        order = decode_order(await self._inflow.read(request), ModeOrder, "mode")
        self._scheduler.set_mode(order.mode)
        return _json({"mode": self._scheduler.mode})

    async def requests(self, _: web.Request) -> web.Response:
        return _json(self._scheduler.table.plain(time.monotonic()))


@web.middleware
async def _shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        return refusal.response()
    except web.HTTPException as error:
        if error.status < 400:
            raise
        words = f"{request.method} {request.path}: {error.reason}"
        answer = Refusal(error.status, words).response()
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except ConnectionResetError:
        return web.Response(status=499)  # the client left; nobody reads this
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        return Refusal(500, "the router failed; its log says why").response()


def _guard(keys: Keys, inflow: Inflow) -> Middleware:
    """Lets in who may ask, and what is not too much."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        visit = request[VISIT] = Visit(keys.party_of(request.path, request.headers))
        inflow.expect(request)
        try:
            return await handler(request)
        finally:
            inflow.let_go(visit)

    return guard


def _plain_instance(each: InstanceView, in_flight: int) -> dict[str, Any]:
    load = asdict(each.load)
    return {
        "id": each.info.id,
        "url": each.info.url,
        "role": each.info.role,
        "state": each.state,
        "age_s": round(each.age_s, 3),
        **{name: load[name] for name in _DOCUMENTED},
        "seq": each.seq,
        "in_flight": in_flight,
        **{name: load[name] for name in _OTHERS},
        "flip": None if each.flip is None else _plain_flip(each.flip),
    }


def _plain_flip(flip: Flip) -> dict[str, Any]:
    plain = asdict(flip)
    return {**plain, "age_s": round(flip.age_s, 3)}


def _json(value: object, *, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(status=status, body=body, content_type="application/json")
