"""Configuration of one instance: one frozen value, checked when it is built.

The same names serve the command line (``--tetri-chunk-size``), the file given
with ``--tetri-config`` (``chunk_size``) and the dictionary that travels in
vLLM's ``kv_connector_extra_config``. An absent key means its default, a wrong
one is an error that names the option and what it may be; nothing is guessed.
"""

from __future__ import annotations

import ipaddress
import re
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec.inspect import (
    EnumType,
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.dispatch import DispatchPolicy
from vllm_tetri.policy.lengths import End
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.types import Role

Positive = Annotated[int, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]

PushLevel = Literal["chunk", "request"]
Link = Literal["auto", "shm", "tcp"]
Switch = Literal["off", "on"]

DEFAULT_CONTROL = "tcp://127.0.0.1:18555"


class TetriConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that an instance needs to know beyond vLLM's own options.

    Attributes:
        role: Preference of placement.
        instance: Name in the cluster; derived from role and port when empty.
        url: Base URL that the router uses to reach this instance's HTTP server.
        control: ZeroMQ addresses of the routers, one or more.
        host: Address that the KV receiver binds and peers dial.
        secret_file: Holds what the processes of the cluster share; empty: nothing, and then
            every address is one of this machine's own.
        prefill_policy: Order of waiting prompts.
        sched_batch: Prompts taken from the queue and ordered together (the
            paper's PrefillSchedBatch, section 3.3.1).
        chunk_size: Prompt tokens per step, decodes come on top; "auto" finds where
            this model saturates this device (section 3.3.3).
        pad: Fill up a chunk that is not full, as the paper does.
        tbt_slo_s: Longest time between two tokens of an answer that is aimed at:
            says how many prompt tokens share a step with decodes
            (Sarathi-Serve). None means a chunk.
        push: Send KV when a chunk is done, or once per request (the paper's way).
        device: What it computes on; instances of the same name share it, and slow each
            other down. Empty: named by its host and its cores or GPUs.
        link: How KV travels: shared memory, TCP, or whichever fits.
        arena_bytes: Size of the receive arena, in bytes.
        streams: TCP connections per peer that carry KV.
        report_period_s: Seconds between load reports.
        transfer_timeout_s: Longest wait for progress of one transfer.
        hold_timeout_s: Longest time that arrived KV waits for its request.
        decode_policy: When a request enters the decode batch (section 3.4).
        reserve_end: Which end of a predicted bucket is reserved for an answer.
        dispatch_policy: Which decode instance with room gets a request (section 3.3.4).
        predictor: Folder of a length predictor (section 3.3.2), "oracle" for the truth
            where it is known, or "none".
        predictor_accuracy: Share of prompts that the oracle is right about.
        predictor_mode: Whether prompts are computed while they are predicted, or after.
        granularity: Width of a predicted bucket, in tokens; None means the
            predictor's own, and the paper's 200 where it has none.
        load_budget_bytes: A load larger than this does not run inside a step
            that other requests wait for.
    """

    role: Role
    instance: str = ""
    url: str = ""
    control: tuple[str, ...] = (DEFAULT_CONTROL,)
    host: str = "127.0.0.1"
    secret_file: str = ""
    prefill_policy: PrefillPolicy = PrefillPolicy.SJF
    sched_batch: Positive = 16  # paper section 5.2.1
    chunk_size: Positive | Literal["auto"] = 512  # paper section 3.3.3: the knee of its V100
    pad: Switch = "off"
    tbt_slo_s: Seconds | None = None
    device: str = ""
    push: PushLevel = "chunk"
    link: Link = "auto"
    arena_bytes: Positive = 1 << 28
    streams: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    report_period_s: Seconds = 0.1  # paper section 3.4: every 100 ms
    transfer_timeout_s: Seconds = 30.0
    hold_timeout_s: Seconds = 60.0
    decode_policy: DecodePolicy = DecodePolicy.RESERVE_DYNAMIC  # paper section 5.2.3
    reserve_end: End = End.EXPECTED
    dispatch_policy: DispatchPolicy = DispatchPolicy.POWER_OF_TWO
    predictor: Annotated[str, msgspec.Meta(min_length=1)] = "none"
    predictor_accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    predictor_mode: Literal["parallel", "sequential"] = "parallel"
    granularity: Positive | None = None
    load_budget_bytes: Positive = 64 << 20

    def __post_init__(self) -> None:
        has_secret = bool(self.secret_file)
        require_guarded("--tetri-host", self.host, has_secret=has_secret)
        if self.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"--tetri-host {self.host}: peers cannot dial that; give the address of this "
                "machine that they reach"
            )
        for address in self.control:
            require_guarded("--tetri-control", control_host(address), has_secret=has_secret)


def decode_config(raw: dict[str, Any]) -> TetriConfig:
    """Build a config from plain values.

    Raises:
        ConfigError: A key is unknown or a value has the wrong type or range;
            the message names the option and what it may be.
    """
    try:
        return msgspec.convert(raw, TetriConfig, strict=False)
    except msgspec.ValidationError as error:
        path = re.search(r"`\$\.(\w+)", str(error))
        if path is None:  # an unknown key, or a check of TetriConfig's own
            raise ConfigError(str(error)) from error
        raise refusal(path[1], raw.get(path[1])) from error


def refusal(name: str, value: object) -> ConfigError:
    """What to say of a field that has a value which it may not have."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return ConfigError(f"{option_of(name)} {shown}: must be {allowed_values(name)}")


def option_of(name: str) -> str:
    """The command line's word for a field."""
    return "--role" if name == "role" else "--tetri-" + file_key_of(name)


def file_key_of(name: str) -> str:
    """A field's name without its unit, as the command line and files have it."""
    return name.replace("-", "_").removesuffix("_s").replace("_", "-")


@cache
def allowed_values(name: str) -> str:
    """What a field may be, in words."""
    info = type_info(TetriConfig)
    (field,) = (field for field in info.fields if field.name == name)  # type: ignore[attr-defined]
    return _words(field.type) + (" seconds" if name.endswith("_s") else "")


def _words(kind: Type) -> str:
    match kind:
        case UnionType():
            return " or ".join(
                _words(each) for each in kind.types if not isinstance(each, NoneType)
            )
        case LiteralType():
            return _one_of([str(value) for value in kind.values])
        case EnumType():
            return _one_of([_value(member) for member in kind.cls])
        case IntType():
            return "a whole number " + _range(kind)
        case FloatType():
            return "a number " + _range(kind)
        case VarTupleType():
            return "a list of words"
        case _:
            return "a word"


def _value(member: Enum) -> str:
    return str(member.value)


def _one_of(words: list[str]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _range(kind: IntType | FloatType) -> str:
    least = kind.ge
    if isinstance(kind, IntType) and kind.gt is not None:
        least = kind.gt + 1
    above = f"above {kind.gt}" if least is None else f"of at least {least}"
    return above if kind.le is None else f"{above} and at most {kind.le}"


def encode_config(config: TetriConfig) -> dict[str, Any]:
    """The plain values of a config; `decode_config` reads them back."""
    plain = msgspec.to_builtins(config)
    assert isinstance(plain, dict)
    return plain


def control_host(address: str) -> str:
    """Host part of ``tcp://HOST:PORT``.

    Raises:
        ConfigError: The address has another form.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal():
        raise ConfigError(f"{address!r} is no control address; write tcp://HOST:PORT")
    return host.strip("[]")


def require_guarded(option: str, host: str, *, has_secret: bool) -> None:
    """Refuse an address that other machines could reach, unless peers share a secret.

    Raises:
        ConfigError: ``host`` is not a loopback address, and there is no secret.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not has_secret:
        raise ConfigError(
            f"{option} {host}: other machines may reach what is not a loopback address, so the "
            "cluster needs a secret: `vllm-tetri secret FILE` makes one; give FILE to routers "
            "(--secret-file) and instances (--tetri-secret-file), or use 127.0.0.1"
        )
