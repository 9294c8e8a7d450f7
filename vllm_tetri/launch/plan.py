"""From the options of `up` to the children it keeps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from vllm_tetri.config import DEFAULT_CONTROL
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.keeper import Spec
from vllm_tetri.launch.keys import ClusterKeys, Environment, cluster_keys
from vllm_tetri.launch.machine import free_port, is_port_free
from vllm_tetri.policy.placement import (
    Machine,
    Placement,
    Sharing,
    has_choice,
    kv_bytes_each,
    place,
)
from vllm_tetri.router.door_options import fingerprint_of, has_tls
from vllm_tetri.types import Mode, Role

SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
ROUTER = (sys.executable, "-m", "vllm_tetri.cli", "router")
ROUTER_NAME = "router"
HOST = "127.0.0.1"
DEFAULT_MODE = Mode.ADAPTIVE
MAX_PORT = 65535

# `up` sets these itself; given after `--` they would contradict it.
_OWN_OPTIONS = ("role", "tetri-instance", "tetri-control", "tetri-url", "uds",
                "tetri-secret-file")  # fmt: skip
_ROUTER_OPTIONS = ("port", "host", "ssl-keyfile", "ssl-certfile")
# What routers get as `up` got it.
_PASSED_ON = ("max_in_flight", "max_standing_wait", "flip", "flip_after", "flip_lease",
              "ttft_slo", "tpot_slo", "ssl_certfile", "ssl_keyfile")  # fmt: skip
_COMPILATION = {"enforce-eager", "no-enforce-eager", "compilation-config", "cc"} | {
    "O", "O0", "O1", "O2", "O3"
}  # fmt: skip
_GPU_MEMORY_PART = 0.9

# What vLLM's --dtype means; "auto" is bfloat16 for nearly every model on a CPU.
_DTYPES = {"float": "float32", "float32": "float32", "half": "float16", "float16": "float16"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `up` runs; the routers come last.

    Attributes:
        specs: The children.
        control: Where instances and routers meet, an address for every router.
        dtype: Name of the torch dtype that instances probably compute in.
        is_sharing_open: Whether a measurement is to decide how instances share the
            cores; they are placed by the default until then.
    """

    specs: tuple[Spec, ...]
    control: str
    dtype: str
    is_sharing_open: bool

    @property
    def instances(self) -> tuple[Spec, ...]:
        return tuple(spec for spec in self.specs if spec.role is not None)

    @property
    def routers(self) -> tuple[Spec, ...]:
        return tuple(spec for spec in self.specs if spec.role is None)


def make_plan(options: argparse.Namespace, machine: Machine) -> Plan:
    """What to run for these options of `up` on this machine.

    Raises:
        ConfigError: No instance, a contradiction, too little machine, or a port in use.
    """
    gpus_each = _gpus_each(options.tail)
    roles = _roles(options, machine, gpus_each)
    given = given_options(options.tail)
    _refuse_own_options(given)
    ports = _router_ports(options)
    controls = _control_addresses(options.routers)
    control = ",".join(controls)
    keys = cluster_keys(options, given)
    try:
        placements = place(roles, machine, Sharing(options.placement), gpus_each=gpus_each)
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
            keys.of_instances,
        )
        for name, role, placement in zip(_names(roles), roles, placements, strict=True)
    ]
    names = [f"{ROUTER_NAME}-{index}" for index in range(options.routers)]
    routers = [
        _router(name, port, address, options, keys)
        for name, port, address in zip(
            names if len(names) > 1 else [ROUTER_NAME], ports, controls, strict=True
        )
    ]
    return Plan(
        (*specs, *routers),
        control,
        _DTYPES.get(_value(options.tail, "--dtype"), "bfloat16"),
        has_choice(roles, machine, Sharing(options.placement)),
    )


def with_sharing(plan: Plan, machine: Machine, sharing: Sharing) -> Plan:
    """The plan with its instances placed anew, on a CPU host."""
    roles = [spec.role for spec in plan.instances if spec.role is not None]
    placed = [
        replace(spec, placement=placement)
        for spec, placement in zip(plan.instances, place(roles, machine, sharing), strict=True)
    ]
    return replace(plan, specs=(*placed, *plan.routers), is_sharing_open=False)


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


