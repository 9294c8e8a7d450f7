"""A real chat through one prefill and one decode instance, and what each of them did.

Run by `make demo`. Everything it starts is gone when it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table
from smollm2 import fast_dtype, prepare

TURNS = ("What is the capital of France?", "Name three things to see there.")
MAX_TOKENS = 100
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Turn:
    """Times of one response, and the instances that computed it."""

    prefill: str
    decode: str
    ttft_s: float
    tokens: int
    tokens_per_s: float


def main() -> int:
    console = Console(highlight=False)
    console.print("preparing SmolLM2-135M-Instruct (half a minute the first time) ...")
    dtype = fast_dtype()
    with cluster(prepare(dtype), dtype) as ready:
        before = counters(ready["url"])
        turns = chat(ready["url"], ready["model"])
        after = settled_counters(ready["url"], before, len(turns))
        show(console, turns, before, after)
    console.print("everything is stopped")
    return 0


@contextlib.contextmanager
def cluster(model: Path, dtype: str) -> Iterator[dict[str, Any]]:
    """`vllm-tetri up` with one prefill and one decode instance, as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "ready.json"
        command = [sys.executable, "-P", "-m", "vllm_tetri.cli", "up", str(model)]
        command += ["--mode=split", "--port=0"]
        command += [f"--ready-file={ready_file}", "--", "--max-model-len=2048"]
        command += ["--served-model-name=smollm2", f"--dtype={dtype}"]
        up = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        try:
            yield wait_for(ready_file, up)
        finally:
            if up.poll() is None:
                up.send_signal(signal.SIGTERM)
            if up.wait(STOP_TIMEOUT_S) != 0:
                sys.exit("demo: the cluster did not end in good order")


def wait_for(ready_file: Path, up: subprocess.Popen[bytes]) -> dict[str, Any]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready_file.exists():
        if up.poll() is not None or time.monotonic() > deadline:
            sys.exit("demo: the cluster did not get ready")
        time.sleep(0.1)
    content: dict[str, Any] = json.loads(ready_file.read_text())
    return content


def chat(url: str, model: str) -> list[Turn]:
    """Hold the conversation and print it token by token."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    messages: list[Any] = []
    turns = []
    for question in TURNS:
        print(f"\nyou      {question}\nsmollm2  ", end="", flush=True)
        messages.append({"role": "user", "content": question})
        turn, answer = ask(client, model, messages)
        messages.append({"role": "assistant", "content": answer})
        turns.append(turn)
        print()
    return turns


def ask(client: OpenAI, model: str, messages: list[Any]) -> tuple[Turn, str]:
    started = time.monotonic()
    first = 0.0
    answer = ""
    tokens = 0
    with client.chat.completions.with_streaming_response.create(
        model=model,
        messages=messages,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as response:
        headers = response.headers
        for chunk in response.parse():
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                first = first or time.monotonic()
                answer += text
                print(text, end="", flush=True)
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
    ended = time.monotonic()
    speed = (tokens - 1) / (ended - first) if tokens > 1 and first else 0.0
    return (
        Turn(
            prefill=headers.get("x-tetri-prefill", "?"),
            decode=headers.get("x-tetri-decode", "?"),
            ttft_s=(first or ended) - started,
            tokens=tokens,
            tokens_per_s=speed,
        ),
        answer,
    )


def counters(url: str) -> dict[str, dict[str, Any]]:
    """`GET /tetri/v1/instances`, by instance."""
    with urllib.request.urlopen(f"{url}/tetri/v1/instances", timeout=10) as answer:
        rows = json.load(answer)["instances"]
    return {row["id"]: row for row in rows}


def settled_counters(
    url: str, before: dict[str, dict[str, Any]], turns: int
) -> dict[str, dict[str, Any]]:
    """The counters, as soon as load reports (ten per second) include every turn."""
    deadline = time.monotonic() + 5
    while True:
        now = counters(url)
        done = sum(gain(name, "decodes_done", before, now) for name in now)
        if done >= turns or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def gain(
    name: str, key: str, before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> int:
    return int(after[name].get(key, 0)) - int(before.get(name, {}).get(key, 0))


def show(
    console: Console,
    turns: list[Turn],
    before: dict[str, dict[str, Any]],
    after: dict[str, dict[str, Any]],
) -> None:
    table = Table(title="\neach response")
    for name in ("turn", "prefill by", "decode by", "first token", "tokens", "tokens/s"):
        table.add_column(name, justify="left" if name.endswith("by") else "right")
    for number, turn in enumerate(turns, start=1):
        table.add_row(
            str(number),
            turn.prefill,
            turn.decode,
            f"{turn.ttft_s * 1000:.0f} ms",
            str(turn.tokens),
            f"{turn.tokens_per_s:.1f}",
        )
    console.print(table)
    table = Table(title="each instance")
    columns = {
        "prefills": "prefills_done",
        "chunks": "chunks_done",
        "decodes": "decodes_done",
        "KV sent": "kv_bytes_sent",
        "KV received": "kv_bytes_received",
    }
    table.add_column("instance")
    for title in columns:
        table.add_column(title, justify="right")
    for name in sorted(after, reverse=True):
        cells = []
        for title, key in columns.items():
            if key not in after[name]:
                cells.append("not reported")
                continue
            value = gain(name, key, before, after)
            cells.append(f"{value / (1 << 20):.1f} MiB" if title.startswith("KV") else str(value))
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
