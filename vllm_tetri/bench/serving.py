"""`vllm serve` as a child, and `vllm bench serve` as the load on it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

from vllm_tetri.bench.process import Nowhere, engine_environment, failed, guard
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.launch.machine import free_port

_START_S = 300.0
_POLL_S = 0.2
_VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")

# Short words, most of which are one token of most tokenizers.
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part",
    "place", "case", "week", "company", "system", "program", "question", "work", "government",
    "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story",
    "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour",
    "game", "line", "end", "member", "law",
)  # fmt: skip


class Server:
    """One `vllm serve`, ready when entered, gone when left.

    Args:
        options: Model and options.
        cores: Logical CPUs it is pinned to.
        log: File for what it prints.
        variables: Of its environment, besides those that every engine gets.

    Attributes:
        pid: Of the guard above it.

    Raises:
        UnsupportedError: It did not start; the message ends with its log's last lines.
    """

    def __init__(
        self,
        options: Sequence[str],
        cores: Sequence[int],
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._nowhere = Nowhere()
        has_role = "--role" in options
        control = ["--tetri-control", self._nowhere.address] if has_role else []
        environment = {**os.environ, **engine_environment(len(cores))}
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        if not has_role:
            environment["VLLM_PLUGINS"] = "none"
        environment |= variables or {}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*guard(cores), *_VLLM, "serve", *options, *control, "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Server:
        deadline = time.monotonic() + _START_S
        try:
            while not _answers(f"{self.url}/health"):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise failed("vllm serve did not start", self._log)
                time.sleep(_POLL_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._nowhere.close()


@dataclass(frozen=True, slots=True)
class Load:
    """What `vllm bench serve` sends: its file of prompts, and how fast.

    Attributes:
        rate: Requests a second, with exponential gaps.
    """

    prompts: Path
    count: int
    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Answered:
    """What came back, per request, in seconds and tokens."""

    ttft_s: list[float]
    itl_s: list[list[float]]
    prompt_tokens: list[int]
    output_tokens: list[int]
    took_s: float


def write_prompts(
    path: Path, count: int, prompt: tuple[int, int], output: tuple[int, int], rng: Random
) -> None:
    """A file of prompts for `vllm bench serve`.

    Args:
        prompt: Least and most words; lengths between them are log-uniform.
        output: Least and most tokens of an answer, uniform.
    """
    lines = []
    for _ in range(count):
        words = round(prompt[0] * (prompt[1] / prompt[0]) ** rng.random())
        entry = {
            "prompt": " ".join(rng.choices(WORDS, k=words)),
            "output_tokens": rng.randint(*output),
        }
        lines.append(json.dumps(entry))
    path.write_text("\n".join(lines) + "\n")


def send(server: Server, model: str, load: Load, cores: Sequence[int], folder: Path) -> Answered:
    """Send the load and wait for the last answer.

    Raises:
        UnsupportedError: The load generator failed, or a request did.
    """
    result, log = folder / "load.json", folder / "load.log"
    result.unlink(missing_ok=True)
    words = [
        *guard(cores),
        *(*_VLLM, "bench", "serve", "--backend", "openai", "--base-url", server.url),
        *("--model", model, "--endpoint", "/v1/completions"),
        *("--dataset-name", "custom", "--dataset-path", str(load.prompts)),
        *("--skip-chat-template", "--disable-shuffle", "--custom-output-len", "-1"),
        *("--num-prompts", str(load.count), "--request-rate", str(load.rate)),
        *("--seed", str(load.seed), "--ignore-eos", "--temperature", "0", "--disable-tqdm"),
        *("--num-warmups", "2", "--save-result", "--save-detailed"),
        *("--result-dir", str(folder), "--result-filename", result.name),
    ]
    with log.open("wb") as file:
        done = subprocess.run(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_PLUGINS": "none", "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if done.returncode != 0 or not result.exists():
        raise failed("vllm bench serve failed", log)
    found: dict[str, Any] = json.loads(result.read_text())
    if wrong := [error for error in found["errors"] if error]:
        raise UnsupportedError(f"{len(wrong)} of {load.count} requests failed: {wrong[0][:200]}")
    result.unlink()
    return Answered(
        ttft_s=found["ttfts"],
        itl_s=found["itls"],
        prompt_tokens=found["input_lens"],
        output_tokens=found["output_lens"],
        took_s=found["duration"],
    )


def _answers(url: str) -> bool:
    with (
        contextlib.suppress(OSError, urllib.error.URLError, socket.timeout),
        urllib.request.urlopen(url, timeout=5),
    ):
        return True
    return False
