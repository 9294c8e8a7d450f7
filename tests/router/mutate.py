"""Requests that are nearly right, from a seed."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from vllm_tetri.router.app import PROXIED

PATHS = (
    *("/v1/completions", "/v1/chat/completions") * 8,
    *("/v1/models", "/health", "/metrics", "/tetri/v1/instances", "/tetri/v1/requests"),
    *("/tetri/v1/mode", "/tetri/v1/instances/c/flip", "/tetri/v1/instances/c/drain"),
    *("/v1/responses", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/", "/nothing"),
    *(path for _, path, _ in PROXIED if "{" not in path),
    *("/sleep", "/v1/realtime", "/load", "/openapi.json"),
)
METHODS = (*("POST",) * 12, "GET", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT",
           "TRACE", "PRI", "post", "BREW")  # fmt: skip
HEADERS = (
    "Content-Type: application/json", "Content-Type: multipart/form-data; boundary=x",
    "Content-Type: \xff", "X-Request-Id: mine", "X-Request-Id: " + "x" * 300, "X-Request-Id: \xe9",
    "Connection: close", "Connection: keep-alive", "Connection: upgrade, x-custom",
    "Expect: 100-continue", "Expect: 200-what", "Upgrade: websocket", "Upgrade: h2c",
    "Accept: text/html", "TE: trailers",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: \x0b",
    "Content-Encoding: gzip", "Content-Encoding: br", "Content-Encoding: zstd",
    "Content-Length: 0", "Content-Length: 5", "Content-Length: -1", "Content-Length: 1e3",
    "Content-Length: 99999999999999999999999", "Content-Length: 4, 4", "Host: other", "Host:",
    "Authorization: Bearer x", "Authorization: Bearer", "Cookie: " + "a=b; " * 100, " folded: x",
    "no colon", ": no name", "x-custom: gold", "X: " + "y" * 9000, "Range: bytes=0-1",
    "Origin: http://x", "Access-Control-Request-Method: POST",
    "traceparent: \x7f", "X-Session-ID: a\tb",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**9, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308, 1e-300,
    "", "x", "\u0000", "\U0001f600", "tiny", "unknown", "x" * 5000, [], [[]], [[1, 2], [3]], [1, 2],
    [None], ["x", "y"], [1.5], [True], {}, {"a": {}}, [{}], {"type": "json_object"}, [10**30],
    {"tetri": {"type": "decode", "transfer": "x"}}, [{"role": "user", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
    [{"role": "user", "content": [{"type": 10**30, "x": 10**30}]}],
)  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "stream", "stream_options", "n", "best_of", "echo", "logprobs",
    "max_tokens", "max_completion_tokens", "seed", "stop", "tools", "tool_choice", "ignore_eos",
    "kv_transfer_params", "vllm_xargs", "request_id", "prompt_logprobs", "use_beam_search",
    "prompt_embeds", "response_format", "sampling_params", "priority", "user", "input", "mode",
    "role", "force", "deadline_s", "reason", "now", "",
)  # fmt: skip
BODIES = (
    {"model": "tiny", "prompt": "hello", "max_tokens": 5},
    {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True},
    {"prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True}},
    {"role": "decode"},
    {"mode": "split"},
)


def body(rng: Random) -> bytes:
    """A body, often one with something wrong."""
    made: dict[str, Any] = dict(rng.choice(BODIES))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        made[rng.choice(FIELDS)] = rng.choice(VALUES)
    raw = json.dumps(made, ensure_ascii=rng.random() < 0.5).encode()
    if rng.random() < 0.3:
        raw = scramble(rng, raw)
    elif rng.random() < 0.05:
        raw = b'{"a":' * rng.choice((90, 120, 900, 5000)) + raw
    return raw


def scramble(rng: Random, data: bytes) -> bytes:
    """A few bytes changed, lost, doubled or moved; maybe cut."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at, end = rng.randrange(len(found) + 1), rng.randrange(len(found) + 1)
        match rng.randrange(5):
            case 0:
                found[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del found[at : at + rng.randrange(1, 9)]
            case 2:
                found[at:at] = found[end : end + rng.randrange(1, 40)]
            case 3:
                found[at:at] = rng.choice((b"\r\n", b"\r\n\r\n", b"\n", b"\x00", b" ", b"\xff\xfe"))
            case _:
                if rng.random() < 0.3:
                    del found[at:]
    return bytes(found)


def request(rng: Random) -> bytes:
    """The bytes of a request, nearly always with something wrong."""
    raw, path = body(rng), rng.choice(PATHS)
    if rng.random() < 0.1:
        path = rng.choice((path + "?x=\xff", "//" + path, path + "/..", "http://h" + path, "*",
                           "h:1", "/%ff%00", "/\xff", path.replace("/", "%2f"), "/" + "a" * 5000,
                           path + "#x", "", "/v1/responses/" + "%20" * 90))  # fmt: skip
    lines = [f"{rng.choice(METHODS)} {path} HTTP/{rng.choice(('1.1',) * 9 + ('1.0', '2.0', '9'))}"]
    lines += [] if rng.random() < 0.03 else ["Host: x"]
    lines += [] if rng.random() < 0.1 else ["Content-Type: application/json"]
    lines += rng.choices(HEADERS, k=rng.choice((0, 0, 0, 1, 1, 2, 4, 120)))
    if rng.random() < 0.9:
        lines.append(f"Content-Length: {len(raw) + (rng.random() < 0.1) * rng.randrange(-9, 9)}")
    elif rng.random() < 0.7:
        lines.append("Transfer-Encoding: chunked")
        parts = [raw[at : at + 50] for at in range(0, len(raw), 50)]
        raw = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    made = "\r\n".join([*lines, "", ""]).encode("latin-1") + raw
    return scramble(rng, made) if rng.random() < 0.3 else made
