"""An instance or router dies: within a second nothing of its requests is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from tests.engine.harness import Engine
from tests.engine.pair import CHUNK, Pair, prompt
from tests.eventually import eventually
from tests.transport.children import receiving
from vllm_tetri.engine.step import FirstTokens, encode_note
from vllm_tetri.handover import PriorOutput
from vllm_tetri.messages import CancelTransfer
from vllm_tetri.transport import native
from vllm_tetri.transport.segments import SHARED_MEMORY
from vllm_tetri.types import Role, TransferId

SOON_S = 10.0  # the timeouts are 600 s
ROUTER = "t-r"  # whose transfers are those of requests r/...


@pytest.fixture(params=["shm", "tcp"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Timeouts are far away: nothing here may need them."""
    pair = Pair(
        tmp_path,
        link=request.param,
        arena_bytes=1 << 20,
        transfer_timeout_s=600.0,
        hold_timeout_s=600.0,
    )
    yield pair
    pair.close()


@contextmanager
def soon(engine: Engine) -> Iterator[None]:
    """What happens leaves the engine at rest within the promised time."""
    start_s = time.monotonic()
    yield
    engine.run_until(lambda: engine.is_at_rest)
    assert time.monotonic() - start_s < SOON_S


def sees(engine: Engine, endpoint: str) -> None:
    """Let an engine's peers be at another address."""
    agent = engine.endpoint.agent
    snapshot = agent.snapshot()
    others = tuple(
        replace(each, info=replace(each.info, kv_endpoint=endpoint))
        for each in snapshot.view.instances
    )
    changed = snapshot._replace(view=replace(snapshot.view, instances=others))
    agent.snapshot = lambda: changed


def used_bytes(engine: Engine) -> int:
    return int(engine.endpoint.receiver.stats().arena_used_bytes)


