"""Several hosts on this machine: network namespaces, and a wire between them that can be cut.

Every host has an address of its own and one link to a namespace that forwards packets; what
is cut is dropped there without a word, as by a switch that died: no FIN, no RST, no ICMP. The
caller's own namespace can be one of the hosts. What hosts share is all but the network:
files, memory and processes, so also ``/dev/shm`` and the boot id.

It takes Linux, iproute2 and the right to make namespaces (root).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.needed import lacking, require_command

NETWORK = "10.77.0"
_GATE = f"{NETWORK}.254"
_PREFIX = "tetri-net"
_HERE = "here"  # the host that is the caller's own namespace
_GONE_S = 5.0


class Hosts:
    """Made by `hosts`; `addresses` are by name."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        self._prefix = prefix
        self._wire = f"{prefix}-wire"
        self.addresses = {name: f"{NETWORK}.{index + 1}" for index, name in enumerate(names)}

    def within(self, host: str) -> tuple[str, ...]:
        """What a command begins with that is to run on a host; it keeps its process id."""
        return () if host == _HERE else ("ip", "netns", "exec", self._space(host))

    def cut(self, sender: str, receiver: str) -> None:
        """From now on nothing of one host reaches the other; answers still do."""
        self._drop("from", self.addresses[sender], "to", self.addresses[receiver])

    def part(self, one: str, other: str) -> None:
        """Nothing passes between two hosts, in either direction."""
        self.cut(one, other)
        self.cut(other, one)

    def isolate(self, host: str) -> None:
        """Nothing passes between a host and any other."""
        for way in ("from", "to"):
            self._drop(way, self.addresses[host])

    def mend(self) -> None:
        """Everything passes again."""
        while "blackhole" in _ip("-n", self._wire, "rule", "show"):
            _ip("-n", self._wire, "rule", "del", "pref", "100")

    # -- made and removed by `hosts` ----------------------------------------------

    def make(self) -> None:
        """Make all of them."""
        _ip("netns", "add", self._wire)
        _ip("-n", self._wire, "link", "set", "lo", "up")
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        _ip("netns", "exec", self._wire, "sh", "-c", forward)
        for index, (name, address) in enumerate(self.addresses.items()):
            self._join(f"v{index}", name, address)

    def remove(self) -> None:
        """Remove all of them, and what still runs there."""
        if _HERE in self.addresses:
            with suppress(subprocess.CalledProcessError):
                _ip("link", "del", self._own_link)
        for space in [self._space(name) for name in self.addresses if name != _HERE]:
            with suppress(subprocess.CalledProcessError):
                _end_all(space)
                _ip("netns", "del", space)
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self._wire)

    @property
    def _own_link(self) -> str:
        return f"tetri{self._prefix.rpartition('-')[2]}"  # at most 15 characters

    def _drop(self, *packets: str) -> None:
        _ip("-n", self._wire, "rule", "add", "pref", "100", *packets, "type", "blackhole")

    def _space(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _join(self, port: str, host: str, address: str) -> None:
        """One host with its link: its end in its own namespace, `port` in the wire's."""
        wire = ("-n", self._wire)
        where: tuple[str, ...] = ()
        if host == _HERE:
            end = self._own_link
            _ip("link", "add", end, "type", "veth", "peer", "name", port, "netns", self._wire)
        else:
            space, end = self._space(host), "eth0"
            where = ("-n", space)
            _ip("netns", "add", space)
            _ip(*where, "link", "set", "lo", "up")
            _ip(*wire, "link", "add", port, "type", "veth", "peer", "name", end, "netns", space)
        _ip(*where, "addr", "add", f"{address}/32", "dev", end)
        _ip(*where, "link", "set", end, "up")
        _ip(*where, "route", "add", f"{_GATE}/32", "dev", end)
        _ip(*where, "route", "add", f"{NETWORK}.0/24", "via", _GATE, "src", address)
        _ip(*wire, "addr", "add", f"{_GATE}/32", "dev", port)
        _ip(*wire, "link", "set", port, "up")
        _ip(*wire, "route", "add", f"{address}/32", "dev", port)


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Hosts of these names; ``here`` is the caller's own namespace. Nothing is left of
    them afterwards."""
    _sweep()
    made = Hosts(f"{_PREFIX}-{os.getpid()}", names)
    with ExitStack() as stack:
        stack.callback(made.remove)
        made.make()
        yield made


def require_hosts() -> None:
    """Give up the calling test where there can be no hosts."""
    require_command("ip", "iproute2")
    try:
        with hosts("here", "there") as made:
            made.isolate("there")
            made.mend()
    except subprocess.CalledProcessError as error:
        why = f"{error.cmd}: {(error.stderr or '').strip()}"
        lacking("network namespaces", f"run as root on Linux, in a privileged container ({why})")


def _ip(*words: str) -> str:
    command = ("ip", *words)
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def _end_all(space: str) -> None:
    """End what runs in a namespace: by process id, and only there."""
    deadline = time.monotonic() + _GONE_S
    while (pids := _ip("netns", "pids", space).split()) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)


def _sweep() -> None:
    """Remove what a caller left that was killed."""
    for line in _ip("netns", "list").splitlines():
        space = line.split()[0]
        owner = space.removeprefix(f"{_PREFIX}-").partition("-")[0]
        is_ours = space.startswith(f"{_PREFIX}-") and owner.isdigit()
        if is_ours and not Path(f"/proc/{owner}").exists():
            _end_all(space)
            _ip("netns", "del", space)
