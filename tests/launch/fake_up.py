"""`vllm-tetri up --mode split` with fake instances and a fake router."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

from vllm_tetri import cli
from vllm_tetri.launch import cluster, machine, plan, process, up

FAKE = str(Path(__file__).with_name("fake_child.py"))

start = process.ChildProcess.start


async def start_if_it_can(spec: plan.ChildSpec, on_line: Any) -> process.ChildProcess:
    """Fail once if there is a file ``NAME.refused``, as without a free process id."""
    refused = Path(os.environ["FAKE_DIR"]) / f"{spec.name}.refused"
    if refused.exists():
        refused.unlink()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return await start(spec, on_line)


if __name__ == "__main__":
    process.ChildProcess.start = start_if_it_can
    plan.SERVE = (sys.executable, FAKE, "serve")
    plan.ROUTER = (sys.executable, FAKE, "router")
    up.require_vllm = lambda: None
    up.read_serve_options = lambda model, words: machine.serve_options_in(words)
    cluster.FIRST_BACKOFF_S = 0.05
    process.GRACE_S = 1.0
    sys.exit(cli.main(["up", "--mode", "split", *sys.argv[1:]]))
