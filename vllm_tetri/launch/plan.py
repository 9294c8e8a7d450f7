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
from vllm_tetri.launch.machine import free_port, is_port_free
from vllm_tetri.policy.placement import (
    Machine,
    Placement,
    Sharing,
    has_choice,
    kv_bytes_each,
    place,
)
from vllm_tetri.types import Mode, Role

SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
ROUTER = (sys.executable, "-m", "vllm_tetri.cli", "router")
ROUTER_NAME = "router"
HOST = "127.0.0.1"
DEFAULT_MODE = Mode.ADAPTIVE

# `up` sets these itself; given after `--` they would contradict it.
_OWN_OPTIONS = ("port", "host", "role", "tetri-instance", "tetri-control", "tetri-url", "uds")
_COMPILATION = {"enforce-eager", "no-enforce-eager", "compilation-config", "cc"} | {
    "O", "O0", "O1", "O2", "O3"
}  # fmt: skip
_GPU_MEMORY_PART = 0.9

# What vLLM's --dtype means; "auto" is bfloat16 for nearly every model on a CPU.
_DTYPES = {"float": "float32", "float32": "float32", "half": "float16", "float16": "float16"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `up` runs; the router comes last.

    Attributes:
        specs: The children.
        control: Where instances and the router meet.
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


def make_plan(options: argparse.Namespace, machine: Machine) -> Plan:
    """What to run for these options of `up` on this machine.

    Raises:
        ConfigError: No instance, a contradiction, too little machine, or a port in use.
    """
    gpus_each = _gpus_each(options.tail)
    roles = _roles(options, machine, gpus_each)
    given = given_options(options.tail)
    _refuse_own_options(given)
    _check_port(options)
    control = _control_address()
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
        )
        for name, role, placement in zip(_names(roles), roles, placements, strict=True)
    ]
    return Plan(
        (*specs, _router(options, control)),
        control,
        _DTYPES.get(_value(options.tail, "--dtype"), "bfloat16"),
        has_choice(roles, machine, Sharing(options.placement)),
    )


def with_sharing(plan: Plan, machine: Machine, sharing: Sharing) -> Plan:
    """The plan with its instances placed anew, on a CPU host."""
    *instances, router = plan.specs
    roles = [spec.role for spec in instances if spec.role is not None]
    placed = [
        replace(spec, placement=placement)
        for spec, placement in zip(instances, place(roles, machine, sharing), strict=True)
    ]
    return replace(plan, specs=(*placed, router), is_sharing_open=False)


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
    number = _value(tail, "-tp", "--tensor-parallel-size")
    return int(number) if number.isdigit() and int(number) > 0 else 1


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


def _instance(name: str, role: Role, serve: list[str], placement: Placement) -> Spec:
    words = [*serve, "--role", role.value, "--tetri-instance", name]
    return Spec(name, role, _with_port(words), placement, ready_path="/health", host=HOST)


def _router(options: argparse.Namespace, control: str) -> Spec:
    words = [*ROUTER, "--host", options.host, "--control", control, "--mode", options.mode]
    if options.refuse_late:
        if options.ttft_slo is None and options.tpot_slo is None:
            raise ConfigError("--refuse-late needs --ttft-slo or --tpot-slo: what is late?")
        words.append("--refuse-late")
    for name in ("max_in_flight", "flip", "flip_after", "ttft_slo", "tpot_slo"):
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
