"""Systems under test, each alone on the same cores: start one, wait for all of it, end it.

Every system has the same executor, threads and options, and in total the same KV memory and the
same number of requests at a time; the instances of one system share both. Whatever is started
here ends with the process that started it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from vllm_tetri.bench import TETRI, VLLM, Child, responds
from vllm_tetri.launch.machine import (
    cores_of,
    cpu_facts,
    free_port,
    is_cpu_build,
    parts_of,
    vllm_version,
)

UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
KV_BYTES = 1 << 30
MAX_NUM_SEQS = 128
WINDOW_TOKENS = 2048
START_S = 900.0
# Sharing cores with anything else is ten times slower where threads spin while they wait.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve.

    Attributes:
        engines: How many instances share KV memory and places in the batch.
        serve: Its own options of `vllm serve`.
        up: Options of `vllm-tetri up`; empty for stock vLLM.
        policy: vllm-router's policy, if that stands before stock instances.
    """

    engines: int = 1
    serve: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    policy: str = "power_of_two"


VLLM_ROUTER = str(Path(sys.executable).with_name("vllm-router"))  # of the extra `bench`
_BOTH = "--mode", "adaptive", "--both", "1"
_1P2D = "--mode", "split", "--prefill", "1", "--decode", "2"
_2P1D = "--mode", "split", "--prefill", "2", "--decode", "1"
SYSTEMS = {
    "stock": System(),
    "stock-128": System(serve=("--max-num-batched-tokens", "128")),
    "stock-256": System(serve=("--max-num-batched-tokens", "256")),
    # What vLLM's guide to optimization advises on a GPU: few tokens for ITL, many for throughput.
    "stock-2048": System(serve=("--max-num-batched-tokens", "2048")),
    "stock-16384": System(serve=("--max-num-batched-tokens", "16384")),
    "replicas-1": System(policy="round_robin"),  # behind vllm-router, as `both` behind ours
    "replicas": System(engines=2),
    # What serves on four devices (`classes --profile --devices 4`).
    "replicas-4": System(engines=4),
    "replicas-4-512": System(engines=4, serve=("--max-num-batched-tokens", "512")),
    "split-1p3d": System(4, up=("--mode", "split", "--prefill", "1", "--decode", "3")),
    "split-2p2d": System(4, up=("--mode", "split", "--prefill", "2", "--decode", "2")),
    "whole-4": System(4, up=("--mode", "whole", "--both", "4")),
    "adaptive-4": System(4, up=("--mode", "adaptive", "--both", "4")),
    "replicas-3-cache": System(engines=3, policy="cache_aware"),
    "nixl": System(engines=2),
    # One instance has nothing to decide in mode adaptive, so these two are named by its role.
    "both": System(up=_BOTH),
    # The same instance, asked without a router, and not in the way of that of another cluster.
    "role": System(serve=("--role", "both", "--tetri-control", "tcp://127.0.0.1:9")),
    "split": System(engines=2, up=("--mode", "split", "--prefill", "1", "--decode", "1")),
    "adaptive-1p1d": System(2, up=("--mode", "adaptive", "--prefill", "1", "--decode", "1")),
    "split-1p2d": System(3, up=_1P2D),
    # As TetriInfer's paper has it, and with right predictions of lengths (section 5.2.3).
    "paper": System(3, up=_1P2D, serve=("--tetri-preset", "paper")),
    "paper-oracle": System(
        3, up=_1P2D, serve=("--tetri-preset", "paper", "--tetri-predictor", "oracle")
    ),
    "split-2p1d": System(3, up=_2P1D),
    # As it was before instances told what they have cached: nothing is found again.
    "split-2p1d-uncached": System(3, up=_2P1D, serve=("--no-enable-prefix-caching",)),
    "adaptive-2p1d": System(3, up=("--mode", "adaptive", "--prefill", "2", "--decode", "1")),
    "adaptive-2": System(2, up=("--mode", "adaptive", "--both", "2")),
    "adaptive-3": System(3, up=("--mode", "adaptive", "--both", "3")),
}


