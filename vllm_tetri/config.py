"""Configuration of one instance: one frozen value, checked when it is built.

`TetriConfig` is also the table of options: type, bounds, unit, default and help of
``--tetri-chunk-size`` stand at the field ``chunk_size`` and nowhere else. The same names
serve the command line, the file given with ``--tetri-config`` (``chunk-size``) and the
dictionary that travels in vLLM's ``kv_connector_extra_config``. An absent key means its
default; a wrong one is an error that names the option and the values that it accepts.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

from vllm_tetri.errors import ConfigError, ProtocolError
from vllm_tetri.plugins import Kind, load_policy
from vllm_tetri.policy.lengths import End
from vllm_tetri.transport.links import parse_link
from vllm_tetri.types import Mode, Role, is_loopback

# Which kind of policy a field names.
POLICY_KINDS: dict[str, Kind] = {
    "prefill_policy": "order",
    "decode_policy": "admission",
    "dispatch_policy": "dispatch",
}
CONNECTOR = "TetriConnector"  # what vLLM's configuration calls ours
CONTROL_PORT = 18555
DEFAULT_CONTROL = f"tcp://127.0.0.1:{CONTROL_PORT}"
DEFAULT_MODE = Mode.ADAPTIVE
# Time to finish requests after SIGTERM; Kubernetes kills a pod 30 s after it.
DRAIN_S = 25.0

PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "paper": {
        "chunk_size": 512,
        "push": "request",
        "dispatch_policy": "power-of-two-ratio",
        "reserve_end": End.LOWER.value,
    },
}


def _option(text: str, unit: str = "", default: str = "") -> msgspec.Meta:
    """Make a field an option: its help, the placeholder of its value where the name does not
    end with one, and its default where the field's own default does not say it."""
    return msgspec.Meta(description=text, extra_json_schema={"unit": unit, "shown": default})


