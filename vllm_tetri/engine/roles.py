"""A role becomes vLLM's own options, or is refused with a reason, before the model is loaded."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import platform
import socket
from collections.abc import Callable, Iterator, Sequence
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
from msgspec import structs, to_builtins

from vllm_tetri.config import (
    CONNECTOR,
    DRAIN_S,
    TetriConfig,
    control_host,
    decode_config,
    option_of,
    parse_pool,
)
from vllm_tetri.engine.compat import current_platform, is_cpu, memory_node
from vllm_tetri.engine.prediction import name_of
from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.security import read_secret, secret_file_of
from vllm_tetri.transport.segments import abandoned_segments, require_memory
from vllm_tetri.types import Role, is_loopback, rank_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

SCHEDULER = "vllm_tetri.engine.scheduler.make_scheduler"
CONNECTOR_MODULE = "vllm_tetri.engine.connector"
MIDDLEWARE = "vllm_tetri.engine.middleware.TetriMiddleware"
EXECUTOR = "vllm_tetri.engine.executor.CalmExecutor"
CONFIG_KEY = "tetri"
NAMES_KEY = "tetri_models"  # the names that the API server serves the model by
ROOT_KEY = "tetri_root"  # the model as it was told

# Options that a role decides. A user's own value contradicts the role.
OWNED = ("scheduler_cls", "kv_transfer_config")
# Options that would be served wrongly with a role, and why. What else cannot be handed over is
# served alone (`identity.why_alone`).
REFUSED = {
    "kv_offloading_size": "vLLM replaces the connector that hands KV over by another one",
    "ssl_certfile": "routers ask instances by plain HTTP; give the router the certificate",
    "uds": "routers ask instances by TCP; leave it out",
}
# One process has to know which ranks have drained.
_ONE_SERVER = (
    "--api-server-count %d: with --data-parallel-size and a role one API server is started"
)

_OWN_WINDOW = (
    "--max-model-len auto: each instance fits a window of its own, and instances whose windows "
    "differ exchange no KV. Give all of them one number."
)
_MEMORY_NODES = Path("/sys/devices/system/node")
_WORKERS = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")


def expand_role(
    namespace: argparse.Namespace, given_options: Callable[[argparse.Namespace], dict[str, Any]]
) -> None:
    """Set on a parsed namespace everything that follows from `--role`.

    Without a role nothing is changed. Running it twice changes nothing more. `given_options`
    reads the user's options from the namespace. ConfigError if an option of ours is wrong, given
    without a role, or contradicts another one; UnsupportedError if one cannot be combined.
    """
    role = getattr(namespace, "role", None)
    if role is None:
        for name in vars(namespace):
            if name.startswith("tetri_"):
                option = option_of(name.removeprefix("tetri_"))
                raise ConfigError(f"{option} needs --role prefill, --role decode or --role both")
        return
    if getattr(namespace, "scheduler_cls", None) == SCHEDULER:
        return

    _refuse_conflicts(namespace, role)
    if getattr(namespace, "max_model_len", None) == -1:
        logger.warning(_OWN_WINDOW)
    config = config_of(namespace, Role(role), given_options(namespace))
    name_of(config)
    read_secret(config.secret_file)
    num_engines = getattr(namespace, "data_parallel_size", None) or 1
    _require_free_ports(config, num_engines)
    pool_bytes, folder = parse_pool(config.kv_pool)
    try:
        require_memory(pool_bytes * num_engines, folder, psutil.virtual_memory().available)
    except OSError as error:
        why = error.strerror or error  # without the name that a file would have had
        raise ConfigError(f"--tetri-kv-pool {config.kv_pool}: {why}") from error
    namespace.scheduler_cls = SCHEDULER
    model = getattr(namespace, "model_tag", None) or namespace.model
    # Not vLLM's configuration: that knows one name only, offline the folder of the hub's cache.
    names = getattr(namespace, "served_model_name", None) or [model]
    namespace.kv_transfer_config = kv_transfer_config(config, names, model)
    # A new list: the argparse default is shared by all parsers.
    namespace.middleware = [*(namespace.middleware or []), MIDDLEWARE]
    if num_engines > 1:
        if (getattr(namespace, "api_server_count", None) or 1) > 1:
            logger.warning(_ONE_SERVER, namespace.api_server_count)
        namespace.api_server_count = 1
    # The middleware keeps this time, so vLLM need not wait once more; of several API servers none
    # is the process that gets the signal.
    has_several = (getattr(namespace, "api_server_count", None) or 1) > 1
    namespace.shutdown_timeout = ceil(config.drain_s) if has_several else 0
    if is_cpu():
        _arrange_cpu_workers(namespace)
    # On Ctrl-C vLLM kills its engine process at once, so this one removes its segments.
    atexit.register(abandoned_segments, remove=True)


def _arrange_cpu_workers(namespace: argparse.Namespace) -> None:
    """Run a lone worker inside the engine process: vLLM's multiprocess executor polls shared memory
    and would steal the cores that instances share. Let several share a memory node, of which vLLM's
    own binding wants one for each."""
    num_workers = prod(getattr(namespace, each, None) or 1 for each in _WORKERS)
    num_engines = getattr(namespace, "data_parallel_size", None) or 1
    if num_workers == 1 and getattr(namespace, "distributed_executor_backend", None) is None:
        namespace.distributed_executor_backend = EXECUTOR
    if 1 < num_workers * num_engines > len(list(_MEMORY_NODES.glob("node[0-9]*"))):
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def config_of(namespace: argparse.Namespace, role: Role, given: dict[str, Any]) -> TetriConfig:
    """Return the instance configuration that a namespace asks for; ConfigError if a value is wrong,
    or others could not reach the URL or the KV port."""
    port = getattr(namespace, "port", None) or 8000
    # Processes of one host differ by port. A pod of Kubernetes has a host name of its own.
    given.setdefault("instance", f"{role.value}-{platform.node()}-{port}")
    bound = getattr(namespace, "host", None) or "0.0.0.0"
    bound = "127.0.0.1" if bound == "localhost" else bound
    is_anywhere = bound in ("0.0.0.0", "::")
    remote = [each for each in given.get("control", ()) if not is_loopback(control_host(each))]
    given["secret_file"] = secret_file_of(given.get("secret_file"))
    # Others may be elsewhere though the router is here. KV comes the same way as requests.
    if (remote or given["secret_file"]) and not is_anywhere and not is_loopback(bound):
        given.setdefault("host", bound)
    is_host_given = "host" in given
    reachable = str(given.get("host", "127.0.0.1")) if is_anywhere else bound
    address = f"[{reachable}]" if ":" in reachable else reachable
    given.setdefault("url", f"http://{address}:{port}")
    given["drain_s"] = getattr(namespace, "shutdown_timeout", 0) or DRAIN_S
    config = decode_config({**given, "role": role.value})
    if config.push in ("layer", "auto") and not is_cpu():
        raise ConfigError(
            f"--tetri-push {config.push}: KV leaves layer by layer from host memory only, since "
            "vLLM's hooks of layers forbid full CUDA graphs; use chunk"
        )
    if remote and is_loopback(urlsplit(config.url).hostname or ""):
        option = "--tetri-host" if is_anywhere else "--host"
        raise ConfigError(
            f"--tetri-control {remote[0]} is not on this machine and cannot reach {config.url}; "
            f"give {option} ADDRESS or --tetri-url http://ADDRESS:{port} with the address of "
            "this machine"
        )
    if remote and not is_host_given:
        raise ConfigError(
            f"--tetri-control {remote[0]} is not on this machine, and instances elsewhere cannot "
            f"send KV to {config.host}; give --tetri-host ADDRESS with the address of this "
            f"machine, or --tetri-host {config.host} if all instances are on it"
        )
    return config


def _require_free_ports(config: TetriConfig, num_ranks: int) -> None:
    """Refuse KV ports of which one is taken, before the model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    for port in range(config.kv_port, config.kv_port + num_ranks) if config.kv_port else ():
        try:
            socket.create_server((config.host, port), family=family).close()
        except (OSError, OverflowError) as error:
            why = str(getattr(error, "strerror", error)).partition(" (")[0].lower()
            raise ConfigError(
                f"--tetri-kv-port {port}: {why} on {config.host}; every instance of a host, and "
                "every data-parallel rank, needs a port of its own, or 0 for any free one"
            ) from error