def open_slot(pair: Pair, name: str, tokens: list[int], link: str) -> tuple[Any, Any]:
    """A sender that begins to fill a slot of the decode instance, and its transfer."""
    num_bytes = pair.decode.mover.layout.block_bytes
    sender = native.Sender(identity={"model": "harness"}, links=[link])
    num_blocks = -(-len(tokens) // 16)
    transfer = sender.open(pair.decode.info.kv_endpoint, name, num_blocks, num_bytes)
    while transfer.state is native.TransferState.OPENING:
        sender.wait(0.01)
    page = np.zeros((1, num_bytes), np.uint8)
    one = np.ones(1, np.uint64)
    layout = native.Layout(page.ctypes.data * one, num_bytes * one, num_bytes * one, 1, page)
    transfer.write(layout, 0, np.zeros(1, np.int32))
    return sender, transfer


@pytest.mark.parametrize("is_all_there", [False, True])
def test_a_decode_instance_is_killed_while_kv_travels_to_it_or_afterwards(
    pair: Pair, is_all_there: bool
) -> None:
    with receiving({"model": "harness"}) as (there, endpoint):
        sees(pair.prefill, endpoint)
        pair.send("a", prompt(8 * CHUNK))
        for _ in range(4):
            pair.prefill.step()
        assert pair.prefill.kv_worker.sending
        if is_all_there:
            pair.prefill.run_until(lambda: "a" in pair.prefill.finished)
        there.kill()
        pair.prefill.run_until(lambda: "a" in pair.prefill.finished)
        with soon(pair.prefill):
            pass


@pytest.mark.parametrize("is_early", [False, True])
def test_a_prefill_instance_dies_after_its_first_blocks(pair: Pair, is_early: bool) -> None:
    """The request that waits for them computes its prompt itself, at once."""
    tokens = prompt(100)
    link = pair.prefill.endpoint.config.link
    sender, _ = open_slot(pair, "t-a", tokens, link)
    request = pair.receive("a", tokens, is_early=is_early)
    pair.decode.step()
    assert used_bytes(pair.decode) > 0
    start_s = time.monotonic()
    sender.close()
    pair.decode.run_until(lambda: "a" in pair.decode.outputs)
    assert time.monotonic() - start_s < SOON_S
    assert pair.decode.holds(request, len(tokens))
    pair.decode.run_until(lambda: "a" in pair.decode.finished)
    with soon(pair.decode):
        pass


def test_a_prefill_instance_dies_and_no_request_waits_for_its_kv(pair: Pair) -> None:
    sender, _ = open_slot(pair, "t-a", prompt(100), pair.prefill.endpoint.config.link)
    assert used_bytes(pair.decode) > 0
    with soon(pair.decode):
        sender.close()


def test_a_router_dies_before_it_sent_the_decode_request(pair: Pair) -> None:
    tokens = prompt(100)
    prefilled = pair.sent("r/a", tokens)
    pair.decode.endpoint.abandon("t-s")  # another one
    assert used_bytes(pair.decode) > 0
    with soon(pair.decode):
        pair.decode.endpoint.abandon(ROUTER)
        assert used_bytes(pair.decode) == 0
    # It was not dead, only its connection: a request that comes now is computed at once.
    start_s = time.monotonic()
    pair.decoding("r/a", tokens, digest=prefilled.digest)
    assert time.monotonic() - start_s < SOON_S
    pair.decode.run_until(lambda: "r/a" in pair.decode.finished)
    pair.settle()


def test_a_router_dies_and_requests_that_have_begun_stay(pair: Pair) -> None:
    """Its request is here: it is for the client's connection to end it."""
    tokens = prompt(100)
    request = pair.receive("r/a", tokens)
    pair.sent("r/a", tokens)
    pair.decode.endpoint.abandon(ROUTER)
    pair.decode.run_until(lambda: "r/a" in pair.decode.outputs)
    assert pair.decode.endpoint.receives.loads_done == 1
    assert pair.decode.holds(request, len(tokens))
    pair.decode.run_until(lambda: "r/a" in pair.decode.finished)
    pair.settle()


def test_a_router_dies_while_the_arena_is_full(pair: Pair) -> None:
    blocks = (
        pair.decode.endpoint.receiver.stats().arena_total_bytes
        // pair.decode.mover.layout.block_bytes
    )
    sender, _ = open_slot(pair, "full", [0] * (16 * blocks), pair.prefill.endpoint.config.link)
    pair.send("r/a", prompt(100))
    pair.prefilled("r/a")
    pair.prefill.endpoint.abandon("t-s")  # another one
    for _ in range(10):
        pair.prefill.step()
    assert not pair.prefill.is_at_rest  # it tries again and again
    with soon(pair.prefill):
        pair.prefill.endpoint.abandon(ROUTER)
    sender.close()
    pair.settle()


def test_first_tokens_without_a_request_are_forgotten(pair: Pair) -> None:
    receives = pair.decode.endpoint.receives
    note = encode_note(FirstTokens("t-a", PriorOutput([5])))
    worker = pair.prefill.kv_worker
    worker.send_note(pair.decode.info.kv_endpoint, note)
    eventually(lambda: receives.tidy() or "t-a" in receives.outputs)
    pair.decode.endpoint.take(CancelTransfer(TransferId("t-a")))
    assert "t-a" not in receives.outputs
    worker.send_note(pair.decode.info.kv_endpoint, note)  # once more, after the cancel
    worker.send_note(
        pair.decode.info.kv_endpoint, encode_note(FirstTokens("t-b", PriorOutput([5])))
    )
    eventually(lambda: receives.tidy() or "t-b" in receives.outputs)
    assert "t-a" not in receives.outputs


def test_an_instance_that_starts_removes_arenas_without_an_owner(tmp_path: Path) -> None:
    abandoned = SHARED_MEMORY / f"tetri-{uuid4().hex}"
    abandoned.touch()
    try:
        with closing(Engine(tmp_path, Role.DECODE, arena_bytes=1 << 20)):
            assert not abandoned.exists()
    finally:
        abandoned.unlink(missing_ok=True)
