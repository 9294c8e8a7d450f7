"""`vllm-tetri bench MODEL`: this package and one stock server under the same load, in one run.

First one stock `vllm serve` and then `vllm-tetri up` are started on the same cores (or GPUs), with
the same amount of KV cache, and each is driven by `vllm bench serve` with the same options and
seed. Absolute times drift between machines and runs: only the two columns of one run compare.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from vllm_tetri.admin import opener_for
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.launch.guard import guarded
from vllm_tetri.launch.machine import (
    COMPILATION,
    free_port,
    inspect,
    is_cpu_build,
    require_vllm,
    serve_options_in,
    thread_variables,
)
from vllm_tetri.router.auth import KEY_VARIABLE, own_keys
from vllm_tetri.types import Mode

KV_BYTES = 1 << 30
"""KV cache of all instances of a system together on a CPU host, where none is given."""

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
TETRI = (sys.executable, "-m", "vllm_tetri.cli")
_POLL_S = 0.2
_TAIL_LINES = 15
_TAIL_BYTES = 4096  # hold the newest state of a progress bar
# Options that go on to `vllm bench serve`: the default, None for that of vLLM, and the help.
LOAD: dict[str, tuple[int | str | None, str]] = {
    "num-prompts": (64, "requests sent to each"),
    "request-rate": ("inf", "requests per second"),
    "burstiness": (None, "1 for Poisson arrivals, less for bursts"),
    "max-concurrency": (None, "largest number of requests in flight"),
    "dataset-name": ("random", "data set of prompts"),
    "dataset-path": (None, "file or name of the data set"),
    "input-len": (None, "prompt tokens of a random request"),
    "output-len": (None, "output tokens of a request"),
    "seed": (0, "seed of prompts and arrivals"),
}
_FIXED_LOAD = (
    "--backend=openai --endpoint=/v1/completions --ignore-eos --temperature=0 --num-warmups=2 "
    "--percentile-metrics=ttft,tpot,itl,e2el --save-result"
)
# Of times the lower is better, of throughputs the higher.
FIGURES = {
    "mean_ttft_ms": "TTFT mean, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "p99_itl_ms": "ITL p99, ms",
    "mean_tpot_ms": "TPOT mean, ms",
    "mean_e2el_ms": "JCT mean, ms",
    "request_throughput": "throughput, requests/s",
    "output_throughput": "throughput, tokens/s",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; those of the load have the names of `vllm bench serve`."""
    parser.add_argument("model", help="model name or folder, as for vllm serve")
    load = parser.add_argument_group("load, as for vllm bench serve")
    for name, (default, text) in LOAD.items():
        kind, shown = (str, "vLLM's") if default is None else (type(default), default)
        load.add_argument(
            f"--{name}", type=kind, default=default, help=f"{text} (default: {shown})"
        )
    load.add_argument(
        "--bench-args", default="", metavar="STRING", help="further options of vllm bench serve"
    )
    ours = parser.add_argument_group("this package, as for vllm-tetri up")
    ours.add_argument("--mode", choices=[mode.value for mode in Mode], help="default: that of up")
    for role in ("prefill", "decode", "both"):
        ours.add_argument(f"--{role}", type=int, metavar="N", help=f"{role} instances")
    parser.add_argument(
        "--start-timeout", type=float, default=900.0, help="seconds until a server is ready; 900"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the servers' logs in DIR")


def run(options: argparse.Namespace) -> int:
    """Measure both systems and print one table.

    Returns 0 when this package completed at least as many requests as the stock server, and that
    some, else 1.
    """
    require_vllm()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="tetri-bench-") as scratch:
        folder = options.log_dir or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        results = {}
        for name, start in (("stock", stock_server), ("ours", our_cluster)):
            console.print(f"starting {name} and measuring it ...")
            with _progress() as progress:
                task = progress.add_task(f"starting {name}", total=None)
                with start(options, folder) as url:
                    total = options.num_prompts
                    progress.update(task, description=f"measuring {name}", total=total)
                    tell = partial(progress.update, task)
                    results[name] = send_load(options, url, folder, name, tell)
    console.print(_table(options, results))
    words, is_passed = verdict(results["stock"], results["ours"])
    console.print(words)
    if options.json is not None:
        content = {"model": options.model, "vllm_serve_options": options.tail, "systems": results}
        content |= {"passed": is_passed, "verdict": words}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if is_passed else 1


