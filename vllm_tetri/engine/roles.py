"""One place that turns a role into vLLM's own options."""

from __future__ import annotations

import argparse
import atexit
import logging
from typing import Any

from vllm_tetri.config import TetriConfig, decode_config, encode_config, option_of
from vllm_tetri.engine.options import given_options
from vllm_tetri.engine.prediction import require_predictor
from vllm_tetri.engine.versions import require_supported
from vllm_tetri.engine.window import most_chunk_tokens, require_fitting_chunk
from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.secret import read_secret, secret_file_of
from vllm_tetri.transport.leftovers import sweep_segments
from vllm_tetri.types import Role

SCHEDULER = "vllm_tetri.engine.scheduler.make_scheduler"
CONNECTOR = "TetriConnector"
CONNECTOR_MODULE = "vllm_tetri.engine.connector"
MIDDLEWARE = "vllm_tetri.engine.middleware.TetriMiddleware"
EXECUTOR = "vllm_tetri.engine.executor.CalmExecutor"
CONFIG_KEY = "tetri"

# Where vLLM's prefill saturates (paper section 3.3.3 takes 512 on its GPUs).
CPU_CHUNK_TOKENS = 256
CHUNK_TOKENS = 512

# Prompt tokens that a prefill instance takes before it answers 503: seconds of work for
# a GPU, a few minutes for a CPU. vLLM's --max-num-queued-tokens overrides it.
QUEUED_TOKENS = 131_072

# Options that a role decides. A user's own value contradicts the role.
OWNED = {
    "scheduler_cls": "--scheduler-cls",
    "kv_transfer_config": "--kv-transfer-config",
}
# Features whose KV this connector cannot carry: (attribute, is on, option).
REFUSED = (
    ("enable_lora", bool, "--enable-lora"),
    ("speculative_config", bool, "--speculative-config"),
    ("pipeline_parallel_size", lambda value: (value or 1) > 1, "--pipeline-parallel-size"),
    ("data_parallel_size", lambda value: (value or 1) > 1, "--data-parallel-size"),
    (
        "decode_context_parallel_size",
        lambda value: (value or 1) > 1,
        "--decode-context-parallel-size",
    ),
)

_log = logging.getLogger(__name__)


def expand_role(namespace: argparse.Namespace) -> None:
    """Set on a parsed namespace everything that follows from `--role`.

    Without a role nothing is changed. Running it twice changes nothing more.

    Raises:
        ConfigError: An option of ours is wrong, given without a role, or
            contradicts one of the user's.
        UnsupportedError: vLLM's version or an enabled feature cannot be carried.
    """
    role = getattr(namespace, "role", None)
    if role is None:
        _refuse_orphans(namespace)
        return
    if getattr(namespace, "scheduler_cls", None) == SCHEDULER:
        return

    import vllm

    require_supported(vllm.__version__)
    _refuse_conflicts(namespace, role)
    config = config_of(namespace, Role(role))
    require_fitting_chunk(namespace, config)
    require_predictor(config)
    read_secret(config.secret_file)
    _bound_queue(namespace, config)
    namespace.scheduler_cls = SCHEDULER
    namespace.kv_transfer_config = _kv_transfer_config(config)
    # A new list: the argparse default is shared by all parsers.
    namespace.middleware = [*(namespace.middleware or []), MIDDLEWARE]
    _choose_executor(namespace)
    # On Ctrl-C vLLM kills its engine process at once, so this one clears up behind it.
    atexit.register(sweep_segments)


def config_of(namespace: argparse.Namespace, role: Role) -> TetriConfig:
    """The instance configuration that a namespace asks for."""
    given = given_options(namespace)
    port = getattr(namespace, "port", None) or 8000
    host = getattr(namespace, "host", None) or "127.0.0.1"
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else host
    scheme = "https" if getattr(namespace, "ssl_certfile", None) else "http"
    given.setdefault("instance", f"{role.value}-{port}")
    given.setdefault("url", f"{scheme}://{reachable}:{port}")
    given["secret_file"] = secret_file_of(given.get("secret_file"))
    usual_tokens = CPU_CHUNK_TOKENS if _is_cpu() else CHUNK_TOKENS
    given.setdefault("chunk_size", min(usual_tokens, most_chunk_tokens(namespace)))
    return decode_config({**given, "role": role.value})


def _refuse_orphans(namespace: argparse.Namespace) -> None:
    given = [name for name in vars(namespace) if name.startswith("tetri_")]
    if given:
        option = option_of(given[0].removeprefix("tetri_"))
        raise ConfigError(f"{option} needs --role prefill, --role decode or --role both")


def _refuse_conflicts(namespace: argparse.Namespace, role: str) -> None:
    for attribute, option in OWNED.items():
        if getattr(namespace, attribute, None) is not None:
            raise ConfigError(f"--role {role} sets {option} itself; give one of the two, not both")
    for attribute, is_on, option in REFUSED:
        if is_on(getattr(namespace, attribute, None)):
            raise UnsupportedError(
                f"{option} cannot be combined with --role {role}: its KV cannot be handed over yet"
            )
    if getattr(namespace, "headless", False):
        raise UnsupportedError(f"--headless cannot be combined with --role {role}")


def _bound_queue(namespace: argparse.Namespace, config: TetriConfig) -> None:
    """Let a prefill instance that has too much to do say so (503), for the router to go
    elsewhere. Others may hold decodes that such a bound knows nothing of."""
    if config.role is Role.PREFILL and getattr(namespace, "max_num_queued_tokens", None) is None:
        namespace.max_num_queued_tokens = QUEUED_TOKENS


def _kv_transfer_config(config: TetriConfig) -> Any:
    from vllm.config import KVTransferConfig

    # extra_config stays out of vLLM's compile cache key, additional_config would not.
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        engine_id=config.instance,
        kv_connector_extra_config={CONFIG_KEY: encode_config(config)},
    )


def _choose_executor(namespace: argparse.Namespace) -> None:
    """On CPU run the worker inside the engine process: its multiprocess executor
    polls shared memory and would steal the cores that instances share."""
    if (
        _is_cpu()
        and getattr(namespace, "distributed_executor_backend", None) is None
        and (getattr(namespace, "tensor_parallel_size", None) or 1) == 1
    ):
        namespace.distributed_executor_backend = EXECUTOR


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
