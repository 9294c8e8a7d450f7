"""Thousands of wrong requests: each gets an answer that says so, and the next one is served."""

from __future__ import annotations

import asyncio
import json
import logging
from random import Random
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.fakes import Cluster, FakeInstance, cluster, eventually, info_of
from tests.router.mutate import FIELDS, VALUES, request
from tests.router.raw import Answer, connected, exchange, post, read_answer
from vllm_tetri.handover import DecodeParams, PrefillParams
from vllm_tetri.router.auth import Limits
from vllm_tetri.router.errors import Refusal
from vllm_tetri.router.request import parse_request
from vllm_tetri.types import RequestId, Role, TransferId

AT_A_TIME = 32
# What the router itself may say; 500 is none of it.
STATUSES = {200, 202, 400, 401, 404, 405, 408, 409, 413, 414, 417, 431, 501}
LIMITS = Limits(head_s=0.3, body_s=0.3, idle_s=0.5, stalled_s=1.0)


class Tolerant(FakeInstance):
    """Answers whatever it is asked, as an engine would."""

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read() or b"{}")
            assert isinstance(body, dict)
            return await self.answer(request, body)
        except (ValueError, AssertionError, RecursionError):
            error = {"message": "m", "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": error}, status=400)


def instances() -> tuple[Tolerant, Tolerant, Tolerant]:
    pair = Tolerant("p", Role.PREFILL, decode="d"), Tolerant("d", Role.DECODE)
    return *pair, Tolerant("b", Role.BOTH)


def check(sent: bytes, answer: Answer) -> None:
    assert answer.status in STATUSES or not answer.status, (sent, answer)
    is_head = sent.lstrip(b"\r\n").startswith(b"HEAD ")
    if answer.status >= 400 and not is_head:
        assert answer.error["message"], (sent, answer)


async def send(made: Cluster, sent: bytes) -> int:
    """Send these bytes on a connection of their own; return the status of the first response."""
    is_head = sent.lstrip(b"\r\n").startswith(b"HEAD ")
    async with connected(made) as (reader, writer):
        writer.write(sent)
        try:
            answer = await read_answer(reader, has_body=not is_head)
        except TimeoutError:
            raise AssertionError(f"no answer to {sent!r}") from None
        check(sent, answer)
        return answer.status


async def pelt(count: int, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = Random(seed)
    async with cluster(*instances(), limits=LIMITS) as made:
        assert (await made.ask())[0] == 200
        await made.client.close()
        await eventually(lambda: len(made.listener.connections) == 0)
        num_tasks = len(asyncio.all_tasks())
        statuses: list[int] = []
        while len(statuses) < count:
            sent = [request(rng) for _ in range(AT_A_TIME)]
            statuses += await asyncio.gather(*(send(made, each) for each in sent))
            good = await exchange(made, post(b'{"model":"tiny","prompt":"hello"}'))
            assert good.status == 200, good
        await eventually(lambda: len(made.listener.connections) == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)
        assert len(made.scheduler.table) == 0
        for name in ("p", "d", "b"):
            assert made.state(name) == "ready"
    # It was no use if all were refused at the door, or none.
    assert statuses.count(200) > count // 20
    assert statuses.count(400) > count // 20
    assert statuses.count(0) < count // 20
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert not errors, errors[0].getMessage()


async def test_hundreds_of_mutated_requests(caplog: pytest.LogCaptureFixture) -> None:
    await pelt(640, 1, caplog)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_ten_thousand_mutated_requests(caplog: pytest.LogCaptureFixture) -> None:
    await pelt(10_000, 2, caplog)


INSTANCE = info_of("d", Role.DECODE)
json_values = st.recursive(
    st.sampled_from(VALUES) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=8)


@given(bodies, st.sampled_from(("/v1/completions", "/v1/chat/completions", "/v1/embeddings")))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_json_is_a_call_that_can_be_written_again_or_a_refusal(
    body: dict[str, Any], path: str
) -> None:
    try:
        raw = json.dumps(body, allow_nan=False).encode()
    except ValueError:
        return
    try:
        call = parse_request(path, raw, {})
    except Refusal as refusal:
        problem: Refusal | None = refusal
    else:
        problem = None
    if problem is not None:
        assert problem.status in (400, 413)
        assert json.loads(problem.body())["error"]["message"]
        return
    kept = json.loads(call.raw)
    assert not isinstance(kept.get("kv_transfer_params"), dict)
    for written in (
        ()
        if not call.is_splittable
        else (
            call.prefill_body(PrefillParams(TransferId("t"), RequestId("r"))),
            call.decode_body(DecodeParams(TransferId("t"), "d"), [1, 2], INSTANCE),
        )
    ):
        assert "kv_transfer_params" in json.loads(written)
    assert call.approx_tokens >= 0
    assert call.num_choices >= 1


async def test_a_request_that_is_cut_anywhere_is_answered_or_dropped() -> None:
    async with cluster(*instances(), limits=LIMITS) as made:
        whole = post(b'{"model":"tiny","prompt":"hello"}')
        cuts = range(0, len(whole), 3)
        found = await asyncio.gather(*(send(made, whole[:end]) for end in cuts))
        assert set(found) <= {0, 400, 408}
        await eventually(lambda: len(made.scheduler.table) == 0)
        assert (await exchange(made, whole)).status == 200
