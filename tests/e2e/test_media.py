"""A multimodal model, whose prompts hold images and whose positions have three dimensions.

The cluster is this module's own: a prefill and a decode instance.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from examples.benchmarks.faults import send
from tests.e2e.client import Answer, ask, ask_all, until
from tests.e2e.cluster import MODEL, Cluster, Stock, side_by_side
from tests.e2e.prompts import STREAM, completion, text_prompt
from tests.tiny_vision import MOST_TOKENS, linked, picture, png, tiny_vision

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

LIMITS = ("--limit-mm-per-prompt", '{"image": 3}', "--scheduling-policy", "priority")
ENCODED = "encoder inputs: "  # in the lines that vLLM logs of its steps


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stock, Cluster]]:
    folder, model = tmp_path_factory.mktemp("media"), tiny_vision()
    cluster = Cluster(model, folder, serve=LIMITS)
    with side_by_side(Stock(model, folder, serve=LIMITS), cluster) as started:
        yield started


def asked(*content: Any, **options: Any) -> dict[str, Any]:
    """A chat request: text, and parts that are not text."""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    usual = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, "messages": [{"role": "user", "content": parts}], **usual, **options}


LONG = text_prompt(150)
ONE = [asked(picture(1), "what is it"), asked(picture(2), "what is it")]
WIDE_AND_HIGH = [asked(picture(1, 6, 2), "so?"), asked(picture(1, 2, 6), "so?")]
BODIES = [
    *ONE,
    *WIDE_AND_HIGH,
    asked("no image"),
    completion(200),
    asked("first", picture(1), "then", picture(2), "and?"),
    asked("first", picture(2), "then", picture(1), "and?"),
    asked(picture(3), picture(3), picture(3)),
    asked(LONG, picture(4, 12, 8), LONG, **STREAM),
    asked(LONG, picture(5, 12, 8), LONG, picture(6), LONG, logprobs=True),
    asked(picture(7, 12, 8), "sampled", temperature=0.9, seed=3, **STREAM),
    asked(picture(8), "plain", return_token_ids=False, **STREAM),
]


def num_encoded(cluster: Cluster, name: str) -> int:
    """The steps of an instance that ran the encoder."""
    return (cluster.logs / f"{name}.log").read_text(errors="replace").count(ENCODED)


async def test_split_requests_equal_stock_and_the_decode_instance_encodes_nothing(
    both: tuple[Stock, Cluster],
) -> None:
    stock, cluster = both
    assert MOST_TOKENS > 64  # an image is divided among steps
    expected = [await ask(stock.url, body) for body in BODIES]
    alone = [await ask(cluster.url, body) for body in BODIES]
    together = await ask_all(cluster.url, [*BODIES, *BODIES[::-1]])
    for ours, theirs in zip(
        [*alone, *together], [*expected, *expected, *expected[::-1]], strict=True
    ):
        assert ours.same_as(theirs), f"{ours} != {theirs}"
        assert (ours.headers["x-tetri-prefill"], ours.decode) == ("prefill-0", "decode-0")
    outputs = {tuple(each.token_ids) or each.text for each in expected}
    assert len(outputs) == len(BODIES)  # every image, size and order matters
    cluster.rest()
    decode = cluster.instances()["decode-0"]
    assert decode["kv_loads_failed"] == 0
    assert num_encoded(cluster, "prefill-0") > 0
    assert num_encoded(cluster, "decode-0") == 0


# -- media that cannot be had ----------------------------------------------------


class Files(BaseHTTPRequestHandler):
    """Images by their number; `/changing` is another one every time."""

    num_served = 0

    def do_GET(self) -> None:
        Files.num_served += 1
        name = self.path.removeprefix("/")
        number = Files.num_served if name == "changing" else int(name)
        body, status = png(number, 4, 2 + number % 3), 200 if number else 404
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def test_bad_media_are_answered_as_by_stock(both: tuple[Stock, Cluster], files: str) -> None:
    stock, cluster = both
    bad = {
        "not found": [linked(f"{files}/0")],
        "no server": [linked("http://127.0.0.1:9/x.png")],
        "no image": [linked("data:image/png;base64,AAAA")],
        "no base64": [linked("data:image/png;base64,%")],
        "forbidden file": [linked("file:///etc/passwd")],
        "no scheme": [linked("gopher://x/y.png")],
        "too many": [picture(seed) for seed in range(4)],
        "another kind": [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}}],
        "no kind": [{"type": "smell", "smell": "lemon"}],
        "no address": [{"type": "image_url"}],
        "too long": [LONG * 15, picture(1)],
    }
    bodies = {name: asked("what is it", *parts) for name, parts in bad.items()}
    bodies |= {f"{name}, streamed": {**body, **STREAM} for name, body in bodies.items()}
    for name, body in bodies.items():
        ours, theirs = await ask(cluster.url, body), await ask(stock.url, body)
        assert (ours.status, ours.error) == (theirs.status, theirs.error), name
        assert ours.error is not None
        assert not ours.token_ids
    cluster.rest()


async def test_an_address_whose_image_changes_never_gets_a_mixture(
    both: tuple[Stock, Cluster], files: str
) -> None:
    """The decode instance reads it again, and then computes all of the output itself."""
    stock, cluster = both
    failed = cluster.instances()["decode-0"]["kv_loads_failed"]
    for options in (
        {},
        STREAM,
        {**STREAM, "logprobs": True},
        {"n": 2, "temperature": 0.8, "seed": 3},
    ):
        before = Files.num_served
        ours = await ask(cluster.url, asked("what is it", linked(f"{files}/changing"), **options))
        assert (ours.decode, Files.num_served) == ("decode-0", before + 2)
        newest = asked("what is it", linked(f"{files}/{Files.num_served}"), **options)
        assert ours.same_as(await ask(stock.url, newest))

    def are_counted() -> bool:  # one for each choice
        return bool(cluster.instances()["decode-0"]["kv_loads_failed"] == failed + 5)

    await until(are_counted, "no KV was loaded")
    cluster.rest()


# -- a killed instance; the last test, since it is not waited for -----------------


@pytest.mark.long
async def test_another_instance_continues_a_stream_with_an_image(
    both: tuple[Stock, Cluster], files: str
) -> None:
    stock, cluster = both
    cluster.audit()
    long = {**STREAM, "max_tokens": 500}
    bodies = [
        asked("what is it", picture(1, 12, 8), **long),
        asked(picture(2), "and", picture(3), "what", temperature=0.9, seed=5, **long),
        asked("what is it", linked(f"{files}/4"), **long),
        completion(90, **long),
    ]
    expected = [await ask(stock.url, body) for body in bodies]
    answers = [Answer() for _ in bodies]
    asking = [
        asyncio.create_task(ask(cluster.url, body, answer))
        for body, answer in zip(bodies, answers, strict=True)
    ]
    await until(lambda: all(len(each.token_ids) > 20 for each in answers), "all are under way")
    assert all(len(each.token_ids) < 450 for each in answers)
    send(cluster.processes("decode-0"), signal.SIGKILL)
    for ours, theirs in zip(await asyncio.gather(*asking), expected, strict=True):
        assert ours.same_as(theirs), f"{ours} != {theirs}"