Positive = Annotated[int, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class TetriConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that an instance needs to know beyond vLLM's own options.

    Fields without an `_option` are set by the role or by ``--tetri-preset``.
    """

    role: Role
    reserve_end: End = End.EXPECTED  # which end of a predicted length is reserved
    drain_s: Seconds = DRAIN_S  # to finish requests after SIGTERM: vLLM's --shutdown-timeout

    # fmt: off
    # In the cluster.
    instance: Annotated[str, _option(
        "name in the cluster", "NAME", "role, host name and port")] = ""
    url: Annotated[str, _option(
        "URL at which the router reaches this server", "URL", "from --host and --port")] = ""
    control: Annotated[tuple[str, ...], _option(
        "control addresses of the routers, separated by commas; a name stands for all of its "
        "addresses", "tcp://HOST:PORT",
    )] = (DEFAULT_CONTROL,)
    host: Annotated[str, _option(
        "address for receiving KV; not loopback only with a secret", "ADDRESS",
    )] = "127.0.0.1"
    kv_port: Annotated[int, msgspec.Meta(ge=0, le=65_535), _option(
        "port for receiving KV, 0 for any free one", "PORT")] = 0
    secret_file: Annotated[str, _option(
        "secret of the cluster, see `vllm-tetri secret`", "FILE",
        "$TETRI_SECRET_FILE, else the secret in $TETRI_SECRET")] = ""
    device: Annotated[str, _option(
        "name of the hardware; instances with the same name share it and slow each other down",
        "NAME", "host name with cores or GPUs")] = ""
    report_period_s: Annotated[Seconds, _option(
        "time between two load reports (paper section 3.2); routers ask for one every 0.1 s, and "
        "without that one is sent after six of these times")] = 0.1

    # Policies.
    prefill_policy: Annotated[str, _option(
        "order of waiting prompts (paper section 3.3.1): fcfs, sjf, ljf, srtf (shortest "
        "remaining first, which may pause a started prompt), mlfq (the same by levels of "
        "length), or your own as module:attribute",
        "NAME")] = "sjf"
    sched_batch: Annotated[Positive, _option(
        "waiting prompts that are ordered together (paper)", "PROMPTS",
    )] = 16  # paper section 5.2.1
    decode_policy: Annotated[str, _option(
        "when a request enters the decode batch (paper section 3.4): greedy (as vLLM), "
        "reserve-static (when its predicted output fits now), reserve-dynamic (when all "
        "outputs fit until each one ends), or your own as module:attribute",
        "NAME")] = "reserve-dynamic"  # paper section 5.2.3
    decode_order: Annotated[Literal["fcfs", "shortest"], _option(
        "which of the requests that wait for the decode batch is next: the first one, or the one "
        "with the shortest expected output, within a bound, so that none starves")] = "fcfs"
    dispatch_policy: Annotated[str, _option(
        "choice among decode instances that have capacity (paper section 3.3.4): "
        "power-of-two, power-of-two-ratio (the paper's), or your own as module:attribute",
        "NAME")] = "power-of-two"
    predictor: Annotated[str, msgspec.Meta(min_length=1), _option(
        "predictor of output lengths (paper section 3.3.2): head (learns from hidden states), "
        "histogram (of all outputs), oracle (the length that a client fixes), or a folder with "
        "predictor.py", "head|histogram|oracle|FOLDER")] = "head"
    predictor_mode: Annotated[Literal["parallel", "sequential"], _option(
        "compute a prompt while its output length is predicted, or afterwards")] = "parallel"

    # One step.
    chunk_size: Annotated[Positive | Literal["auto"], _option(
        "prompt tokens per step (paper section 3.3.3), or auto, by what steps take while serving: "
        "alone as many as saturate the device, beside decodes as many as are worth their pause",
        "TOKENS|auto")] = "auto"
    tbt_slo_s: Annotated[Seconds | None, _option(
        "target for the longest time between two output tokens; it limits the prompt tokens "
        "that share a step with decodes", default="no target")] = None
    load_budget_bytes: Annotated[Positive | None, _option(
        "KV loads above this size run outside of decode steps",
        default="32M for each distinct shard of the KV, on CPU 64M")] = None

    # Transfer of KV.
    link: Annotated[str, _option(
        "how KV travels: auto (the best that reaches the peer), shm (shared memory), tcp, nixl "
        "(where it is installed), dma, ipc or nccl (from a GPU; dma, ipc on one host; ipc, nccl "
        "into GPU memory, set on all instances); emulate:25GB/s,5us[,KIND] delays as such a link "
        "would",
        "LINK")] = "auto"
    arena_bytes: Annotated[Positive | None, _option(
        "size of the receive arena",
        default="two prompts of --max-model-len, at least 256M (CUDA: 1G); at most 1/4 of the "
        "free /dev/shm and 1/8 of the memory")] = None
    kv_pool: Annotated[str, _option(
        "memory for KV blocks that the prefix cache has no room for, from which later prompts get "
        "them back; with a folder (CPUs only), a file there, of which the kernel keeps in memory "
        "what fits",
        "SIZE[:FOLDER]", "none")] = ""
    push: Annotated[Literal["chunk", "layer", "auto", "request"], _option(
        "when KV leaves: after its chunk; of a last chunk also layer by layer while it is computed "
        "(from host memory only), or so where that pays (auto); or once per request")] = "chunk"
    streams: Annotated[int, msgspec.Meta(ge=1, le=16), _option(
        "TCP connections per peer that carry KV", "N")] = 2
    transfer_timeout_s: Annotated[Seconds, _option(
        "longest wait for progress of one KV transfer")] = 30.0
    hold_timeout_s: Annotated[Seconds, _option(
        "longest time that received KV waits for its request")] = 60.0
    # fmt: on

    def __post_init__(self) -> None:
        has_secret = bool(self.secret_file)
        require_guarded("--tetri-host", self.host, has_secret=has_secret)
        if self.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"--tetri-host {self.host}: other instances cannot dial this address; give the "
                "address of this machine that they reach"
            )
        parse_link(self.link)
        parse_pool(self.kv_pool)
        for name, kind in POLICY_KINDS.items():
            try:
                load_policy(kind, getattr(self, name))
            except ConfigError as error:
                raise ConfigError(f"{option_of(name)}: {error}") from error
        if not self.control:
            raise ConfigError("--tetri-control is empty; give the control address of a router")
        for address in self.control:
            require_guarded("--tetri-control", control_host(address), has_secret=has_secret)
            if address.endswith(":0"):
                raise ConfigError(f"--tetri-control {address}: no router has the port 0")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of `vllm serve`; ``unit`` is the placeholder for its value in the help, and
    ``allowed`` says in words what it may be."""

    flag: str
    text: str
    unit: str
    default: str
    choices: tuple[str, ...]
    allowed: str


@cache
def options() -> dict[str, Option]:
    """The options by field name, in the order of the fields."""
    found = {}
    fields = msgspec.json.schema(TetriConfig)["$defs"]["TetriConfig"]["properties"]
    for name, field in fields.items():
        if "unit" not in field:
            continue
        default, unit, allowed = field["default"], field["unit"], _words(field)
        if name.endswith("_s"):
            unit, allowed = "SECONDS", f"{allowed} seconds"
        elif name.endswith("_bytes"):
            unit, default = "BYTES", default and f"{default >> 20}M"
        elif isinstance(default, tuple):
            default = ",".join(default)
        choices, shown = tuple(field.get("enum", ())), field["shown"] or str(default)
        flag, text = option_of(name), field["description"]
        found[name] = Option(flag, text, unit, shown, choices, allowed)
    return found


def _words(schema: dict[str, Any]) -> str:
    """Say what a value may be, by its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(_words(each) for each in schema["anyOf"] if each != {"type": "null"})
    if "enum" in schema:
        *words, last = schema["enum"]
        return f"{', '.join(words)} or {last}" if words else str(last)
    most = f" and at most {schema['maximum']}" if "maximum" in schema else ""
    match schema["type"]:
        case "integer":
            least = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
            return f"a whole number of at least {least}{most}"
        case "number":
            return f"a number above {schema['exclusiveMinimum']}{most}"
        case "array":
            return "a list of words"
        case _:
            return "a word"


def decode_config(raw: dict[str, Any]) -> TetriConfig:
    """Build a config from plain values. A ConfigError names an unknown key, or the option that
    has a wrong value, and what it may be."""
    try:
        return msgspec.convert(raw, TetriConfig, strict=False)
    except msgspec.ValidationError as error:
        path = re.search(r"`\$\.(\w+)", str(error))
        if path is None or path[1] not in options():  # or a check of TetriConfig's own
            raise ConfigError(str(error)) from error
        value, option = raw[path[1]], options()[path[1]]
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        raise ConfigError(f"{option.flag} {shown}: must be {option.allowed}") from error


def option_of(name: str) -> str:
    """The command line's word for a field."""
    return "--role" if name == "role" else "--tetri-" + file_key_of(name)


def file_key_of(name: str) -> str:
    """A field's name without its unit, as the command line and files have it."""
    return name.replace("-", "_").removesuffix("_s").replace("_", "-")


def parse_size(text: str) -> int:
    """Read a number of bytes as vLLM does: ``256M`` is 2^28 and ``256m`` is 256 million;
    ValueError if it is none, or zero."""
    from vllm.utils.argparse_utils import human_readable_int

    try:
        size: int = human_readable_int(text)
    except (ValueError, argparse.ArgumentTypeError):
        size = 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size; write 256M for 2^28 or 256m for 256 million")
    return size


def parse_pool(text: str) -> tuple[int, str]:
    """Read ``SIZE[:FOLDER]`` of ``--tetri-kv-pool``: bytes, 0 without a pool, and the folder, empty
    for memory; ConfigError if it is something else."""
    size, _, folder = text.partition(":")
    try:
        return (parse_size(size) if text else 0), folder
    except ValueError as error:
        raise ConfigError(f"--tetri-kv-pool {text}: {error}") from error


def control_host(address: str) -> str:
    """Host part of ``tcp://HOST:PORT``; ConfigError if the address has another form."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(f"{address!r} is no control address; write tcp://HOST:PORT")
    if ":" in host and not (host[0] == "[" and host[-1] == "]"):
        raise ConfigError(f"{address!r} is no control address; write tcp://[{host}]:{port}")
    return host.strip("[]")


def is_here(address: str) -> bool:
    """Whether an IP address is one of this machine's, so that a socket can be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def require_reachable(instance: str, url: str, peer: str) -> None:
    """Refuse the URL of a loopback interface with a ProtocolError, if the instance's control
    connection comes from another machine's address."""
    if is_loopback(urlsplit(url).hostname or "") and not is_here(peer):
        raise ProtocolError(
            f"{instance} connects from {peer}, and only its own machine reaches {url}; start it "
            "with --tetri-url http://ADDRESS:PORT"
        )


def require_guarded(option: str, host: str, *, has_secret: bool) -> None:
    """Refuse an address that is not loopback with a ConfigError, unless peers share a secret."""
    if not is_loopback(host) and not has_secret:
        raise ConfigError(
            f"{option} {host}: other machines may reach an address that is not loopback, so the "
            "cluster needs a secret: `vllm-tetri secret FILE` makes one; give FILE to routers "
            "(--secret-file) and instances (--tetri-secret-file), or use 127.0.0.1"
        )