@dataclass(frozen=True, slots=True)
class Site:
    """Where systems run.

    Attributes:
        serve: Further options of `vllm serve` for every system.
        folder: For logs.
        environment: Further variables for every system.
        kv_bytes: KV memory of all instances of a system together.
    """

    model: str
    cores: tuple[int, ...]
    folder: Path
    serve: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    kv_bytes: int = KV_BYTES

    @property
    def name(self) -> str:
        """The name under which the model is served."""
        return Path(self.model).name


def add_site(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `site_of` reads."""
    parser.add_argument("model", help="model name or folder; float32 for comparisons")
    parser.add_argument("--cores", type=int, default=2, help="how many CPU cores to use; 2")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests and orders; 0")
    parser.add_argument("--kv-bytes", type=int, default=KV_BYTES, help="of a system; 1 GiB")
    parser.add_argument("--folder", type=Path, default=Path("bench"), help="for logs; bench")
    parser.epilog = "What follows -- are options of vllm serve for every system."


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Site]:
    """Parse the command line; return its options and where to run, with a folder for logs."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.folder.mkdir(parents=True, exist_ok=True)
    # One thread of each, so that all systems compute with as many.
    cores = tuple(each[0] for each in cores_of(os.sched_getaffinity(0)))[: options.cores]
    folder = options.folder.resolve()
    serve = tuple(words[cut + 1 :])
    return options, Site(options.model, cores, folder, serve, kv_bytes=options.kv_bytes)


def conditions(site: Site, **more: Any) -> dict[str, Any]:
    """Return what a result file says about how it came to be."""
    return {
        "model": site.name,
        "cpu": cpu_facts()[0],
        "cores": len(site.cores),
        "vllm": vllm_version(),
        "options": list(site.serve),
        "date": time.strftime("%Y-%m-%d"),
        **more,
    }


@contextmanager
def serving(name: str, site: Site, *, up: Sequence[str] = ()) -> Iterator[str]:
    """Run a system of `SYSTEMS` and yield its URL once all of it is ready.

    Args:
        up: Further options of `vllm-tetri up`, for our systems.

    Raises:
        UnsupportedError: It did not start; the message ends with its log.
    """
    system = SYSTEMS[name]
    with ExitStack() as stack:
        if system.up:
            facts = stack.enter_context(our_cluster(site, [*system.up, *up], name, system))
            yield facts["url"]
        elif name.startswith("replicas"):
            is_shared = system.engines > len(site.cores)
            places = _places(site.cores, system.engines)
            calm = {**PASSIVE, "OMP_NUM_THREADS": "1"} if is_shared else None
            urls = [
                stack.enter_context(stock(site, f"{name}-{part}", system, cores, variables=calm))
                for part, cores in enumerate(places)
            ]
            words = ["--policy", system.policy, "--worker-urls", *urls]
            yield stack.enter_context(vllm_router(site, words))
        elif name == "nixl":
            yield stack.enter_context(_nixl_pair(site, system))
        else:
            plugins = {"VLLM_PLUGINS": "tetri"} if "--role" in system.serve else None
            yield stack.enter_context(stock(site, name, system, site.cores, variables=plugins))


def serve_options(site: Site, system: System) -> list[str]:
    """Return what every engine of a system gets after `vllm serve MODEL`."""
    return [
        "--enforce-eager",
        *("--distributed-executor-backend", UNIPROC),
        *("--served-model-name", site.name, "--max-model-len", str(WINDOW_TOKENS)),
        *("--max-num-seqs", str(MAX_NUM_SEQS // system.engines)),
        *("--kv-cache-memory-bytes", str(site.kv_bytes // system.engines)),
        *system.serve,
        *site.serve,
    ]


@contextmanager
def stock(
    site: Site,
    name: str,
    system: System,
    cores: Sequence[int],
    words: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run one stock `vllm serve` on these cores."""
    port = free_port()
    threads = {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = {
        **(threads if is_cpu_build() else {}),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "none",
        **site.environment,
        **(variables or {}),
    }
    command = [*VLLM, "serve", site.model, *serve_options(site, system), *words]
    url = f"http://127.0.0.1:{port}"
    log = site.folder / f"{name}.log"
    with Child([*command, "--port", str(port)], log, environment, cores) as process:
        process.wait_until(lambda: responds(f"{url}/health"), START_S)
        if "--kv-transfer-config" in words:  # NIXL moves its engine to the last core
            _pin(process.pid, cores)
        yield url


@contextmanager
def our_cluster(
    site: Site, up: Sequence[str], name: str = "ours", system: System = SYSTEMS["both"]
) -> Iterator[dict[str, Any]]:
    """Run `vllm-tetri up` and yield what its ready file says."""
    ready = site.folder / f"{name}.ready"
    ready.unlink(missing_ok=True)
    words = [*TETRI, "up", site.model, *up, "--port", "0", "--ready-file", str(ready)]
    words += ["--log-dir", str(site.folder / f"{name}-logs"), "--"]
    words += serve_options(site, system)
    environment = {"VLLM_NO_USAGE_STATS": "1", "TETRI_CACHE": str(site.folder / "cache")}
    log = site.folder / f"{name}.log"
    with Child(words, log, {**environment, **site.environment}, site.cores) as process:
        process.wait_until(ready.exists, START_S)
        yield {**json.loads(ready.read_text()), "guard": process.pid}


@contextmanager
def vllm_router(
    site: Site, words: Sequence[str], is_ready: Callable[[str], bool] | None = None
) -> Iterator[str]:
    """Run vllm-router in front of instances; it serves before it knows them."""
    port = free_port()
    command = [VLLM_ROUTER, *words, "--log-level", "warning"]
    command += ["--max-concurrent-requests", "4096", "--port", str(port)]
    command += ["--worker-startup-check-interval", "1", "--prometheus-port", str(free_port())]
    url = f"http://127.0.0.1:{port}"

    def has_models() -> bool:
        return bool(get_json(f"{url}/v1/models").get("data"))

    with Child(command, site.folder / "vllm-router.log", None, site.cores) as process:
        process.wait_until((lambda: is_ready(url)) if is_ready else has_models, START_S)
        yield url


@contextmanager
def _nixl_pair(site: Site, system: System) -> Iterator[str]:
    """Run two stock instances with vLLM's NixlConnector, placed as the split ones of ours.

    Each instance's progress thread polls without a pause and takes half of a one-core instance, so
    on two cores this measures that thread, not the design: say so with every figure.
    """
    with ExitStack() as stack:
        urls = []
        for role, cores in zip(("kv_producer", "kv_consumer"), _places(site.cores, 2), strict=True):
            config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
            words = ["--kv-transfer-config", json.dumps(config)]
            variables = {
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_TLS": os.environ.get("UCX_TLS", "sm,self,tcp"),
            }
            urls.append(
                stack.enter_context(stock(site, f"nixl-{role}", system, cores, words, variables))
            )
        words = ["--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1]]
        words += ["--policy", system.policy]
        url = stack.enter_context(vllm_router(site, words, lambda url: _completes(url, site)))
        if not metric(urls[1], "vllm:nixl_bytes_transferred_count"):
            raise RuntimeError("nixl: the decode instance computed the prompt instead of reading")
        yield url


def metric(url: str, name: str, label: str = "") -> float:
    """Return the sum of a server's Prometheus metric over its labels, or over those with one."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    labels = rf"\{{.*{label}.*\}}" if label else r"(?:\{.*\})?"
    return sum(map(float, re.findall(rf"^{name}{labels} (\S+)", text, re.MULTILINE)))


def get_json(url: str, key: str = "") -> dict[str, Any]:
    """Return the JSON object at a URL; an empty one if there is none."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=2) as response:
        content = json.load(response)
        return content if isinstance(content, dict) else {}
    return {}


def post_json(url: str, body: Mapping[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
    """Send a JSON object and return the one that comes back."""
    raw, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, raw, headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        content: dict[str, Any] = json.load(response)
        return content


def _completes(url: str, site: Site) -> bool:
    with suppress(OSError, ValueError):
        body = {"model": site.name, "prompt": list(range(10, 160)), "max_tokens": 4}
        return bool(post_json(f"{url}/v1/completions", body).get("choices"))
    return False


def _places(cores: Sequence[int], number: int) -> list[Sequence[int]]:
    """Return where so many engines run: each has its part, as with `up`, if there are enough."""
    return [cores] * number if len(cores) < number else parts_of(cores, number)


def _pin(pid: int, cores: Sequence[int]) -> None:
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)
