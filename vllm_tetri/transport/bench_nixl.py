"""The NIXL side of `vllm-tetri bench transfer`: the same pages over UCX, when `nixl` is installed.

Two processes with registered memory; WRITE with one descriptor a page, as its
users do for paged caches. What a transfer costs includes its descriptor lists.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.errors import TransferError

# UCX refuses peers that it cannot watch for failure, so shared memory needs tcp beside it.
TRANSPORTS = {"shm": "sm,self,tcp", "tcp": "tcp"}
TIMEOUT_S = 60.0


def available() -> bool:
    """Whether the `nixl` package can be imported."""
    return find_spec("nixl") is not None


class NixlPair:
    """An agent here, one in a child process, and registered memory in both. Owns the child."""

    def __init__(self, link: str, source: NDArray[np.uint8]) -> None:
        self._source = source
        environment = os.environ | _settings(link)
        command = [sys.executable, "-m", "vllm_tetri.transport.bench_nixl", str(source.nbytes)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            metadata, self._target = self._await_child()
            with _environment(_settings(link)):
                self._agent = _new_agent(f"sender-{link}", source)
            self._peer = self._agent.add_remote_agent(metadata)
        except BaseException:
            self._end_child()
            raise

    def push(self, pages: NDArray[np.uint64], page_bytes: int) -> float:
        """Seconds to write the pages at these addresses one after the other into the peer."""
        started = time.perf_counter()
        targets = np.uint64(self._target) + np.arange(len(pages), dtype=np.uint64) * np.uint64(
            page_bytes
        )
        local, remote = (
            self._agent.get_xfer_descs(_descriptors(starts, page_bytes), "DRAM")
            for starts in (pages, targets)
        )
        handle = self._agent.initialize_xfer("WRITE", local, remote, self._peer)
        try:
            state = self._agent.transfer(handle)
            while state == "PROC" and time.perf_counter() < started + TIMEOUT_S:
                state = self._agent.check_xfer_state(handle)
            took = time.perf_counter() - started
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferError(f"NIXL ended in state {state}")
        return took

    def close(self) -> None:
        """End the child and the agent. Idempotent."""
        if self._child.returncode is None:
            self._agent.remove_remote_agent(self._peer)
            del self._agent  # with its progress thread
            self._end_child()

    def _await_child(self) -> tuple[bytes, int]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            words = line.split()
            if len(words) == 3 and words[0] == "agent":
                return bytes.fromhex(words[1]), int(words[2])
        raise TransferError("the NIXL receiver did not start; its messages are above")

    def _end_child(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _settings(link: str) -> dict[str, str]:
    return {"UCX_TLS": TRANSPORTS[link], "NIXL_LOG_LEVEL": "ERROR"}


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """UCX reads its settings when an agent starts."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _descriptors(starts: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    table = np.zeros((len(starts), 3), np.uint64)
    table[:, 0] = starts
    table[:, 1] = size
    return table


def _new_agent(name: str, memory: NDArray[np.uint8]) -> Any:
    api = import_module("nixl._api")
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        starts = np.array([memory.ctypes.data], np.uint64)
        agent.register_memory(_descriptors(starts, memory.nbytes), "DRAM")
    except RuntimeError as error:
        raise TransferError(f"NIXL with UCX_TLS={os.environ['UCX_TLS']}: {error}") from error
    return agent


def _receive(total_bytes: int) -> None:
    """What the child does until its standard input ends."""
    memory = np.ones(total_bytes, np.uint8)
    agent = _new_agent("receiver", memory)
    print("agent", agent.get_agent_metadata().hex(), memory.ctypes.data, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _receive(int(sys.argv[1]))