@contextmanager
def stock_server(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Run one stock `vllm serve` on all cores or GPUs, and yield its URL when it is ready."""
    port, machine = free_port(), inspect()
    environment = {"VLLM_PLUGINS": "none", "VLLM_NO_USAGE_STATS": "1"}
    if keys := own_keys():
        environment[KEY_VARIABLE] = keys[0]  # vLLM takes all of them for one
    words = [*VLLM, "serve", options.model, *serve_options_of(options, 1)]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    if is_cpu_build():
        workers = serve_options_in(options.tail).num_workers
        environment |= dict(thread_variables(len(machine.cores) // workers))
    else:
        words += replica_options(options, len(machine.gpus))
    url = f"http://127.0.0.1:{port}"
    with Child(words, folder / "stock.log", environment, tuple(chain(*machine.cores))) as process:
        process.wait_until(lambda: responds(f"{url}/health"), options.start_timeout)
        yield url


@contextmanager
def our_cluster(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Run `vllm-tetri up`, and yield its URL when every instance is ready."""
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    words = [*TETRI, "up", options.model, "--port", "0"]
    words += ["--ready-file", str(ready), "--start-timeout", str(options.start_timeout)]
    words += _given(options, ("log-dir", "mode", "prefill", "decode", "both"))
    words += ["--", *serve_options_of(options, _num_instances(options))]
    with Child(words, folder / "ours.log") as process:
        process.wait_until(ready.exists, options.start_timeout)
        yield json.loads(ready.read_text())["url"]


def send_load(
    options: argparse.Namespace, url: str, folder: Path, name: str, tell: Callable[..., object]
) -> dict[str, Any]:
    """Drive one server with `vllm bench serve`, `tell` how many requests are ``completed``, and
    return what that reports."""
    result = folder / f"{name}.json"
    result.unlink(missing_ok=True)
    words = [*VLLM, "bench", "serve", "--base-url", url, "--model", options.model]
    words += [*_FIXED_LOAD.split(), "--result-dir", str(folder), "--result-filename", result.name]
    words += [*_given(options, LOAD), *shlex.split(options.bench_args)]
    environment = {"VLLM_PLUGINS": "none"}
    if keys := own_keys():  # which servers ask for
        environment["OPENAI_API_KEY"] = keys[0]
    with Child(words, folder / f"{name}-load.log", environment) as process:
        while process.poll() is None:
            tell(completed=process.done_of(options.num_prompts))
            time.sleep(_POLL_S)
    if not result.exists():
        raise process.failure("`vllm bench serve` failed")
    content: dict[str, Any] = json.loads(result.read_text())
    return content


def verdict(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, bool]:
    """Say in one line how ours compares, and whether it served all that stock served, if any."""
    if not 0 < stock["completed"] <= ours["completed"]:
        served = f"ours completed {ours['completed']} requests and stock {stock['completed']}"
        return f"FAILED: {served}; the latencies do not compare. --log-dir keeps the logs", False
    better = [
        name.removesuffix(", ms")
        for key, name in _figures(stock, ours).items()
        if (ours[key] > stock[key] if key.endswith("throughput") else ours[key] < stock[key])
    ]
    found = "; ".join(better) or "nothing"
    return f"passed: ours completed all that stock completed, and is better in: {found}", True


def _figures(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, str]:
    """Return what both report: --bench-args may ask for other percentiles."""
    return {key: name for key, name in FIGURES.items() if key in stock and key in ours}


def _progress() -> Progress:
    errors = Console(stderr=True)
    return Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(),
        console=errors, transient=True, disable=not errors.is_terminal,
    )  # fmt: skip


def _table(options: argparse.Namespace, results: Mapping[str, Mapping[str, Any]]) -> Table:
    stock, ours = results["stock"], results["ours"]
    title = f"{Path(options.model).name}, {options.num_prompts} requests"
    table = Table("", "stock", "ours", "ours / stock", title=title)
    table.add_row("completed", str(stock["completed"]), str(ours["completed"]), "")
    for key, name in _figures(stock, ours).items():
        ratio = f"{ours[key] / stock[key]:.2f}" if stock[key] else "-"
        table.add_row(name, f"{stock[key]:.1f}", f"{ours[key]:.1f}", ratio)
    return table


def _num_instances(options: argparse.Namespace) -> int:
    prefill, decode, both = options.prefill, options.decode, options.both
    if options.mode != Mode.SPLIT.value and prefill is decode is both is None:
        return max(1, len(inspect().gpus))
    usual, given = 0 if both else 1, (prefill, decode)  # as for `up`
    return max(1, sum(usual if each is None else each for each in given) + (both or 0))


def replica_options(options: argparse.Namespace, num_gpus: int) -> list[str]:
    """Return what gives stock as many replicas as there are GPUs for our instances, which share
    GPUs where there are fewer; nothing for one replica, or if the number is given."""
    given = serve_options_in(options.tail)
    replicas = min(_num_instances(options), num_gpus // given.num_workers)
    if replicas < 2 or given.names & {"data-parallel-size", "dp"}:
        return []
    return ["--data-parallel-size", str(replicas)]


def serve_options_of(options: argparse.Namespace, instances: int) -> list[str]:
    """Options of every instance: what follows `--`, and on a CPU host equal KV cache in all and,
    as with `up`, no compiling."""
    if not is_cpu_build():
        return list(options.tail)
    given = serve_options_in(options.tail).names
    has_cache = "kv-cache-memory-bytes" in given
    cache = [] if has_cache else ["--kv-cache-memory-bytes", str(KV_BYTES // instances)]
    return [*options.tail, *cache, *([] if given & COMPILATION else ["--enforce-eager"])]


def _given(options: argparse.Namespace, names: Iterable[str]) -> list[str]:
    values = {name: getattr(options, name.replace("-", "_")) for name in names}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


class Child(subprocess.Popen[bytes]):
    """A command under a guard, which ends it with all its descendants when the block is left. It
    prints to a file and never imports from the current directory; Ctrl-C reaches this process only.
    """

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        self._log = log
        with log.open("wb") as file:
            super().__init__(
                guarded(words, cores=cores),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})},
                start_new_session=True,
            )

    def __exit__(self, *error: Any) -> None:
        self.send_signal(signal.SIGINT)  # SIGTERM would let requests end first
        self.wait()

    def failure(self, problem: str) -> UnsupportedError:
        """Make an error of the problem and the last lines that the process printed."""
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return UnsupportedError("\n".join([f"{problem}; its last lines were:", *lines]))

    def done_of(self, total: int) -> int:
        """Return how many of so many things are done, by the progress bar in the log."""
        with self._log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            found = re.findall(rf"(\d+)/{total} \[", file.read().decode(errors="replace"))
        return int(found[-1]) if found else 0

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a server is ready; UnsupportedError if it ends, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if self.poll() is not None:
                raise self.failure("the server ended before it was ready")
            if time.monotonic() > deadline:
                raise self.failure(f"the server was not ready in {timeout_s} s")
            time.sleep(_POLL_S)


def responds(url: str) -> bool:
    """Whether a GET of this URL returns 200."""
    try:
        with opener_for(url).open(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
