"""ASGI middleware of an instance's API server.

Tells who answers: `GET /tetri/v1/instance`, and an `x-tetri-instance` header on
every response, so that a router (or a person) can check that a port belongs to
the instance they mean.
"""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import vllm_tetri
from vllm_tetri.config import decode_config
from vllm_tetri.engine.roles import CONFIG_KEY

PATH = "/tetri/v1/instance"


class TetriMiddleware:
    """Pure ASGI: adds nothing to streamed bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._who: dict[str, str] = {}  # read from the first request's application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._who:
            extra = scope["app"].state.args.kv_transfer_config.kv_connector_extra_config
            instance = decode_config(extra[CONFIG_KEY]).instance
            self._who = {"id": instance, "version": vllm_tetri.__version__}
        if scope["path"] == PATH:
            await JSONResponse(self._who)(scope, receive, send)
            return
        header = (b"x-tetri-instance", self._who["id"].encode())

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), header]
            await send(message)

        await self._app(scope, receive, send_with_header)