def _refuse_conflicts(namespace: argparse.Namespace, role: str) -> None:
    # On a further node of one instance there are only workers.
    if getattr(namespace, "headless", False) and (getattr(namespace, "nnodes", None) or 1) == 1:
        raise UnsupportedError(
            f"--role {role} needs its API server; leave --headless out, and give every node "
            "--data-parallel-hybrid-lb and --data-parallel-size-local"
        )
    for attribute in OWNED:
        if getattr(namespace, attribute, None) is not None:
            option = "--" + attribute.replace("_", "-")
            raise ConfigError(f"--role {role} sets {option} itself; give one of the two, not both")
    for attribute, reason in REFUSED.items():
        if getattr(namespace, attribute, None):
            raise UnsupportedError(
                f"--{attribute.replace('_', '-')} cannot be combined with --role {role}: {reason}"
            )


def kv_transfer_config(config: TetriConfig, names: Sequence[str], root: str) -> Any:
    """Return vLLM's configuration of our connector, for a model that is served by these names."""
    from vllm.config import KVTransferConfig

    # extra_config stays out of vLLM's compile cache key, additional_config would not.
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        engine_id=config.instance,
        kv_connector_extra_config={
            CONFIG_KEY: to_builtins(config),
            NAMES_KEY: list(names),
            ROOT_KEY: root,
        },
    )


