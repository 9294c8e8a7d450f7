"""An OpenAI server without a model."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web


class Fake:
    """An OpenAI server that answers with tokens at once, or as it is told."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refuse = 0
        self.last_words = (
            'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
        )

    async def complete(self, asked: web.Request) -> web.StreamResponse:
        body = await asked.json()
        self.bodies.append(body)
        if self.refuse:
            self.refuse -= 1
            return web.json_response({"error": "busy"}, status=503)
        answer = web.StreamResponse()
        await answer.prepare(asked)
        for _ in range(body["max_tokens"]):
            text = json.dumps({"choices": [{"text": "\ndata: {x"}]})
            await answer.write(f"data: {text}\n\n".encode())
        await answer.write(self.last_words.replace("%d", str(body["max_tokens"])).encode())
        await answer.write_eof()
        return answer

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"
