"""Configuration of one instance: one frozen value, checked when it is built.

The same names serve the command line (``--tetri-chunk-size``), the file given
with ``--tetri-config`` (``chunk_size``) and the dictionary that travels in
vLLM's ``kv_connector_extra_config``. An absent key means its default, a wrong
one is an error that names its path; nothing is guessed.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

import msgspec

from vllm_tetri.errors import ConfigError
from vllm_tetri.types import Role

Positive = Annotated[int, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

PushLevel = Literal["chunk", "request"]
Link = Literal["auto", "shm", "tcp"]

DEFAULT_CONTROL = "tcp://127.0.0.1:18555"


class TetriConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that an instance needs to know beyond vLLM's own options.

    Attributes:
        role: Preference of placement.
        instance: Name in the cluster; derived from role and port when empty.
        url: Base URL that the router uses to reach this instance's HTTP server.
        control: ZeroMQ addresses of the routers, one or more.
        host: Address that the KV receiver binds.
        chunk_size: Tokens per prefill step.
        push: Send KV when a chunk is done, or once per request (the paper's way).
        link: How KV travels: shared memory, TCP, or whichever fits.
        arena_bytes: Size of the receive arena, in bytes.
        streams: TCP connections per peer that carry KV.
        report_period_s: Seconds between load reports.
        transfer_timeout_s: Longest wait for progress of one transfer.
        hold_timeout_s: Longest time that arrived KV waits for its request.
        load_budget_bytes: A load larger than this does not run inside a step
            that other requests wait for.
    """

    role: Role
    instance: str = ""
    url: str = ""
    control: tuple[str, ...] = (DEFAULT_CONTROL,)
    host: str = "127.0.0.1"
    chunk_size: Positive = 512  # paper section 3.3.3: the knee of its V100
    push: PushLevel = "chunk"
    link: Link = "auto"
    arena_bytes: Positive = 1 << 28
    streams: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    report_period_s: Seconds = 0.1  # paper section 3.4: every 100 ms
    transfer_timeout_s: Seconds = 30.0
    hold_timeout_s: Seconds = 60.0
    load_budget_bytes: Positive = 64 << 20

    def __post_init__(self) -> None:
        require_loopback("--tetri-host", self.host)
        for address in self.control:
            require_loopback("--tetri-control", control_host(address))


def decode_config(raw: dict[str, Any]) -> TetriConfig:
    """Build a config from plain values.

    Raises:
        ConfigError: A key is unknown or a value has the wrong type or range;
            the message contains the path to it.
    """
    try:
        return msgspec.convert(raw, TetriConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"vllm-tetri configuration: {error}") from error


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
    if scheme != "tcp" or not host or not port.isdigit():
        raise ConfigError(f"{address!r} is no control address; write tcp://HOST:PORT")
    return host.strip("[]")


def require_loopback(option: str, host: str) -> None:
    """Refuse an address that other machines could reach.

    Control and KV ports have no authentication yet, so they stay on this host.

    Raises:
        ConfigError: ``host`` is not a loopback address.
    """
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"{option} {host}: only loopback addresses are accepted, because peers "
            "cannot authenticate themselves in this version; use 127.0.0.1"
        )
