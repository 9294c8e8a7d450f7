"""`vllm-tetri up`: a cluster on one machine, from start to clean end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vllm_tetri.config import CONTROL_PORT
from vllm_tetri.errors import ConfigError
from vllm_tetri.launch.cluster import KeptCluster
from vllm_tetri.launch.doctor import shared_memory
from vllm_tetri.launch.machine import (
    CoreSharing,
    Machine,
    ServeOptions,
    claim,
    inspect,
    read_serve_options,
    require_vllm,
)
from vllm_tetri.launch.plan import LOCAL, make_plan
from vllm_tetri.launch.process import ChildProcess
from vllm_tetri.logs import LEVEL_VARIABLE, configure_logging
from vllm_tetri.router.command import add_serving_options, bounds, count, number, port, positive
from vllm_tetri.security import VALUE_VARIABLE, VARIABLE, in_memory, share_secret

if TYPE_CHECKING:
    from vllm_tetri.launch.cluster import Nodes

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `up`."""
    add = parser.add_argument
    # fmt: off
    add("model", help="model name or folder, as for vllm serve")
    add("--on", default=LOCAL, metavar="local|ray|ADDRESS",
        help="where instances run: on this machine, or on the nodes of a Ray cluster (needs "
        "pip install '.[ray]' in the clone): ray is the running one or a new one on this machine, "
        "an address is HOST:PORT or ray://HOST:PORT; routers run here (default: %(default)s)")
    add("--cpus-each", type=count, metavar="N",
        help="CPUs that an instance takes of a Ray node (default: one per worker)")
    add("--prefill", type=bounds, metavar="N|MIN:MAX",
        help="prefill instances; between two bounds instances flip, start and drain as the load "
        "needs (default: 1, or 0 with --both; without any count see --both)")
    add("--decode", type=bounds, metavar="N|MIN:MAX",
        help="decode instances (default: as --prefill)")
    add("--both", type=number(int, lambda value: value >= 0, "a whole number"), metavar="N",
        help="instances for prefill and decode (default: 0; without any count, in mode adaptive "
        "or whole: one per GPU or group of --tensor-parallel-size GPUs, one on a CPU host)")
    add("--routers", type=count, default=1, metavar="N",
        help="routers; give several of them a --shared-port, or put a load balancer in front "
        "(default: %(default)s)")
    add("--host", default="127.0.0.1", help="address of the router (default: %(default)s)")
    add("--port", type=port, default=8000,
        help="port of the router, 0 for a free one; further routers have the ports that follow "
        "(default: %(default)s)")
    add("--instance-port-base", type=count, metavar="PORT",
        help="HTTP port of the first instance; further instances have the ports that follow "
        "(default: free ports, chosen anew at every start)")
    add("--placement", choices=get_args(CoreSharing),
        help="CPU hosts: every instance has cores of its own, or all instances share all cores "
        "with prefill at a low priority (default: own-cores, or shared-cores where there are "
        "fewer cores than instances)")
    add("--start-timeout", type=positive, default=900.0, metavar="SECONDS",
        help="longest time until an instance is ready (default: %(default)g)")
    add("--secret-file", metavar="FILE",
        help="secret of the cluster, see `vllm-tetri secret` "
        f"(default: ${VARIABLE}, else the secret in ${VALUE_VARIABLE}, else a new one, whose place "
        "the ready file names)")
    add("--log-dir", type=Path, metavar="DIR",
        help="write everything that NAME prints to DIR/NAME.log (default: not written)")
    add("--ready-file", type=Path, metavar="FILE",
        help="write addresses and process ids to FILE as JSON when all instances are ready; "
        "removed at the end (default: not written)")
    add("--verbose", action="store_true", help="show every line of every instance")
    # fmt: on
    add_serving_options(parser)
    parser.set_defaults(flip_lease=None)  # no option: `run` makes one where it is needed


def run(options: argparse.Namespace) -> int:
    """Bring the cluster up and keep it up until a signal asks to stop.

    Returns:
        0 after one Ctrl-C, or SIGTERM, which lets requests end first; 130 after a second one; 1
        when the cluster cannot be brought up.
    """
    if options.log_level is not None:  # children follow the same variable
        os.environ[LEVEL_VARIABLE] = options.log_level
    configure_logging()
    require_vllm()
    serve = read_serve_options(options.model, options.tail)
    _refuse_of_others(options)
    # One of several routers decides on roles; the kernel forgets the lease when it ends.
    if options.routers > 1:
        options.flip_lease = in_memory("tetri-lease")
    with claim(CONTROL_PORT) as is_ours, _nodes(options, serve) as (nodes, machine):
        plan = make_plan(options, machine, serve, may_take_default=is_ours)
        if options.ready_file is not None:
            try:
                options.ready_file.unlink(missing_ok=True)  # of a cluster that was killed
            except OSError as error:
                raise ConfigError(f"--ready-file {options.ready_file}: {error}") from error
        if options.log_dir is not None:
            try:
                options.log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--log-dir {options.log_dir}: {error}") from error
        memory = shared_memory()
        level, advice = (INFO, "") if memory.is_fine else (WARNING, f"; {memory.advice}")
        _log.log(level, "%s: %s%s", memory.subject, memory.fact, advice)
        return asyncio.run(KeptCluster(options, plan, nodes).run())


def _refuse_of_others(options: argparse.Namespace) -> None:
    """Refuse options of the other kind of place with a ConfigError."""
    is_local = options.on == LOCAL
    for name in ("cpus_each",) if is_local else ("placement", "instance_port_base"):
        if getattr(options, name) is not None:
            why = "needs --on ray" if is_local else "needs --on local: Ray places instances"
            raise ConfigError(f"--{name.replace('_', '-')} {why}")


@contextlib.contextmanager
def _nodes(options: argparse.Namespace, serve: ServeOptions) -> Iterator[tuple[Nodes, Machine]]:
    """Where instances start, and what there is for them, as long as the context is open."""
    options.secret_file = share_secret(options.secret_file)
    if options.on == LOCAL:
        yield ChildProcess, inspect(serve)
        return
    try:  # slow to import, and an extra
        from vllm_tetri.launch.nodes import RayNodes
    except ImportError as error:
        raise ConfigError(
            f"--on {options.on} needs Ray: pip install '.[ray]' in the clone ({error})"
        ) from error
    cpus_each, room_s = options.cpus_each or serve.num_workers, options.start_timeout
    nodes = RayNodes(options.on, serve.num_workers, cpus_each, room_s, options.secret_file)
    try:
        yield nodes, nodes.machine()
    finally:
        nodes.close()
