"""From the options of `up` to the children it keeps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from vllm_tetri.config import DEFAULT_CONTROL
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.keeper import Spec
from vllm_tetri.launch.machine import free_port, is_port_free
from vllm_tetri.policy.placement import Machine, Placement, Sharing, kv_bytes_each, place
from vllm_tetri.types import Role

SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
ROUTER = (sys.executable, "-m", "vllm_tetri.cli", "router")
ROUTER_NAME = "router"
HOST = "127.0.0.1"

# `up` sets these itself; given after `--` they would contradict it.
_OWN_OPTIONS = ("port", "host", "role", "tetri-instance", "tetri-control", "tetri-url", "uds")
_COMPILATION = {"enforce-eager", "no-enforce-eager", "compilation-config", "cc"} | {
    "O", "O0", "O1", "O2", "O3"
}  # fmt: skip
_GPU_MEMORY_PART = 0.9


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `up` runs; the router comes last."""

    specs: tuple[Spec, ...]
    control: str

    @property
    def instances(self) -> tuple[Spec, ...]:
        return tuple(spec for spec in self.specs if spec.role is not None)


def make_plan(options: argparse.Namespace, machine: Machine) -> Plan:
    """What to run for these options of `up` on this machine.

    Raises:
        ConfigError: No instance, a contradiction, too little machine, or a port in use.
    """
    roles = [
        *[Role.PREFILL] * options.prefill,
        *[Role.DECODE] * options.decode,
        *[Role.BOTH] * options.both,
    ]
    _check_roles(options)
    given = given_options(options.tail)
    _refuse_own_options(given)
    _check_port(options)
    control = _control_address()
    try:
        placements = place(
            roles, machine, Sharing(options.placement), gpus_each=_gpus_each(options.tail)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    serve = [*SERVE, options.model, *options.tail]
    if options.arena_bytes is not None:
        serve += ["--tetri-arena-bytes", str(options.arena_bytes)]
    if options.predictor is not None:
        serve += ["--tetri-predictor", options.predictor]
    serve += ["--tetri-control", control, "--host", HOST]
    specs = [
        _instance(
            name,
            role,
            serve + _memory_options(options, given, placement, machine, len(roles)),
            placement,
        )
        for name, role, placement in zip(_names(roles), roles, placements, strict=True)
    ]
    return Plan((*specs, _router(options, control)), control)


def given_options(tail: Sequence[str]) -> set[str]:
    """Names of the options for `vllm serve` that the user gave, also in a
    ``--config`` file, without dashes in front and with dashes inside."""
    names = set()
    for index, word in enumerate(tail):
        if not word.startswith("-"):
            continue
        name, _, value = word.lstrip("-").partition("=")
        names.add(name.replace("_", "-"))
        if name == "config":
            names |= _names_in_file(value or "".join(tail[index + 1 : index + 2]))
    return names


def _names_in_file(path: str) -> set[str]:
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    return {str(key).replace("_", "-") for key in content} if isinstance(content, dict) else set()


def _check_roles(options: argparse.Namespace) -> None:
    if options.prefill + options.decode + options.both == 0:
        raise ConfigError("no instance to start; give --prefill and --decode, or --both")
    if options.both == 0 and (options.prefill == 0 or options.decode == 0):
        missing = "prefill" if options.prefill == 0 else "decode"
        raise ConfigError(f"a cluster needs a {missing} instance; add --{missing} 1 or --both 1")


def _refuse_own_options(given: set[str]) -> None:
    for name in _OWN_OPTIONS:
        if name in given:
            where = (
                "`up` itself takes it, before the --"
                if name in ("port", "host")
                else ("`up` sets it for every instance")
            )
            raise ConfigError(f"--{name} cannot be given after --; {where}")


def _check_port(options: argparse.Namespace) -> None:
    if options.port and not is_port_free(options.port, options.host):
        raise ConfigError(
            f"port {options.port} of {options.host} is in use; choose another with --port"
        )


def _control_address() -> str:
    """The default address, so that instances started by hand find this router;
    another one when that is taken by a second cluster on this machine."""
    port = int(DEFAULT_CONTROL.rpartition(":")[2])
    return f"tcp://{HOST}:{port if is_port_free(port, HOST) else free_port(HOST)}"


def _gpus_each(tail: Sequence[str]) -> int:
    for index, word in enumerate(tail):
        name, _, value = word.partition("=")
        if name in ("-tp", "--tensor-parallel-size", "--tensor_parallel_size"):
            number = value or "".join(tail[index + 1 : index + 2])
            return int(number) if number.isdigit() and int(number) > 0 else 1
    return 1


def _memory_options(
    options: argparse.Namespace,
    given: set[str],
    placement: Placement,
    machine: Machine,
    instances: int,
) -> list[str]:
    words: list[str] = []
    if options.kv_bytes is not None:
        words += ["--kv-cache-memory-bytes", str(options.kv_bytes)]
    if placement.gpu_sharers:
        if placement.gpu_sharers > 1 and "gpu-memory-utilization" not in given:
            part = _GPU_MEMORY_PART / placement.gpu_sharers
            words += ["--gpu-memory-utilization", f"{part:.3f}"]
        return words
    if options.kv_bytes is None and "kv-cache-memory-bytes" not in given:
        words += ["--kv-cache-memory-bytes", str(kv_bytes_each(instances, machine))]
    # Compiling triples the start and gains nothing worth it on a CPU.
    if not given & {
        "enforce-eager",
        "no-enforce-eager",
        "compilation-config",
        "O",
        "cc",
        "O0",
        "O1",
        "O2",
        "O3",
    }:
        words.append("--enforce-eager")
    return words


def _names(roles: Sequence[Role]) -> list[str]:
    counts = dict.fromkeys(Role, 0)
    names = []
    for role in roles:
        names.append(f"{role.value}-{counts[role]}")
        counts[role] += 1
    return names


def _instance(name: str, role: Role, serve: list[str], placement: Placement) -> Spec:
    words = [*serve, "--role", role.value, "--tetri-instance", name]
    return Spec(name, role, _with_port(words), placement, ready_path="/health", host=HOST)


def _router(options: argparse.Namespace, control: str) -> Spec:
    words = [*ROUTER, "--host", options.host, "--control", control]
    for name in ("max_in_flight", "flip", "flip_after"):
        value = getattr(options, name)
        if value is not None:
            words += ["--" + name.replace("_", "-"), str(value)]
    return Spec(
        ROUTER_NAME,
        None,
        _with_port(words),
        Placement(),
        ready_path="/tetri/v1/instances",
        host=options.host,
        port=options.port or free_port(options.host),
    )


def _with_port(words: list[str]) -> Callable[[int], list[str]]:
    return lambda port: [*words, "--port", str(port)]
