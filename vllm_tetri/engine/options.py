"""`--role` and `--tetri-*`: command line and file to `TetriConfig`.

Every field of `TetriConfig` but the role is an option of the same name with
dashes. An option that is not given leaves no attribute, so that it can come from the
file given with `--tetri-config`, and otherwise from `TetriConfig` itself.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from vllm_tetri.config import TetriConfig, allowed_values, file_key_of, option_of
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.dispatch import DispatchPolicy
from vllm_tetri.policy.lengths import End
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.types import Role

# vLLM prints the group of this title for `--help=role`.
GROUP = "Role"

HELP: dict[str, str] = {
    "instance": "name of this instance in the cluster; default: role and port",
    "url": "base URL at which the router reaches this server; default: from --host and --port",
    "control": "router control address tcp://HOST:PORT, several separated by commas",
    "host": "address of this machine that the KV receiver binds and peers dial; other than "
    "loopback only with --tetri-secret-file",
    "secret_file": "file with the secret that all processes of the cluster share, as "
    "`vllm-tetri secret` makes it; default: that of TETRI_SECRET_FILE, else none",
    "prefill_policy": "order of waiting prompts: first come, shortest, longest, or shortest "
    "remaining first (which may pause a started prompt)",
    "sched_batch": "waiting prompts that are ordered together",
    "chunk_size": "prompt tokens per step, or auto: measured at the first start, then remembered; "
    "default: 512, on CPU 256",
    "pad": "fill up a chunk that is not full, as the paper does; costs compute",
    "tbt_slo_s": "longest time in seconds between two tokens of an answer that is aimed at: sets "
    "how many prompt tokens share a step with decodes; default: a chunk",
    "device": "name of what this instance computes on; instances of the same name share it and "
    "slow each other down; default: host and cores, or GPUs",
    "push": "send KV after every chunk, or once per request when its prompt is done",
    "link": "how KV travels: shared memory, TCP, or whichever reaches the peer",
    "arena_bytes": "size of the receive arena in bytes; suffixes K, M, G",
    "streams": "TCP connections per peer that carry KV",
    "report_period_s": "seconds between load reports",
    "transfer_timeout_s": "longest wait in seconds for progress of one KV transfer",
    "hold_timeout_s": "longest time in seconds that arrived KV waits for its request",
    "decode_policy": "when a request enters the decode batch: as vLLM does, when its whole answer "
    "has room, or when everything has room until each answer ends",
    "reserve_end": "which end of a predicted length is reserved",
    "dispatch_policy": "which decode instance with room gets a request; all but power-of-two are "
    "there to be compared with",
    "predictor": "what predicts lengths of answers: a folder, oracle (the true length, where a "
    "client fixes it) or none",
    "predictor_accuracy": "share of prompts that the oracle is right about",
    "predictor_mode": "compute a prompt while its answer is predicted, or after",
    "granularity": "width of a predicted bucket in tokens; default: the predictor's own, or 200",
    "load_budget_bytes": "KV loads above this do not share a step with running decodes",
}
CHOICES: dict[str, tuple[str, ...]] = {
    "prefill_policy": tuple(policy.value for policy in PrefillPolicy),
    "push": ("chunk", "request"),
    "link": ("auto", "shm", "tcp"),
    "pad": ("off", "on"),
    "predictor_mode": ("parallel", "sequential"),
    "decode_policy": tuple(policy.value for policy in DecodePolicy),
    "reserve_end": tuple(end.value for end in End),
    "dispatch_policy": tuple(policy.value for policy in DispatchPolicy),
}
_SUFFIX = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_bytes(text: str) -> int:
    """``268435456``, ``256M`` or ``256MiB`` as a number of bytes."""
    plain = text.strip().lower().removesuffix("b").removesuffix("i")
    factor = _SUFFIX.get(plain[-1:], 1)
    digits = plain.rstrip("kmg")
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 256M")
    return int(digits) * factor


def parse_chunk_size(text: str) -> int | str:
    """``auto`` or a number of tokens."""
    return text if text == "auto" else int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add our group to one of vLLM's parsers."""
    group = parser.add_argument_group(
        GROUP, "Disaggregated prefill and decode (vllm-tetri). Nothing here acts without --role."
    )
    group.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=None,
        help="serve as a prefill or decode instance of a cluster, or as both",
    )
    group.add_argument(
        "--tetri-config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML or JSON file with the options below, without their tetri- prefix",
    )
    for name, text in HELP.items():
        default = _default_text(name)
        group.add_argument(
            option_of(name),
            dest="tetri_" + name,
            default=argparse.SUPPRESS,
            help=text if "default:" in text else f"{text}; default: {default}",
            **_argument_type(name),
        )


def _argument_type(name: str) -> dict[str, Any]:
    if name == "pad":  # a switch: `tetri-pad: on` in YAML is what `--tetri-pad` alone is
        return {"choices": CHOICES[name], "nargs": "?", "const": "on"}
    if name in CHOICES:
        return {"choices": CHOICES[name]}
    if name.endswith("_bytes"):
        return {"type": parse_bytes, "metavar": "BYTES"}
    if name.endswith("_s"):
        return {"type": _number(float, name), "metavar": "SECONDS"}
    if name == "chunk_size":
        return {"type": _number(parse_chunk_size, name), "metavar": "N|auto"}
    if name == "predictor_accuracy":
        return {"type": _number(float, name), "metavar": "SHARE"}
    if name in ("sched_batch", "streams", "granularity"):
        return {"type": _number(int, name), "metavar": "N"}
    return {"type": str, "metavar": name.upper()}


def _number(convert: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: must be {allowed_values(name)}") from None

    return parse


def _default_text(name: str) -> str:
    default = getattr(TetriConfig(role=Role.BOTH), name)
    return ",".join(default) if isinstance(default, tuple) else str(default)


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """What the user set, from the file and then from the command line.

    Raises:
        ConfigError: The file cannot be read, is not a mapping or has an unknown key.
    """
    path = getattr(namespace, "tetri_config", None)
    given = _read_file(path) if path else {}
    for name in HELP:
        value = getattr(namespace, "tetri_" + name, None)
        if value is not None:
            given[name] = value
    if isinstance(given.get("control"), str):
        given["control"] = [part.strip() for part in given["control"].split(",") if part.strip()]
    for name, value in given.items():
        if name.endswith("_bytes") and isinstance(value, str):
            given[name] = _size_in_file(name, value)
    return given


def _size_in_file(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{option_of(name)}: {error}") from error


def _read_file(path: str) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--tetri-config {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--tetri-config {path}: expected a mapping of option names to values")
    fields = {file_key_of(name): name for name in HELP}
    given = {}
    for key, value in raw.items():
        word = file_key_of(str(key))
        if word not in fields:
            raise ConfigError(f"--tetri-config {path}: {_unknown(str(key), fields)}")
        if fields[word] == "pad" and isinstance(value, bool):  # YAML 1.1 reads on as true
            value = "on" if value else "off"
        given[fields[word]] = value
    return given


def _unknown(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(file_key_of(key), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
    return f"there is no option {key}{hint}"
