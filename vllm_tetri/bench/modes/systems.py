"""What `vllm-tetri bench modes` compares: each runs alone, on all the cores.

All have the same executor, threads and options, and in total the same KV memory and the
same number of requests at a time: where several instances are one system, they share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tetri.bench import setting
from vllm_tetri.bench.arrivals import Slo
from vllm_tetri.bench.modes import nixl
from vllm_tetri.bench.modes.load import WINDOW_TOKENS
from vllm_tetri.bench.process import failed, guard
from vllm_tetri.bench.serving import Server
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.launch.machine import free_port

# What this benchmark sets itself, for every system as it has to be.
OWN_OPTIONS = (
    *("max-num-seqs", "max-num-batched-tokens", "kv-cache-memory-bytes", "num-gpu-blocks-override"),
    *("enable-prefix-caching", "served-model-name", "distributed-executor-backend"),
    *("host", "port", "role", "tetri-instance", "tetri-control", "tetri-url", "uds"),
    "kv-transfer-config",
)
_POLICY = "power_of_two"  # of the rival's router
_RIVAL_LIMIT = 4096  # requests at a time, so that it refuses none
_START_S = 600.0
_ANSWER_S = 60.0
_SHORT_PROMPT = list(range(10, 160))  # tokens that every tokenizer has
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class System:
    """One of those that are compared.

    Attributes:
        engines: How many share KV memory and places in the batch.
        serve: Its own options of stock `vllm serve`.
        up: Options of `vllm-tetri up`; none: it is stock vLLM.
        has_slo: Whether it is told the strict SLO, and refuses what would miss it.
    """

    name: str
    engines: int = 1
    serve: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    has_slo: bool = False

    @property
    def is_ours(self) -> bool:
        return bool(self.up)


STOCK, REPLICAS, NIXL, ADAPTIVE = "stock", "replicas", "nixl", "adaptive"
SYSTEMS = {
    each.name: each
    for each in (
        System(STOCK),
        System("stock-128", serve=("--max-num-batched-tokens", "128")),
        System("stock-256", serve=("--max-num-batched-tokens", "256")),
        System(REPLICAS, engines=2),
        System(NIXL, engines=2),
        System("split", engines=2, up=("--mode", "split", "--prefill", "1", "--decode", "1")),
        System(ADAPTIVE, up=("--mode", "adaptive")),
        System("adaptive-slo", up=("--mode", "adaptive"), has_slo=True),
        System("whole", up=("--mode", "whole")),
    )
}
DEFAULT = tuple(name for name in SYSTEMS if name != "whole")


def missing(name: str, rival: str | None) -> str:
    """What a system needs and does not have here; empty if it can be started.

    Args:
        rival: Path of vllm-router; None: there is none.
    """
    if name in (REPLICAS, NIXL) and rival is None:
        return "needs --rival, the path of vllm-router"
    return nixl.missing() if name == NIXL else ""


@dataclass(frozen=True, slots=True)
class Site:
    """Where systems run, and with what.

    Attributes:
        serve: The user's options of `vllm serve`, for every system.
        rival: Path of vllm-router; None: there is none.
        folder: For logs, and for what instances remember from one start to the next.
        slo: What clients are promised, for systems that are told.
    """

    model: str
    serve: Sequence[str]
    cores: Sequence[int]
    rival: str | None
    folder: Path
    slo: Slo | None = None

    @property
    def served_name(self) -> str:
        return Path(self.model).name


@contextmanager
def serving(system: System, site: Site) -> Iterator[str]:
    """URL of the system, from when it is ready until it is left.

    Raises:
        UnsupportedError: It did not start; the message ends with its log's last lines.
    """
    with ExitStack() as stack:
        if system.is_ours:
            yield stack.enter_context(_cluster(system, site))
        elif system.name == REPLICAS:
            urls = [
                stack.enter_context(_stock(system, site, cores, f"replica-{number}")).url
                for number, cores in enumerate(_halves(site))
            ]
            words = ["--worker-urls", *urls]
            yield stack.enter_context(_rival(site, words, _has_models))
        elif system.name == NIXL:
            yield stack.enter_context(_nixl_pair(system, site))
        else:
            yield stack.enter_context(_stock(system, site, site.cores, system.name)).url


def serve_options(system: System, site: Site) -> list[str]:
    """What each of its engines gets behind `vllm serve MODEL`; the user's words come last."""
    return [
        *("--enforce-eager", "--no-enable-prefix-caching"),
        *("--distributed-executor-backend", setting.UNIPROC),
        *("--served-model-name", site.served_name, "--max-model-len", str(WINDOW_TOKENS)),
        *("--max-num-seqs", str(setting.MAX_NUM_SEQS // system.engines)),
        *("--kv-cache-memory-bytes", str(setting.KV_BYTES // system.engines)),
        *system.serve,
        *site.serve,
    ]


def _halves(site: Site) -> tuple[Sequence[int], Sequence[int]]:
    half = len(site.cores) // 2
    return site.cores[:half], site.cores[half:]


@contextmanager
def _stock(
    system: System,
    site: Site,
    cores: Sequence[int],
    name: str,
    words: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    words = [site.model, *words, *serve_options(system, site)]
    with Server(words, cores, site.folder / f"{name}.log", variables) as server:
        yield server


@contextmanager
def _nixl_pair(system: System, site: Site) -> Iterator[str]:
    """Two instances that stand as the split ones of ours do, and the router before them."""
    with ExitStack() as stack:
        urls = []
        for role, cores in zip(nixl.ROLES, _halves(site), strict=True):
            words, variables = nixl.options(role), nixl.environment(free_port())
            name = f"nixl-{role.removeprefix('kv_')}"
            server = stack.enter_context(_stock(system, site, cores, name, words, variables))
            nixl.put_back(server.pid, cores)
            urls.append(server.url)
        prefill, decode = urls
        words = ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
        url = stack.enter_context(_rival(site, words, lambda url: _answers(url, site)))
        nixl.require_read(decode)
        yield url


@contextmanager
def _rival(site: Site, workers: Sequence[str], is_ready: Callable[[str], bool]) -> Iterator[str]:
    """vllm-router before the instances; it serves before it knows them."""
    assert site.rival is not None
    port, log = free_port(), site.folder / "vllm-router.log"
    words = [site.rival, *workers, "--policy", _POLICY, "--log-level", "warning"]
    words += ["--max-concurrent-requests", str(_RIVAL_LIMIT), "--port", str(port)]
    words += ["--worker-startup-check-interval", "1", "--prometheus-port", str(free_port())]
    with _child(words, site, log) as process:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _START_S
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise failed("vllm-router did not start", log)
            time.sleep(_POLL_S)
        yield url


def _has_models(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return bool(json.load(answer)["data"])
    except (OSError, ValueError, KeyError, urllib.error.URLError):
        return False


def _answers(url: str, site: Site) -> bool:
    """Whether a request comes through, all the way."""
    body = {"model": site.served_name, "prompt": _SHORT_PROMPT, "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return bool(json.load(answer)["choices"])
    except (OSError, ValueError, KeyError, urllib.error.URLError):
        return False


@contextmanager
def _cluster(system: System, site: Site) -> Iterator[str]:
    ready = site.folder / f"{system.name}.ready"
    log = site.folder / f"{system.name}.log"
    ready.unlink(missing_ok=True)
    words = [sys.executable, "-m", "vllm_tetri.cli", "up", site.model, *system.up]
    if system.has_slo and site.slo is not None:
        words += ["--ttft-slo", str(site.slo.ttft_s), "--tpot-slo", str(site.slo.tpot_s)]
        words += ["--refuse-late"]
    words += ["--max-standing-wait", "0"]  # the others refuse nothing either
    words += ["--port", "0", "--ready-file", str(ready.resolve())]
    words += ["--log-dir", str((site.folder / f"{system.name}-logs").resolve())]
    words += ["--", *serve_options(system, site)]
    with _child(words, site, log) as process:
        deadline = time.monotonic() + _START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise failed(f"{system.name} did not start", log)
            time.sleep(_POLL_S)
        found: dict[str, Any] = json.loads(ready.read_text())
        if len(found["instances"]) != system.engines:
            count = len(found["instances"])
            raise UnsupportedError(f"{system.name} has {count} instances, not {system.engines}")
        yield found["url"]


@contextmanager
def _child(words: Sequence[str], site: Site, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    environment["TETRI_CACHE"] = str((site.folder / "cache").resolve())
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*guard(site.cores), *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
