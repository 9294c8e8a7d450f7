"""What is not even a request: huge bodies, garbage on other ports.

Wrong values of fields are `WRONG` in `shapes.py`.
"""

from __future__ import annotations

import json
import os
import random
import socket

import pytest

from tests.e2e.client import ask
from tests.e2e.cluster import Cluster, Stock
from tests.e2e.prompts import completion
from vllm_tetri import messages

pytestmark = pytest.mark.e2e


async def test_a_clients_own_kv_params_are_ignored(cluster: Cluster, stock: Stock) -> None:
    body = completion(40)
    evil = {**body, "kv_transfer_params": {"tetri": {"type": "decode", "transfer": "x"}}}
    assert (await ask(cluster.url, evil)).same_as(await ask(stock.url, body))


def poke(port: int, payloads: list[bytes]) -> None:
    for payload in payloads:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
                peer.sendall(payload)
                peer.settimeout(0.01)
                peer.recv(64)
        except OSError:
            pass  # being hung up on is a fine answer


def garbage(rng: random.Random, valid: list[bytes]) -> list[bytes]:
    found = [rng.randbytes(rng.randrange(1, 2000)) for _ in range(100)]
    for frame in valid:
        found += [frame[: rng.randrange(len(frame))] for _ in range(20)]
        for _ in range(40):
            changed = bytearray(frame)
            for _ in range(rng.randrange(1, 6)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            found.append(bytes(changed))
    return found


async def test_garbage_on_the_control_and_kv_ports(cluster: Cluster, stock: Stock) -> None:
    rng = random.Random(5)
    control = int(cluster.facts["control"].rpartition(":")[2])
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48)
    valid = [greeting, greeting + b"\x00\x10" + messages.encode(messages.WhoAreYou())]
    poke(control, garbage(rng, valid))
    for port in kv_ports(cluster):
        poke(port, garbage(rng, [os.urandom(64)]))
    body = completion(222)
    assert (await ask(cluster.url, body)).same_as(await ask(stock.url, body))
    assert {entry["state"] for entry in cluster.instances().values()} == {"ready"}


def kv_ports(cluster: Cluster) -> list[int]:
    """Ports that the instances said they listen on, from their logs."""
    found = []
    for name in ("prefill-0", "decode-0"):
        text = (cluster.logs / f"{name}.log").read_text(errors="replace")
        found.append(int(text.split("KV port 127.0.0.1:", 1)[1].split(",", 1)[0]))
    return found


def test_errors_are_shaped_when_the_body_is_huge(cluster: Cluster) -> None:
    host, port = cluster.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as peer:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {10**9}\r\n\r\n"
        peer.sendall(head.encode() + b" " * 1000)
        answer = peer.recv(65536)
    assert b" 413 " in answer.split(b"\r\n", 1)[0]
    assert "error" in json.loads(answer.split(b"\r\n\r\n", 1)[1] or b"{}") or b"error" in answer
