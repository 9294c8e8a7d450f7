"""Whatever an instance answers, its router goes on."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from tests.router.fakes import FakeInstance, cluster
from vllm_tetri.types import Role

BYTES = (b"\xff\xfe", b"[" * 5000, b'{"error": "\xbd"}', b"{", b"", b"null", b'{"error": []}')


@pytest.mark.parametrize("status", [200, 400, 404, 500, 503])
@pytest.mark.parametrize("role", list(Role))
async def test_an_answer_may_be_any_bytes(status: int, role: Role) -> None:
    said = b""

    async def say(*_: Any) -> web.StreamResponse:
        return web.Response(status=status, body=said, content_type="application/json")

    async def stream(_: FakeInstance, request: web.Request, __: Any) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: " + said + b"\n\n")
        return answer

    one = FakeInstance("x", role, decode="d")
    pair = (one, FakeInstance("d", Role.DECODE)) if role is Role.PREFILL else (one,)
    async with cluster(*pair) as made:
        for said in BYTES:
            for handler in (say, stream):
                for path in ("/v1/completions", "/v1/embeddings"):
                    one.handler = handler
                    body = {"model": "tiny", "prompt": "x", "stream": True}
                    async with made.client.post(made.url + path, json=body) as response:
                        answer = await response.read()
                    # 500 may come from the instance; never is it the router's own.
                    assert b"its log says why" not in answer, (said, path)
        one.handler = None
        assert (await made.ask())[0] == 200
        assert await made.table() == []
