"""Hosts reach each other, and what is cut is silent."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.eventually import eventually
from tests.faults.hosts import Hosts, hosts, why_not

ECHO = (
    "import socket, sys\n"
    "listener = socket.create_server((sys.argv[1], 7007))\n"
    "print('ready', flush=True)\n"
    "near, _ = listener.accept()\n"
    "while data := near.recv(100):\n"
    "    near.sendall(data)\n"
)


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


@contextmanager
def talking(made: Hosts) -> Iterator[socket.socket]:
    """A connection from here to an echo on `there`."""
    address = made.addresses["there"]
    words = [*made.within("there"), sys.executable, "-c", ECHO, address]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            with socket.create_connection((address, 7007), timeout=5) as near:
                near.settimeout(0.5)
                yield near
        finally:
            child.kill()


def says(near: socket.socket, words: bytes) -> bool:
    """Whether an answer comes; a connection that is reset or unreachable raises."""
    near.sendall(words)
    try:
        return near.recv(100) == words
    except TimeoutError:
        return False


@pytest.mark.parametrize("how", ["isolate", "there", "back"])
def test_what_is_cut_is_silent_and_goes_on_when_it_is_mended(how: str) -> None:
    with hosts("here", "there") as made, talking(made) as near:
        assert near.getsockname()[0] == made.addresses["here"]
        assert says(near, b"one")
        if how == "isolate":
            made.isolate("there")
        else:
            made.cut(*("here", "there") if how == "there" else ("there", "here"))
        assert not says(near, b"two")
        with pytest.raises(TimeoutError):  # and not "unreachable", which a dead wire cannot say
            socket.create_connection((made.addresses["there"], 7008), timeout=0.3)
        made.mend()
        near.settimeout(5)
        assert near.recv(100) == b"two"  # TCP has sent it again


def test_two_of_three_hosts_are_parted() -> None:
    with hosts("here", "there", "elsewhere") as made, talking(made) as near:
        made.part("there", "elsewhere")
        assert says(near, b"one")
        made.part("there", "here")
        assert not says(near, b"two")


def test_nothing_is_left_and_processes_end() -> None:
    with hosts("there") as made:
        program = "import time; print('here', flush=True); time.sleep(600)"
        words = [*made.within("there"), sys.executable, "-c", program]
        child = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline()  # before that it may not have got there yet
    assert eventually(lambda: child.poll() is not None)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert made.within("there")[-1] not in listed.stdout
