"""vLLM's own split of prefill and decode, a system of `vllm-tetri bench modes`.

Two stock `vllm serve` with its NixlConnector. vllm-router sends every request to the first
one, which computes the prompt and one token, and then to the second one, which reads the KV
of the whole prompt out of the first one's memory and writes the answer. What is set here is
what such a pair needs to run on the same cores as others, and what it would lack by mistake.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

import psutil

from vllm_tetri.errors import UnsupportedError
from vllm_tetri.transport.bench_nixl import TRANSPORTS, available

ROLES = ("kv_producer", "kv_consumer")  # of the instance for prompts, and of the other
MISSING = (
    "needs the Python package nixl, which cannot be imported; pip install --target FOLDER "
    "--no-deps nixl nixl-cu12 puts it beside this environment, and PYTHONPATH=FOLDER finds it"
)
CAVEAT = (
    "nixl: vLLM's own split of prefill and decode, which vLLM calls experimental. It sends KV "
    "after the whole prompt, and the decode instance reads it (UCX, shared memory). Each "
    "instance has half of the cores, and a thread of NIXL there that polls without a pause: "
    "where that half is one core, half of it is lost, and this is no measure of the design."
)
_READ = re.compile(rb"^vllm:nixl_bytes_transferred_count(?:\{.*\})? ([0-9.e+]+)", re.MULTILINE)
_READ_WITHIN_S = 10.0
_POLL_S = 0.1


def missing() -> str:
    """Why there can be no such pair here; empty if there can."""
    return "" if available() else MISSING


def options(role: str) -> list[str]:
    """What `vllm serve` gets besides."""
    found = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return ["--kv-transfer-config", json.dumps(found, separators=(",", ":"))]


def environment(port: int) -> dict[str, str]:
    """Variables of one instance.

    Args:
        port: At which the other one asks where its KV lies.
    """
    # Else UCX decides; both instances are on this machine, so shared memory is the best there is.
    transports = os.environ.get("UCX_TLS", TRANSPORTS["shm"])
    return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "UCX_TLS": transports}


def put_back(pid: int, cores: Sequence[int]) -> None:
    """Give every thread below a process these cores.

    The connector moves the thread that makes it, and all that this one starts, to the last
    core of the machine, whatever cores the process was given: two instances of a machine
    would compute on the same one.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                for thread in process.threads():
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, cores)


def require_read(url: str) -> None:
    """Make sure that an instance has read KV, and did not compute the prompt itself.

    Args:
        url: Of the instance that writes answers.

    Raises:
        UnsupportedError: It says that it read none, within some seconds.
    """
    deadline = time.monotonic() + _READ_WITHIN_S
    while not has_read(_metrics(url)):
        if time.monotonic() > deadline:
            raise UnsupportedError(
                f"nixl: the decode instance at {url} has read no KV of a prompt that was "
                "answered, so it is no split of prefill and decode"
            )
        time.sleep(_POLL_S)


def has_read(metrics: bytes) -> bool:
    """Whether an instance counts reads of KV in its metrics."""
    return any(float(each) > 0 for each in _READ.findall(metrics))


def _metrics(url: str) -> bytes:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
            found: bytes = answer.read()
            return found
    except (OSError, urllib.error.URLError):
        return b""
