"""What other people's tests find as the command `vllm`: `vllm serve` is stock vLLM or a cluster.

The command is a file of two lines in a folder that is first in PATH. SUITES_TARGET says what it
starts: `stock`, or `split` for `vllm-tetri up` with one prefill and one decode instance. Both get
the same further options, which only make a start on a small CPU host fast.
"""

from __future__ import annotations

import os
import sys

UP = ("-m", "vllm_tetri.cli", "up")
STOCK = ("-m", "vllm.entrypoints.cli.main")
FAST = ("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 30))
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# Options of `vllm serve` that are options of `up` too and belong to its router.
OF_ROUTER = ("--host", "--port", "--ssl-keyfile", "--ssl-certfile")


def command(words: list[str], target: str, ready_file: str | None) -> list[str]:
    """The Python command line for `vllm WORDS...`."""
    if words[:1] != ["serve"]:
        return [*STOCK, *words]
    if target == "stock":
        return [*STOCK, *words, *FAST, "--distributed-executor-backend", UNIPROC]
    model, rest = words[1], words[2:]
    of_router, of_instances = _divided(rest)
    ready = ["--ready-file", ready_file] if ready_file else []
    return [*UP, model, "--mode", "split", "--prefill", "1", "--decode", "1", "--flip", "off",
            "--verbose", *ready, *of_router, "--", *of_instances, *FAST]  # fmt: skip


def _divided(words: list[str]) -> tuple[list[str], list[str]]:
    """Options of the router, and of the instances."""
    of_router: list[str] = []
    others: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        if name in OF_ROUTER:
            of_router += [word] if equals else [word, next(left)]
        else:
            others.append(word)
    return of_router, others


def main() -> None:
    target = os.environ["SUITES_TARGET"]
    if target == "stock":
        os.environ["VLLM_PLUGINS"] = "none"
    words = command(sys.argv[1:], target, os.environ.get("SUITES_READY_FILE"))
    os.execv(sys.executable, [sys.executable, "-P", *words])


if __name__ == "__main__":
    main()