def _roles(options: argparse.Namespace, machine: Machine, gpus_each: int) -> list[Role]:
    """A role for every instance: what was given, or what suits the mode and the machine."""
    mode, prefill, decode, both = Mode(options.mode), options.prefill, options.decode, options.both
    if mode is not Mode.SPLIT and prefill is decode is both is None:
        return [Role.BOTH] * max(1, len(machine.gpus) // gpus_each)
    default = 0 if both else 1
    prefill = default if prefill is None else prefill
    decode = default if decode is None else decode
    if not (prefill or decode or both):
        raise ConfigError("no instance to start; give --prefill and --decode, or --both")
    if mode is Mode.SPLIT and not both and not (prefill and decode):
        missing = "decode" if prefill else "prefill"
        raise ConfigError(f"a cluster needs a {missing} instance; add --{missing} 1 or --both 1")
    return [*[Role.PREFILL] * prefill, *[Role.DECODE] * decode, *[Role.BOTH] * (both or 0)]


def _refuse_own_options(given: set[str]) -> None:
    for name in (*_OWN_OPTIONS, *_ROUTER_OPTIONS):
        if name in given:
            where = (
                "`up` itself takes it, before the --"
                if name in _ROUTER_OPTIONS
                else "`up` sets it for every instance"
            )
            raise ConfigError(f"--{name} cannot be given after --; {where}")


def _router_ports(options: argparse.Namespace) -> list[int]:
    """The given port and those that follow it, one for every router; or free ones."""
    if not options.port:
        return _free_ports(options.routers, options.host)
    ports = [options.port + index for index in range(options.routers)]
    for port in ports:
        if not (port <= MAX_PORT and is_port_free(port, options.host)):
            what = "is in use" if port <= MAX_PORT else "is none"
            raise ConfigError(f"port {port} of {options.host} {what}; choose another with --port")
    return ports


def _control_addresses(number: int) -> list[str]:
    """The default address first, so that instances started by hand find a router;
    another one when that is taken by a second cluster on this machine."""
    port = int(DEFAULT_CONTROL.rpartition(":")[2])
    ports = [port, *_free_ports(number - 1, HOST)] if is_port_free(port, HOST) else []
    return [f"tcp://{HOST}:{port}" for port in ports or _free_ports(number, HOST)]


def _free_ports(number: int, host: str) -> list[int]:
    ports: list[int] = []
    while len(ports) < number:
        port = free_port(host)
        if port not in ports:
            ports.append(port)
    return ports


def _gpus_each(tail: Sequence[str]) -> int:
    number = _value(tail, "-tp", "--tensor-parallel-size")
    return int(number) if number.isdecimal() and int(number) > 0 else 1


def _value(tail: Sequence[str], *names: str) -> str:
    """What follows the first of these options; nothing where none was given."""
    for index, word in enumerate(tail):
        name, _, value = word.partition("=")
        if name.replace("_", "-") in names:
            return value or "".join(tail[index + 1 : index + 2])
    return ""


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
    if not given & _COMPILATION:
        words.append("--enforce-eager")
    return words


def _names(roles: Sequence[Role]) -> list[str]:
    counts = dict.fromkeys(Role, 0)
    names = []
    for role in roles:
        names.append(f"{role.value}-{counts[role]}")
        counts[role] += 1
    return names


def _instance(
    name: str,
    role: Role,
    serve: list[str],
    placement: Placement,
    environment: Environment,
) -> Spec:
    words = [*serve, "--role", role.value, "--tetri-instance", name]
    return Spec(
        name,
        role,
        _with_port(words),
        placement,
        ready_path="/health",
        host=HOST,
        environment=environment,
    )


def _router(
    name: str, port: int, control: str, options: argparse.Namespace, keys: ClusterKeys
) -> Spec:
    words = [*ROUTER, "--host", options.host, "--control", control, "--mode", options.mode]
    if options.refuse_late:
        if options.ttft_slo is None and options.tpot_slo is None:
            raise ConfigError("--refuse-late needs --ttft-slo or --tpot-slo: what is late?")
        words.append("--refuse-late")
    for option in _PASSED_ON:
        value = getattr(options, option)
        if value is not None:
            words += ["--" + option.replace("_", "-"), str(value)]
    return Spec(
        name,
        None,
        _with_port(words),
        Placement(),
        ready_path="/tetri/v1/instances",
        host=options.host,
        port=port,
        environment=keys.of_router,
        key=next(iter(keys.clients), ""),
        certificate=_certificate(options),
    )


def _certificate(options: argparse.Namespace) -> str | None:
    if not has_tls(options):
        return None
    path: str = options.ssl_certfile
    fingerprint_of(path)  # there is one
    return path


def _with_port(words: list[str]) -> Callable[[int], list[str]]:
    return lambda port: [*words, "--port", str(port)]
