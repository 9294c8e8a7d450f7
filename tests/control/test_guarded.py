"""Who may speak on the control channel when a secret guards it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import zmq

from tests.control.channel import INFO, eventually, joined, monitor, states
from vllm_tetri import messages
from vllm_tetri.messages import Hello
from vllm_tetri.security import Curve, Secret

OURS, OTHER = Secret(bytes(range(32))), Secret(bytes(range(1, 33)))
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.mark.parametrize(
    ("here", "there"), [(OURS, OTHER), (OURS, None), (None, OURS)], ids=["other", "none", "open"]
)
async def test_who_does_not_is_not_heard(
    here: Secret | None, there: Secret | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither end takes anything from the other, and the instance's log says why."""
    async with monitor(secret=here) as router, joined(router.address, secret=there) as one:
        with caplog.at_level(logging.WARNING):
            await eventually(lambda: "refuse each other" in caplog.text)
        assert "--tetri-secret-file" in caplog.text
        await eventually(lambda: router.counters.dropped > 0)
        assert router.address in caplog.text
        assert states(router) == {}
        assert router.counters.received == {}
        assert one.view.instances == ()


async def test_an_instance_that_no_router_answers_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_tetri.control.agent._UNHEARD_S", 0.05)
    caplog.set_level(logging.INFO)
    async with joined("tcp://127.0.0.1:1"):
        await eventually(lambda: "no router at tcp://127.0.0.1:1 has answered" in caplog.text)

    def unknown(_: str) -> tuple[str, ...]:
        raise OSError

    monkeypatch.setattr("vllm_tetri.control.links.addresses_of", unknown)
    monkeypatch.setattr("vllm_tetri.control.agent.require_guarded", lambda *_, **__: None)
    caplog.set_level(logging.WARNING)
    async with joined("tcp://nowhere.example:1"):
        await eventually(lambda: "no router at tcp://nowhere.example:1 has" in caplog.text)


def with_a_key_of_its_own(dealer: zmq.Socket[bytes]) -> None:
    Curve(OURS).call(dealer)
    mine, my_private = zmq.curve_keypair()
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, mine)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, my_private)


async def test_the_routers_key_is_not_enough() -> None:
    async with monitor(secret=OURS) as router:
        async with calling(router.address, with_a_key_of_its_own):
            await eventually(lambda: router.counters.dropped > 0)
            assert router.counters.received == {}
        async with calling(router.address, Curve(OURS).call):  # the right keys are
            await eventually(lambda: states(router) == {"i": "starting"})


@asynccontextmanager
async def calling(
    address: str, guard: Callable[[zmq.Socket[bytes]], None]
) -> AsyncIterator[zmq.Socket[bytes]]:
    """A peer by hand that says `Hello` as soon as it can."""
    context: Context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        guard(dealer)
        dealer.connect(address)
        dealer.send(messages.encode(Hello(INFO)))
        yield dealer
    finally:
        context.destroy(linger=0)


def test_without_a_gatekeeper_every_connection_is_refused() -> None:
    """The guard fails closed."""
    context: Context = zmq.Context()
    try:
        curve = Curve(OURS)
        listener, caller = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        curve.listen(listener)
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        events = caller.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        curve.call(caller)
        caller.connect(f"tcp://127.0.0.1:{port}")
        assert events.poll(10_000)
        number = int.from_bytes(events.recv_multipart()[0][:2], "little")
        assert number != zmq.EVENT_HANDSHAKE_SUCCEEDED
    finally:
        context.destroy(linger=0)


async def test_with_a_secret_any_address_will_do() -> None:
    async with monitor("tcp://0.0.0.0:0", secret=OURS) as router:
        port = router.address.rpartition(":")[2]
        async with joined(f"tcp://127.0.0.1:{port}", secret=OURS):
            await eventually(lambda: states(router))
