"""Kinds of links that carry KV between instances, and the option that names one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.util import find_spec

from vllm_tetri.errors import ConfigError

# Moved by the C++ core; the others by orders that the sender's caller takes.
CORE_KINDS = ("shm", "tcp")
ARENA_KINDS = ("ipc", "nccl")  # into an arena in a device's memory
DEVICE_KINDS = ("dma", *ARENA_KINDS)  # from a device's memory only
KINDS = (*CORE_KINDS, *DEVICE_KINDS, "nixl")

_EMULATED = "emulate:"
_BANDWIDTHS = {"GB/s": 1e9, "MB/s": 1e6, "Gbit/s": 1e9 / 8}
_LATENCIES = {"us": 1e-6, "ms": 1e-3}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z/]+)")


@dataclass(frozen=True, slots=True)
class LinkOption:
    """A kind of link, or `auto`; `emulated` is the speed it shall seem to have: bytes/s, and
    seconds for each write."""

    kind: str
    emulated: tuple[float, float] | None = None


def parse_link(text: str) -> LinkOption:
    """Read ``auto``, a kind, or ``emulate:25GB/s,5us`` with or without ``,KIND``. ConfigError if
    it is something else."""
    if not text.startswith(_EMULATED):
        return LinkOption(_kind(text, text))
    bandwidth, _, rest = text.removeprefix(_EMULATED).partition(",")
    latency, _, kind = rest.partition(",")
    bytes_per_s = _quantity(text, bandwidth, _BANDWIDTHS)
    latency_s = _quantity(text, latency, _LATENCIES)
    if not bytes_per_s:
        raise ConfigError(f"--tetri-link {text}: a link needs a bandwidth above 0")
    return LinkOption(_kind(text, kind or "auto"), (bytes_per_s, latency_s))


def link_kinds(option: str, *, is_device: bool) -> list[str]:
    """Kinds of links that a sender may use, the best first; `is_device`: its KV is in a device's
    memory. ConfigError if the option's kind cannot carry that."""
    kind = parse_link(option).kind
    if kind == "auto":
        nixl = ["nixl"] if find_spec("nixl") is not None else []
        return ["dma" if is_device else "shm", *nixl, "tcp"]
    if kind in DEVICE_KINDS and not is_device:
        raise ConfigError(
            f"--tetri-link {option}: {kind} copies from a device's memory, and the KV of this "
            "instance is in host memory; use auto"
        )
    return [kind]


def _kind(option: str, kind: str) -> str:
    if kind not in ("auto", *KINDS):
        raise ConfigError(
            f"--tetri-link {option}: must be auto, {', '.join(KINDS)} or "
            f"{_EMULATED}BANDWIDTH,LATENCY[,KIND], for example {_EMULATED}25GB/s,5us"
        )
    return kind


def _quantity(option: str, text: str, units: dict[str, float]) -> float:
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in units or not math.isfinite(float(found[1])):
        raise ConfigError(
            f"--tetri-link {option}: {text!r} must be a number and {' or '.join(units)}, as in "
            f"{_EMULATED}25GB/s,5us"
        )
    return float(found[1]) * units[found[2]]