def rank_of(vllm_config: VllmConfig) -> int | None:
    """Return which of the engines of one API server this one is, as requests name it; None if it
    is the only one. vLLM names the engines of several ranks differently (`EngineCoreProc.
    run_engine_core`); their data-parallel size is 1 if they need not step together."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    is_alone = transfer.engine_id == transfer.kv_connector_extra_config[CONFIG_KEY]["instance"]
    if is_alone or parallel.data_parallel_external_lb:
        return None
    by_node = parallel.data_parallel_hybrid_lb
    return int(parallel.data_parallel_rank_local if by_node else parallel.data_parallel_index)


def config_of_rank(config: TetriConfig, rank: int | None) -> TetriConfig:
    """Return the configuration of one rank, which has a name and a KV port of its own."""
    if rank is None:
        return config
    port = config.kv_port + rank if config.kv_port else 0
    return structs.replace(config, instance=rank_name(config.instance, rank), kv_port=port)


def first_gpu(vllm_config: VllmConfig) -> int:
    """Return which of the GPUs that this process sees is its engine's first, as vLLM's workers
    count them (`gpu_worker.Worker.init_device`)."""
    parallel = vllm_config.parallel_config
    rank = parallel.data_parallel_rank_local
    rank = parallel.data_parallel_index if rank is None else rank
    return int(rank * parallel.world_size)


def device_place(gpu: int) -> str:
    """Return the host and what of it this engine computes on, from its first GPU on; instances with
    an equal value share it."""
    if is_cpu():
        return f"{platform.node()} cores {','.join(map(str, sorted(os.sched_getaffinity(0))))}"
    if current_platform.is_cuda():
        with contextlib.suppress(NotImplementedError):  # CUDA without NVML
            return f"{platform.node()} {current_platform.get_device_uuid(gpu)}"
    # ROCm's platform counts devices that are not visible, too; XPU's has no such names.
    visible = os.environ.get(current_platform.device_control_env_var) or "all"
    return f"{platform.node()} {current_platform.device_name} {gpu} of {visible}"


@contextlib.contextmanager
def near_device(gpu: int, nodes: Path = _MEMORY_NODES) -> Iterator[None]:
    """Run on the cores next to a GPU, where there are several memory nodes: the kernel takes the
    pages that this thread touches first from their node. Threads that are started inside stay
    there. It has not run on a host with several nodes."""
    before = os.sched_getaffinity(0)
    near = before & cores_of_node(nodes, memory_node(gpu)) or before
    if near == before:
        yield
        return
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores_of_node(nodes: Path, node: int | None) -> set[int]:
    """Return the cores of a memory node; empty if the kernel does not tell."""
    cores: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in (nodes / f"node{node}" / "cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores
