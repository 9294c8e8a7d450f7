"""A role becomes vLLM's own options, or is refused with a reason.

Before the model is loaded: `expand_role`, from the parsed command line. In the engine, when
the model is known: `require_transferable` and `identity_of`.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import os
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import vllm

from vllm_tetri import SUPPORTED_VLLM
from vllm_tetri.config import (
    TetriConfig,
    control_host,
    decode_config,
    encode_config,
    is_loopback,
    option_of,
)
from vllm_tetri.engine.compat import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    current_platform,
    is_cpu,
)
from vllm_tetri.engine.prediction import require_predictor
from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.security import read_secret, secret_file_of
from vllm_tetri.transport.segments import sweep_segments
from vllm_tetri.types import Role

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCHEDULER = "vllm_tetri.engine.scheduler.make_scheduler"
CONNECTOR = "TetriConnector"
CONNECTOR_MODULE = "vllm_tetri.engine.connector"
MIDDLEWARE = "vllm_tetri.engine.middleware.TetriMiddleware"
EXECUTOR = "vllm_tetri.engine.executor.CalmExecutor"
CONFIG_KEY = "tetri"
KV_PROTOCOL = "1"

# Where vLLM's prefill saturates on CPUs (paper section 3.3.3 takes 512 on its GPUs).
CPU_CHUNK_TOKENS = 256

# Prompt tokens that a prefill instance queues before it responds with 503: seconds of work
# for a GPU, a few minutes for a CPU. vLLM's --max-num-queued-tokens overrides it.
QUEUED_TOKENS = 131_072

# Options that a role decides. A user's own value contradicts the role.
OWNED = ("scheduler_cls", "kv_transfer_config")
# Features whose KV cannot be transferred: on if true, or above 1.
REFUSED = (
    "enable_lora",
    "speculative_config",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
)


def expand_role(
    namespace: argparse.Namespace, given_options: Callable[[argparse.Namespace], dict[str, Any]]
) -> None:
    """Set on a parsed namespace everything that follows from `--role`.

    Without a role nothing is changed. Running it twice changes nothing more. `given_options`
    reads the user's options from the namespace.

    Raises:
        ConfigError: An option of ours is wrong, given without a role, or
            contradicts one of the user's.
        UnsupportedError: vLLM's version or an enabled feature is not supported.
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

    require_supported(vllm.__version__)
    _refuse_conflicts(namespace, role)
    config = config_of(namespace, Role(role), given_options(namespace))
    require_predictor(config)
    read_secret(config.secret_file)
    # A prefill instance that has too much to do says so (503), for the router to go elsewhere.
    # Others may hold decodes that such a bound knows nothing of.
    if config.role is Role.PREFILL and getattr(namespace, "max_num_queued_tokens", None) is None:
        namespace.max_num_queued_tokens = QUEUED_TOKENS
    namespace.scheduler_cls = SCHEDULER
    namespace.kv_transfer_config = kv_transfer_config(config)
    # A new list: the argparse default is shared by all parsers.
    namespace.middleware = [*(namespace.middleware or []), MIDDLEWARE]
    # On CPU run the worker inside the engine process: vLLM's multiprocess executor polls shared
    # memory and would steal the cores that instances share.
    is_alone = (getattr(namespace, "tensor_parallel_size", None) or 1) == 1
    if is_cpu() and is_alone and getattr(namespace, "distributed_executor_backend", None) is None:
        namespace.distributed_executor_backend = EXECUTOR
    # On Ctrl-C vLLM kills its engine process at once, so this one removes its segments.
    atexit.register(sweep_segments)


def require_supported(version: str) -> None:
    """Refuse a vLLM release (a local part such as ``+cpu`` aside) that is not supported.

    Raises:
        UnsupportedError: The release is not in `SUPPORTED_VLLM`.
    """
    if version.partition("+")[0] not in SUPPORTED_VLLM:
        raise UnsupportedError(
            f"--role needs vLLM {' or '.join(SUPPORTED_VLLM)}, this is {version}; install a "
            "supported version, or leave --role out to run stock vLLM"
        )


