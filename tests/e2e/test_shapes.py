"""Whatever a client asks for, the cluster says what one stock instance says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Stock
from tests.e2e.compare import Reply, ask_raw, difference, event_keys, merged, role_events, stripped
from tests.e2e.prompts import token_prompt
from tests.e2e.shapes import BOTH, SHAPES, WRONG, Plain, Shape, body_of, plain_body

pytestmark = pytest.mark.e2e


def cases_of(number: int, shape: Shape) -> list[Any]:
    """All cases of a shape: one is quick, the next one slow, the others long; which ones these
    are changes from shape to shape."""
    forms = [(kind, stream) for kind in shape.kinds for stream in shape.streams]
    marks = {0: [], 1: [pytest.mark.slow]}
    return [
        pytest.param(
            shape,
            kind,
            stream,
            id=f"{shape.name}-{kind}{'-streamed' if stream else ''}",
            marks=marks.get((index - number) % len(forms), [pytest.mark.long]),
        )
        for index, (kind, stream) in enumerate(forms)
    ]


CASES = [case for number, shape in enumerate((*SHAPES, *WRONG)) for case in cases_of(number, shape)]

_plain: dict[str, Plain] = {}


async def plain_answer(stock: Stock, kind: str) -> Plain:
    """What stock says to the plain request, as tokens."""
    if kind not in _plain:
        logprobs = {"logprobs": True} if kind == "chat" else {"logprobs": 0}
        body = {**plain_body(kind), **logprobs, "return_token_ids": True}
        (choice,) = (await ask_raw(stock.url, kind, body)).json["choices"]
        said = choice["logprobs"]
        pieces = [each["token"] for each in said["content"]] if kind == "chat" else said["tokens"]
        assert len(pieces) == body["max_tokens"]
        _plain[kind] = Plain(choice["token_ids"], pieces)
    return _plain[kind]


async def test_the_model_says_many_things(stock: Stock) -> None:
    """Else equal answers would mean little."""
    for kind in BOTH:
        plain = await plain_answer(stock, kind)
        assert len(set(plain.token_ids)) >= 6, plain
        assert all(plain.pieces[:6]), plain


@pytest.mark.parametrize(("shape", "kind", "stream"), CASES)
async def test_equal_to_stock(
    stock: Stock, cluster: Cluster, shape: Shape, kind: str, stream: bool
) -> None:
    body = body_of(shape, kind, stream, await plain_answer(stock, kind))
    theirs, ours = await asyncio.gather(
        ask_raw(stock.url, kind, body), ask_raw(cluster.url, kind, body)
    )
    if shape.status != 200:
        assert theirs.status != 200 or theirs.is_stream, theirs.raw
        assert_equal_errors(ours, theirs, shape.status)
        return
    assert (theirs.status, theirs.is_stream) == (200, stream), theirs.raw
    assert (ours.status, ours.content_type) == (200, theirs.content_type), ours.raw
    said = merged(theirs)
    assert shape.check(said), f"the shape is not about what it says: {said}"
    assert not difference(merged(ours), said), (body, ours.raw, theirs.raw)
    if stream:
        mine, other = event_keys(ours.events), event_keys(theirs.events)
        assert {about: mine[about] for about in mine.keys() & other} == {
            about: other[about] for about in mine.keys() & other
        }
        assert mine.keys() ^ other.keys() <= {"text"}
        assert role_events(ours.events) == role_events(theirs.events)
    else:
        assert not difference(stripped(ours.json), stripped(theirs.json))
    if shape.is_split is not None:
        assert shape.is_split == (ours.headers["x-tetri-prefill"] == "prefill-0")


def assert_equal_errors(ours: Reply, theirs: Reply, status: int) -> None:
    """The same status, and the same words; or an event, if the engine itself refused."""
    assert (ours.content_type, ours.status) == (theirs.content_type, theirs.status), ours.raw
    if theirs.is_stream:
        assert ours.events == theirs.events
        return
    assert theirs.status == status
    mine, other = ours.json["error"], theirs.json["error"]
    assert set(ours.json) == set(theirs.json)
    assert set(mine) == set(other)
    if status == 404:  # the router says it itself, with words of its own
        assert (mine["type"], mine["code"]) == (other["type"], other["code"])
    else:
        assert mine == other


async def test_a_decode_request_that_is_refused_leaves_nothing(cluster: Cluster) -> None:
    """Greedy choices: the prefill request has one, so only the decode instance complains."""
    for number in range(30):
        body = {**plain_body("completion"), "prompt": token_prompt(100 + 7 * number), "n": 2}
        reply = await ask_raw(cluster.url, "completion", {**body, "stream": number % 2 == 0})
        assert reply.status == 400
    cluster.rest()


async def test_an_id_that_the_client_chose_is_in_every_answer(
    stock: Stock, cluster: Cluster
) -> None:
    for kind, prefix in (("chat", "chatcmpl-"), ("completion", "cmpl-")):
        for stream in (False, True):
            for body, headers in (
                ({}, {"X-Request-Id": f"mine-{stream}"}),
                ({"request_id": f"mine-{stream}"}, {}),
            ):
                asked = {**plain_body(kind), "stream": stream, **body}
                for url in (stock.url, cluster.url):
                    reply = await ask_raw(url, kind, asked, headers)
                    parts: list[Any] = reply.events if stream else [reply.json]
                    assert {part["id"] for part in parts} == {f"{prefix}mine-{stream}"}
                    assert len({part["created"] for part in parts}) == 1


async def test_nothing_of_the_hand_over_is_in_an_answer(cluster: Cluster) -> None:
    for kind in BOTH:
        for stream in (False, True):
            reply = await ask_raw(cluster.url, kind, {**plain_body(kind), "stream": stream})
            assert b"tetri" not in reply.raw
            for part in reply.events if stream else [reply.json]:
                assert not part.get("kv_transfer_params"), json.dumps(part)
