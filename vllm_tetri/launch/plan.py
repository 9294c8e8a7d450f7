"""From the options of `up` to the children that it keeps."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_tetri.config import CONTROL_PORT
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.machine import (
    COMPILATION,
    Machine,
    Placement,
    ServeOptions,
    free_ports,
    is_port_free,
    kv_bytes_each,
    place,
    thread_variables,
    why_taken,
)
from vllm_tetri.policy.scale import ROLES, Bounds
from vllm_tetri.router import auth
from vllm_tetri.router.command import objective_of
from vllm_tetri.types import Mode, Role, server_name

SERVE = (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve")
ROUTER = (sys.executable, "-P", "-m", "vllm_tetri.cli", "router")
ROUTER_NAME = "router"
HOST = "127.0.0.1"
LOCAL = "local"  # of `--on`
MAX_PORT = 65535

# `up` sets these itself; given after `--` they would contradict it.
_OWN_OPTIONS = frozenset({"role", "tetri-instance", "tetri-control", "tetri-url", "uds", "host",
                          "tetri-secret-file", "port", "ssl-keyfile", "ssl-certfile"})  # fmt: skip
# Options that `up` hands to its routers unchanged.
_PASSED_ON = ("mode", "moves", "mirror", "max_in_flight", "max_queue_delay", "flip", "flip_after",
              "flip_lease", "ttft_slo", "tpot_slo", "shutdown_timeout", "shared_port",
              "ssl_certfile", "ssl_keyfile", "otlp_traces_endpoint")  # fmt: skip
_GPU_MEMORY_PART = 0.9
# Tensor-parallel workers poll; where they share cores, reports come seconds late.
_SHARED_SILENT_AFTER = ("--silent-after", "10")

Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child of `up`."""

    name: str  # in the cluster and before its log lines
    words: tuple[str, ...]  # command line, but for the address of its HTTP server
    placement: Placement
    ready_path: str  # responds with 200 as soon as the child is of use
    host: str = HOST  # address that its HTTP server binds, which a node of Ray replaces
    port: int = 0  # 0 for a free one, chosen anew at every start
    environment: Environment = field(default=(), repr=False)  # has secrets
    key: str = field(default="", repr=False)  # that its HTTP server asks for, if it does
    certificate: str | None = None  # file of its certificate, if it speaks https

    def command(self, port: int) -> list[str]:
        """The command line for a port."""
        return [*self.words, "--host", self.host, "--port", str(port)]

    def with_role(self, role: Role) -> ChildSpec:
        """This instance with another role."""
        words = list(self.words)
        words[words.index("--role") + 1] = role.value
        return replace(self, words=tuple(words))


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that `up` runs."""

    instances: tuple[ChildSpec, ...]
    routers: tuple[ChildSpec, ...]
    control: str  # where they meet: one address per router, separated by commas
    spares: tuple[ChildSpec, ...] = ()  # instances that are started when the load needs them


def make_plan(
    options: argparse.Namespace, machine: Machine, serve: ServeOptions, *, may_take_default: bool
) -> LaunchPlan:
    """What to run for these options of `up` on this machine, with routers at the default control
    address only if they `may_take_default`; ConfigError if there is no instance, a contradiction,
    too little machine, or a port in use."""
    for name in serve.names & _OWN_OPTIONS:
        raise ConfigError(
            f"--{name} cannot be given after --: `up` sets it for every instance; options of the "
            "router come before the --"
        )
    roles = _roles(options, machine, serve.num_workers)
    placements = _placements(options, roles, machine, serve.num_workers)
    ports = _router_ports(options)
    controls = _control_addresses(options.routers, machine.address, may_take_default, ports)
    of_instances, of_routers = _keys(options, serve.api_keys)
    workers = len(roles) * serve.num_workers
    words = [*SERVE, options.model, *options.tail]
    words += ["--tetri-control", ",".join(controls)]
    if options.otlp_traces_endpoint and "otlp-traces-endpoint" not in serve.names:
        words += ["--otlp-traces-endpoint", options.otlp_traces_endpoint]
    names = [f"{role.value}-{roles[:index].count(role)}" for index, role in enumerate(roles)]
    taken = {*ports, *(int(each.rpartition(":")[2]) for each in controls)}
    instance_ports = _instance_ports(options, len(roles), taken | _shared_port(options, taken))
    instances = [
        ChildSpec(
            name,
            (*words, *_memory_options(serve.names, placement, machine, workers),
             "--role", role.value, "--tetri-instance", name),
            placement,
            ready_path="/health",
            port=instance_port,
            environment=of_instances,
        )
        for name, role, placement, instance_port in zip(
            names, roles, placements, instance_ports, strict=True)
    ]  # fmt: skip
    certificate: str | None = options.ssl_certfile if auth.has_tls(options) else None
    if certificate is not None:
        auth.fingerprint_of(certificate)  # there is one
    shares = serve.num_workers > 1 and not machine.gpus and workers > len(machine.cores)
    silent_after = _SHARED_SILENT_AFTER if shares else ()
    routers = [
        ChildSpec(
            f"{ROUTER_NAME}-{index}" if options.routers > 1 else ROUTER_NAME,
            (*ROUTER, *_router_options(options), *silent_after, "--control", control),
            Placement(),
            ready_path="/tetri/v1/instances",
            host=options.host,
            port=port,
            environment=of_routers,
            key=dict(of_routers).get(auth.KEY_VARIABLE, "").partition("\n")[0],
            certificate=certificate,
        )
        for index, (port, control) in enumerate(zip(ports, controls, strict=True))
    ]
    spares = _spares(options, serve)
    kept = tuple(each for each in instances if each.name not in spares)
    spare = tuple(each for each in instances if each.name in spares)
    return LaunchPlan(kept, tuple(routers), ",".join(controls), spare)


def _roles(options: argparse.Namespace, machine: Machine, gpus_each: int) -> list[Role]:
    """A role for every instance: as given, or as it suits the mode and the machine."""
    mode, both = Mode(options.mode), options.both
    if mode is not Mode.SPLIT and options.prefill is options.decode is both is None:
        return [Role.BOTH] * max(1, len(machine.gpus) // gpus_each)
    prefill, decode = (int(each.most) for each in _bounds(options).values())
    if not (prefill or decode or both):
        raise ConfigError("no instance to start; give --prefill and --decode, or --both")
    if mode is Mode.SPLIT and not both and not (prefill and decode):
        missing = "decode" if prefill else "prefill"
        raise ConfigError(f"a cluster needs a {missing} instance; add --{missing} 1 or --both 1")
    return [*[Role.PREFILL] * prefill, *[Role.DECODE] * decode, *[Role.BOTH] * (both or 0)]


def _spares(options: argparse.Namespace, serve: ServeOptions) -> set[str]:
    """Names of the instances between the bounds of their role, which a watcher asks for."""
    ranges = {role: each for role, each in _bounds(options).items() if each.is_range}
    if ranges and (options.mode != Mode.SPLIT or options.flip != "balance"):
        raise ConfigError(
            f"--{min(ranges)} MIN:MAX needs --mode split and --flip balance, whose watcher knows "
            "how many instances of a role the load needs"
        )
    if ranges and serve.names & {"data-parallel-size", "dp"}:
        raise ConfigError("--data-parallel-size: give one number of instances, not MIN:MAX")
    return {
        f"{role}-{index}"
        for role, each in ranges.items()
        for index in range(each.least, int(each.most))
    }


def _bounds(options: argparse.Namespace) -> dict[Role, Bounds]:
    """How many instances of each role there may be: without an option one, or none beside
    instances that do both."""
    number = 0 if options.both else 1
    return {role: getattr(options, role) or Bounds(number, number) for role in ROLES}


def _placements(
    options: argparse.Namespace, roles: list[Role], machine: Machine, workers: int
) -> list[Placement]:
    if options.on == LOCAL:
        return place(roles, machine, options.placement, workers)
    # Ray hands CPUs and GPUs out.
    each = Placement(environment=thread_variables((options.cpus_each or workers) // workers))
    return [each] * len(roles)


def _router_ports(options: argparse.Namespace) -> list[int]:
    """The given port and those that follow it, one for every router; or free ones."""
    if not is_port_free(0, options.host):
        raise ConfigError(f"--host {options.host}: that is no address of this machine")
    if not options.port:
        return free_ports(options.routers, options.host)
    return _ports("--port", options.port, options.routers, options.host)


def _shared_port(options: argparse.Namespace, taken: set[int]) -> set[int]:
    """The port that all routers have, if there is one, and which is not `taken`."""
    port = options.shared_port
    if port in taken:
        raise ConfigError(f"--shared-port {port}: a router has port {port}; choose another")
    return {*_ports("--shared-port", port, 1, options.host)} if port else set()


def _instance_ports(options: argparse.Namespace, number: int, taken: set[int]) -> list[int]:
    """A port per instance, none of those that routers have; 0 for any free one at every start."""
    base = options.instance_port_base
    ports = [0] * number if base is None else _ports("--instance-port-base", base, number, HOST)
    for port in taken.intersection(ports):
        raise ConfigError(f"--instance-port-base {base}: a router has port {port}; choose another")
    return ports


def _ports(option: str, first: int, number: int, host: str) -> list[int]:
    for port in range(first, first + number):
        if why := why_taken(port, host) if 0 < port <= MAX_PORT else "does not exist":
            raise ConfigError(f"port {port} of {host} {why}; choose another with {option}")
    return [*range(first, first + number)]


def _control_addresses(
    number: int, host: str, may_take_default: bool, taken: Collection[int]
) -> list[str]:
    """The default address first, so that instances started by hand find a router; other
    addresses when it is taken, or about to be by a second cluster on this machine."""
    may_take_default = may_take_default and CONTROL_PORT not in taken
    ports = [CONTROL_PORT] if may_take_default and is_port_free(CONTROL_PORT, host) else []
    return [f"tcp://{host}:{port}" for port in ports + free_ports(number - len(ports), host)]


def _memory_options(
    given: frozenset[str], placement: Placement, machine: Machine, workers: int
) -> list[str]:
    words: list[str] = []
    if placement.gpu_sharers > 1 and "gpu-memory-utilization" not in given:
        part = _GPU_MEMORY_PART / placement.gpu_sharers
        words += ["--gpu-memory-utilization", f"{part:.3f}"]
    if machine.gpus:
        return words
    if "kv-cache-memory-bytes" not in given:
        words += ["--kv-cache-memory-bytes", str(kv_bytes_each(workers, machine))]
    # Compiling triples the start and gains nothing worth it on a CPU.
    return words if given & COMPILATION else [*words, "--enforce-eager"]


def _router_options(options: argparse.Namespace) -> list[str]:
    objective_of(options)  # there is one if there must be one
    words = ["--refuse-late"] if options.refuse_late else []
    bounds = _bounds(options)
    if any(each.is_range for each in bounds.values()):
        for role, each in bounds.items():
            words += [f"--{role}", str(each)]
    for name in _PASSED_ON:
        value = getattr(options, name)
        if value is not None:
            words += ["--" + name.replace("_", "-"), str(value)]
    return words


def _keys(
    options: argparse.Namespace, in_command: tuple[str, ...]
) -> tuple[Environment, Environment]:
    """Variables with API keys: those of instances, and those of routers. They are not in a
    command, because every user of this machine may read that.

    Instances get a key of their own, new at each start: their ports are on the loopback
    interface, which is open to every user of this machine. The router also asks clients for
    keys that were meant for instances only (`in_command`): else it would open instances to all.
    """
    clients = auth.keys_of(options) or in_command
    if not clients:
        return (), ()
    own = os.environ.get(auth.INSTANCE_KEY_VARIABLE) or secrets.token_urlsafe(32)
    key = in_command[0] if in_command else own
    of_routers = ((auth.KEY_VARIABLE, "\n".join(clients)), (auth.INSTANCE_KEY_VARIABLE, key))
    return () if in_command else ((auth.KEY_VARIABLE, key),), of_routers


def change_for(here: set[str], awaited: set[str], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a router asks for (`GET /tetri/v1/instances`) of the instances that are `here`,
    while all are ready, those that are `awaited` included; empty if nothing. Others were started by
    hand, and may be of another model."""
    rows = content.get("instances", ())
    models = {server_name(row["id"]): row["model"] for row in rows}
    is_done = awaited <= models.keys() and all(row["state"] == "ready" for row in rows)
    ours = {models[name] for name in here & models.keys()}
    for change in content.get("changes", ()) if is_done else ():
        drained = change["drained"]
        if change["model"] in ours and (not drained or server_name(drained) in here):
            return dict(change)
    return {}
