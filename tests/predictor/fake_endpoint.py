"""An OpenAI endpoint that answers every prompt with as many tokens as it has letters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

REFUSED = "refuse me"
HANGS = "hang"


class FakeEndpoint:
    """Runs in a thread of its own.

    Attributes:
        asked: Bodies of the requests for an answer, in order.
        failures: So many requests are answered with 503 first.
        is_gone: Every request is answered with 503.
        has_template: Whether it knows /tokenize and /detokenize, as vLLM does.
        hung: Set when a prompt that asks for it hangs.
    """

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.failures = 0
        self.is_gone = False
        self.has_template = True
        self.hung = threading.Event()
        self.may_go = threading.Event()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        return app

    def prompts(self) -> list[str]:
        return [_prompt(body) for body in self.asked]

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if self.is_gone or self.failures > 0:
            self.failures -= 1
            return web.Response(status=503, text="busy")
        prompt = _prompt(body)
        if prompt == REFUSED:
            return web.Response(status=400, text="too long")
        if prompt.startswith(HANGS):
            self.hung.set()
            while not self.may_go.is_set():
                await asyncio.sleep(0.01)
        tokens = min(len(prompt), body["max_tokens"])
        finish = "stop" if tokens == len(prompt) else "length"
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        return web.json_response({"usage": usage, "choices": [{"finish_reason": finish}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.has_template:
            return web.Response(status=404)
        text = (await request.json())["messages"][0]["content"]
        return web.json_response({"tokens": list(f"<user>{text}<end>".encode())})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await request.json())["tokens"]
        return web.json_response({"prompt": bytes(tokens).decode()})


@contextmanager
def running() -> Iterator[FakeEndpoint]:
    """An endpoint that listens; it is gone afterwards."""
    fake = FakeEndpoint()
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(fake.app())

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake
    finally:
        fake.may_go.set()
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(timeout=10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
        loop.close()


def _prompt(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"] if "messages" in body else body["prompt"])