def config_of(namespace: argparse.Namespace, role: Role, given: dict[str, Any]) -> TetriConfig:
    """Return the instance configuration that a namespace asks for.

    Raises:
        ConfigError: A value is wrong, or routers could not reach the default URL.
    """
    port = getattr(namespace, "port", None) or 8000
    kv_host = str(given.get("host", "127.0.0.1"))
    name = f"{role.value}-{port}"
    if not is_loopback(kv_host):  # other hosts have the same ports
        name = f"{role.value}-{platform.node()}-{port}"
    given.setdefault("instance", name)
    is_url_given = "url" in given
    host = getattr(namespace, "host", None) or "0.0.0.0"
    reachable = kv_host if host in ("0.0.0.0", "::", "localhost") else host
    scheme = "https" if getattr(namespace, "ssl_certfile", None) else "http"
    address = f"[{reachable}]" if ":" in reachable else reachable
    given.setdefault("url", f"{scheme}://{address}:{port}")
    given["secret_file"] = secret_file_of(given.get("secret_file"))
    if is_cpu():
        given.setdefault("chunk_size", CPU_CHUNK_TOKENS)
    config = decode_config({**given, "role": role.value})
    remote = [each for each in config.control if not is_loopback(control_host(each))]
    if remote and not is_url_given and is_loopback(reachable):
        raise ConfigError(
            f"--tetri-control {remote[0]} is not on this machine and cannot reach {config.url}; "
            f"give --tetri-host ADDRESS or --tetri-url http://ADDRESS:{port} with the address of "
            "this machine"
        )
    return config


def _refuse_conflicts(namespace: argparse.Namespace, role: str) -> None:
    if getattr(namespace, "headless", False):
        raise UnsupportedError(f"--role {role} needs its API server; leave --headless out")
    for attribute in (*OWNED, *REFUSED):
        option, value = "--" + attribute.replace("_", "-"), getattr(namespace, attribute, None)
        if attribute in OWNED and value is not None:
            raise ConfigError(f"--role {role} sets {option} itself; give one of the two, not both")
        if value is True or (value and value != 1):
            raise UnsupportedError(
                f"{option} cannot be combined with --role {role}: its KV cannot be handed over yet"
            )


def kv_transfer_config(config: TetriConfig) -> Any:
    """Return vLLM's configuration of our connector."""
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


def identity_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, tensors: list[torch.Tensor]
) -> dict[str, str]:
    """Return every property that changes the bytes of a block, by name: two instances must
    agree on all of them before blocks are transferred.

    The KV layout of vLLM's CPU backend is packed for the instruction set, so
    that is a property, too.
    """
    model, on_cpu = vllm_config.model_config, tensors[0].device.type == "cpu"
    isa = torch.backends.cpu.get_cpu_capability() if on_cpu else ""
    differing = ('"_name_or_path"', '"transformers_version"')  # between equal models
    lines = model.hf_config.to_json_string(use_diff=False).splitlines()
    alike = "\n".join(line for line in lines if not line.strip().startswith(differing))
    return {
        "protocol": KV_PROTOCOL,
        "vllm": vllm.__version__,
        "model": hashlib.sha256(alike.encode()).hexdigest()[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(tensors[0].dtype).removeprefix("torch."),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "block_size": str(vllm_config.cache_config.block_size),
        "num_layers": str(len(tensors)),
        "page_shape": "x".join(str(size) for size in tensors[0].shape[1:]),
        "page_strides": "x".join(str(step) for step in tensors[0].stride()[1:]),
        "layout": str(kv_cache_config.kv_cache_layout),
        "device": tensors[0].device.type,
        "isa": isa.replace(" ", ""),
        "tensor_parallel": str(vllm_config.parallel_config.tensor_parallel_size),
    }


def require_transferable(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse a model whose KV cannot be transferred.

    Raises:
        UnsupportedError: Names the property.
    """
    model = vllm_config.model_config
    reason = ""
    groups = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    if model.is_multimodal_model:
        reason = "it is multimodal"
    elif vllm_config.speculative_config is not None:  # its options are several, one is the model
        reason = "speculative decoding is enabled"
    elif any(isinstance(spec, MLAAttentionSpec) for spec in specs):
        reason = "it uses multi-head latent attention (MLA)"
    elif len(groups) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs})) or "no KV cache"
        reason = f"its KV cache is hybrid ({len(groups)} groups: {kinds})"
    if reason:
        raise UnsupportedError(
            f"--role cannot serve {model.model}: {reason}, and that KV cannot be handed over "
            "yet; run it without --role"
        )


def device_place() -> str:
    """Return the host and what of it this engine computes on; instances with an equal value
    share it."""
    if is_cpu():
        return f"{platform.node()} cores {','.join(map(str, sorted(os.sched_getaffinity(0))))}"
    return f"{platform.node()} {current_platform.get_device_uuid(0)}"
