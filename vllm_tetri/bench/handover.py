"""`vllm-tetri bench handover`: what a hand-over costs the client, token by token.

Stock vLLM, once with its default token budget and once with our chunk as its
budget, and a cluster of one prefill and one decode instance run side by side and
take turns, one request at a time. Stock shares the prefill instance's core, which
is idle then; the client and the router are on the decode instance's. All get the
same options, executor and threads.

Then the decode instance is filled with more requests than it can decode at once,
and first tokens are timed again.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from urllib.parse import urlsplit

from rich.progress import Progress

from vllm_tetri.bench import setting
from vllm_tetri.bench.handover_report import CHUNKED, OURS, STOCK, SYSTEMS, Stream, draw, show
from vllm_tetri.bench.serving import WORDS, Server
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.launch.machine import vllm_version

_START_S = 300.0
_STOP_S = 30.0
_READ_S = 120.0
_TOKENS = 16  # of an answer
_BATCH = 8  # requests that an engine decodes at once
_FILLERS = 2 * _BATCH
_FILLER_TOKENS = 1500  # more than are written before the measurement is over


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or name of a model with a tokenizer")
    add(
        "--prompts",
        type=setting.numbers,
        default=[10, 100, 500, 1000],
        metavar="N,N",
        help="prompt lengths in tokens (10,100,500,1000)",
    )
    add("--requests", type=int, default=15, metavar="N", help="per length and system (15)")
    add("--chunk", type=int, default=256, metavar="N", help="our tokens per prefill step (256)")
    setting.add_place(parser, "handover", cores=2)


def run(options: argparse.Namespace) -> int:
    """Run it; 0 when the files are written."""
    options.repeats = 1
    setting.check(options, prompts=1, requests=2, chunk=1, cores=2)
    console = setting.console()
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=console))
        started = progress.add_task("starting four instances", total=None)
        urls = stack.enter_context(_systems(options))
        progress.update(started, total=1, completed=1)
        found = _measure(options, urls, progress)
        full = _measure_full(options, urls[OURS], progress)
    content = _content(options, found, full)
    show(console, content)
    setting.write_json(options.output / "handover.json", content)
    draw(content, options.output / "handover.svg")
    console.print(f"written: {options.output}/handover.json, handover.svg")
    return 0


# -- systems ---------------------------------------------------------------------


@contextmanager
def _systems(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """URL of each system, all running until the end."""
    serve = [*setting.serve_options(options.model, _BATCH), *options.tail]
    first = setting.cores(options)[:1]
    chunked = [*serve, "--max-num-batched-tokens", str(options.chunk)]
    with ExitStack() as stack:
        urls = {
            STOCK: stack.enter_context(Server(serve, first, options.output / "stock.log")).url,
            CHUNKED: stack.enter_context(
                Server(chunked, first, options.output / "chunked.log")
            ).url,
        }
        model, *rest = serve
        urls[OURS] = stack.enter_context(_cluster(options, model, rest))
        yield urls


@contextmanager
def _cluster(options: argparse.Namespace, model: str, serve: Sequence[str]) -> Iterator[str]:
    ready, log = options.output / "ready.json", options.output / "up.log"
    ready.unlink(missing_ok=True)
    words = [sys.executable, "-m", "vllm_tetri.cli", "up", model, "--port", "0"]
    words += ["--mode", "split", "--placement", "split"]
    words += ["--ready-file", str(ready), "--log-dir", str(options.output / "logs"), "--"]
    words += [*serve, "--tetri-chunk-size", str(options.chunk)]
    with log.open("wb") as file:
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + _START_S
        while not ready.exists():
            if child.poll() is not None or time.monotonic() > deadline:
                raise UnsupportedError(f"the cluster did not start; see {log}")
            time.sleep(0.1)
        yield json.loads(ready.read_text())["url"]
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()


# -- measuring ---------------------------------------------------------------------


def _measure(
    options: argparse.Namespace, urls: dict[str, str], progress: Progress
) -> dict[int, dict[str, list[Stream]]]:
    """Streams by prompt length and system; systems take turns in random order."""
    rng = Random(options.seed)
    prompts = _Prompts(urls[STOCK], rng)
    found: dict[int, dict[str, list[Stream]]] = {
        length: {name: [] for name in SYSTEMS} for length in options.prompts
    }
    task = progress.add_task("requests", total=len(found) * (options.requests + 1))
    for length, streams in found.items():
        for repeat in range(options.requests + 1):
            body = prompts.body(length)
            for name in rng.sample(SYSTEMS, len(SYSTEMS)):
                stream = ask(urls[name], body)
                if repeat:  # the first one is for warming up
                    streams[name].append(stream)
            progress.advance(task)
    return found


def _measure_full(
    options: argparse.Namespace, url: str, progress: Progress
) -> dict[str, list[float]]:
    """First tokens in seconds with an idle decode instance and with a full one."""
    prompts = _Prompts(url, Random(options.seed + 1))
    length = options.prompts[-1]
    task = progress.add_task("full decode side", total=2 * options.requests)
    found: dict[str, list[float]] = {}
    stop = threading.Event()
    fillers = [
        threading.Thread(target=_fill, args=(url, prompts.body(16, _FILLER_TOKENS), stop))
        for _ in range(_FILLERS)
    ]
    try:
        for name in ("idle", "full"):
            if name == "full":
                for filler in fillers:
                    filler.start()
                _wait_until_full(url)
            found[name] = []
            for _ in range(options.requests):
                found[name].append(ask(url, prompts.body(length), pieces=1).ttft_s)
                progress.advance(task)
    finally:
        stop.set()
        for filler in fillers:
            if filler.is_alive():
                filler.join()
    return found


def _fill(url: str, body: dict[str, Any], stop: threading.Event) -> None:
    for _ in _pieces(url, body):
        if stop.is_set():
            return


def _wait_until_full(url: str) -> None:
    deadline = time.monotonic() + _READ_S
    while time.monotonic() < deadline:
        with _request(url, "GET", "/tetri/v1/instances") as answer:
            instances = json.load(answer)["instances"]
        decode = next(each for each in instances if each["role"] == "decode")
        if decode["running"] >= _BATCH and decode["waiting"] > 0:
            return
        time.sleep(0.1)
    raise UnsupportedError("the decode instance could not be filled")


class _Prompts:
    """Bodies with prompts of exactly so many tokens, no two alike."""

    def __init__(self, url: str, rng: Random) -> None:
        self._url = url
        self._rng = rng
        with _request(url, "GET", "/v1/models") as answer:
            self._model = json.load(answer)["data"][0]["id"]

    def body(self, num_tokens: int, max_tokens: int = _TOKENS) -> dict[str, Any]:
        text = " ".join(self._rng.choices(WORDS, k=2 * num_tokens + 16))
        asked = {"model": self._model, "prompt": text}
        with _request(self._url, "POST", "/tokenize", asked) as answer:
            token_ids = json.load(answer)["tokens"][:num_tokens]
        return {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }


def ask(url: str, body: dict[str, Any], *, pieces: int = 0) -> Stream:
    """One streamed request, read to its end or until so many pieces came."""
    start = time.perf_counter()
    times = []
    for at in _pieces(url, body):
        times.append(at - start)
        if len(times) == pieces:
            break
    return Stream(tuple(times))


def _pieces(url: str, body: dict[str, Any]) -> Iterator[float]:
    """When each piece of text came."""
    with _request(url, "POST", "/v1/completions", body) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                event = json.loads(line[6:])
                if "error" in event:
                    raise UnsupportedError(f"{url}: {event['error']['message']}")
                if any(choice["text"] for choice in event["choices"]):
                    yield now


@contextmanager
def _request(
    url: str, method: str, path: str, body: dict[str, Any] | None = None
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_READ_S)
    try:
        raw = None if body is None else json.dumps(body).encode()
        connection.request(method, path, raw, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise UnsupportedError(f"{url}{path}: HTTP {answer.status} {answer.read()[:200]!r}")
        yield answer
    finally:
        connection.close()


# -- results -----------------------------------------------------------------------


def _content(
    options: argparse.Namespace,
    found: dict[int, dict[str, list[Stream]]],
    full: dict[str, list[float]],
) -> dict[str, Any]:
    return {
        "model": setting.model_name(options),
        "device": setting.device(),
        "vllm": vllm_version(),
        "cores": list(setting.cores(options)),
        "chunk": options.chunk,
        "requests": options.requests,
        "lengths": {
            str(length): {
                name: [[*stream.pieces_s] for stream in streams]
                for name, streams in systems.items()
            }
            for length, systems in found.items()
        },
        "full": full,
    }
