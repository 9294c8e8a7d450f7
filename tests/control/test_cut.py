"""A control connection across a network that is cut for long."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from tests.faults.hosts import Hosts, hosts, require_hosts
from vllm_tetri.control.links import RouterLink

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# Long enough for the kernel to wait 8 s and more between two tries to connect.
LONG_S = 20.0
ROUTER = (
    "import sys, zmq\n"
    "with zmq.Context() as context, context.socket(zmq.ROUTER) as router:\n"
    "    router.bind(sys.argv[1])\n"
    "    print('ready', flush=True)\n"
    "    sys.stdin.read()\n"
)


@pytest.fixture
def net() -> Iterator[Hosts]:
    require_hosts()
    with hosts("here", "router") as made:
        yield made


@contextmanager
def listening(net: Hosts) -> Iterator[str]:
    """A router's socket on its host: its address."""
    address = f"tcp://{net.addresses['router']}:18555"
    words = [*net.within("router"), sys.executable, "-c", ROUTER, address]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield address
        child.kill()


@contextmanager
def linked(address: str) -> Iterator[RouterLink]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = RouterLink(context, address, None, 0)
    try:
        yield link
    finally:
        link.close()
        context.term()


def seconds_until(link: RouterLink, event: int, timeout_s: float) -> float:
    begin_s = time.monotonic()
    while (left_s := begin_s + timeout_s - time.monotonic()) > 0:
        if not link.events.poll(round(left_s * 1000)):
            break
        if parse_monitor_message(link.events.recv_multipart())["event"] == event:
            return time.monotonic() - begin_s
    raise AssertionError(f"no such event in {timeout_s:g} s: {event}")


def test_a_link_is_back_within_seconds_however_long_it_was_cut(net: Hosts) -> None:
    with listening(net) as address, linked(address) as link:
        seconds_until(link, zmq.EVENT_HANDSHAKE_SUCCEEDED, 10)
        net.part("here", "router")
        cut_s = time.monotonic()
        seconds_until(link, zmq.EVENT_DISCONNECTED, 15)  # two heartbeats and their timeout
        time.sleep(max(0.0, cut_s + LONG_S - time.monotonic()))  # nothing to wait for: silence
        assert not link.send(b"report"), "nothing piles up meanwhile"
        net.mend()
        assert seconds_until(link, zmq.EVENT_HANDSHAKE_SUCCEEDED, 20) < 5
