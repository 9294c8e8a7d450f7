"""The option that names a link."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.transport.conftest import Backend, ended
from vllm_tetri.config import TetriConfig
from vllm_tetri.errors import ConfigError
from vllm_tetri.transport import links
from vllm_tetri.transport.links import LinkOption, link_kinds, parse_link
from vllm_tetri.transport.native import TransferState
from vllm_tetri.types import Role


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("auto", LinkOption("auto")),
        ("nixl", LinkOption("nixl")),
        ("emulate:25GB/s,5us", LinkOption("auto", (25e9, 5e-6))),
        ("emulate:0.5MB/s,2ms,tcp", LinkOption("tcp", (5e5, 2e-3))),
        ("emulate:400Gbit/s,0us,shm", LinkOption("shm", (5e10, 0.0))),
    ],
)
def test_a_link_is_read(text: str, option: LinkOption) -> None:
    found = parse_link(text)
    assert found.kind == option.kind
    assert (found.emulated is None) == (option.emulated is None)
    assert (found.emulated or ()) == pytest.approx(option.emulated or ())
    assert TetriConfig(role=Role.PREFILL, link=text).link == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rdma", "must be auto, shm, tcp, dma, ipc, nccl, nixl or emulate:BANDWIDTH,LATENCY"),
        ("", "must be auto"),
        ("emulate:0GB/s,5us", "a bandwidth above 0"),
        ("emulate:25,5us", "'25' must be a number and GB/s or MB/s or Gbit/s"),
        ("emulate:25GB,5us", "'25GB' must be"),
        ("emulate:-1GB/s,5us", "'-1GB/s' must be"),
        ("emulate:infGB/s,5us", "must be"),
        ("emulate:" + "9" * 400 + "GB/s,5us", "must be"),
        ("emulate:25GB/s", "'' must be a number and us or ms"),
        ("emulate:25GB/s,5", "'5' must be a number and us or ms"),
        ("emulate:25GB/s,5us,rdma", "must be auto"),
        ("emulate:25GB/s,5us,emulate:1GB/s,1us", "must be auto"),
    ],
)
def test_a_wrong_link_is_one_clear_error(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        TetriConfig(role=Role.PREFILL, link=text)
    assert str(error.value).startswith(f"--tetri-link {text}: ")
    assert words in str(error.value)


def test_kinds_come_in_the_order_of_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "find_spec", lambda name: None)
    assert link_kinds("auto", is_device=False) == ["shm", "tcp"]
    assert link_kinds("auto", is_device=True) == ["dma", "tcp"]
    monkeypatch.setattr(links, "find_spec", lambda name: name)
    assert link_kinds("auto", is_device=False) == ["shm", "nixl", "tcp"]
    assert link_kinds("emulate:25GB/s,5us", is_device=True) == ["dma", "nixl", "tcp"]
    assert link_kinds("emulate:25GB/s,5us,tcp", is_device=True) == ["tcp"]


@pytest.mark.parametrize("kind", links.DEVICE_KINDS)
def test_what_copies_from_a_device_is_refused_for_host_memory(kind: str) -> None:
    assert link_kinds(kind, is_device=True) == [kind]
    with pytest.raises(ConfigError, match="use auto"):
        link_kinds(kind, is_device=False)


def test_an_emulated_link_serves_one_write_after_another(core: Backend) -> None:
    """Never faster than it says, and what arrives is right."""
    cache = core.cache(num_blocks=16, page_bytes=8192, seed=1)
    receiver, sender = core.receiver(), core.sender(emulate=(2.5e6, 0.02))
    num_bytes = 16 * cache.layout.block_bytes
    transfer = sender.open(receiver.endpoint, "t", 16, cache.layout.block_bytes)
    started = time.monotonic()
    for block in range(16):
        transfer.write(cache.layout, block, np.array([block], np.int32))
    transfer.finish()
    assert ended(transfer) == TransferState.DONE, transfer.error
    assert time.monotonic() - started >= num_bytes / 2.5e6 + 0.02
    assert core.arrived(receiver, "t", cache) == cache.bytes_of(range(16))
    again = core.push(sender, receiver, "u", cache, range(16))
    again.cancel()
    core.pushed(sender, receiver, "v", cache, [1])


@pytest.mark.parametrize("emulate", [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0)])
def test_an_emulated_link_without_bandwidth_is_refused(
    shm: Backend, emulate: tuple[float, float]
) -> None:
    with pytest.raises(ValueError, match="more than 0 bytes/s"):
        shm.sender(emulate=emulate)
