"""`vllm-tetri up --mode split` with fake instances and a fake router."""

import sys
from pathlib import Path

from vllm_tetri import cli
from vllm_tetri.launch import cluster, machine, plan, process, up

FAKE = str(Path(__file__).with_name("fake_child.py"))

if __name__ == "__main__":
    plan.SERVE = (sys.executable, FAKE, "serve")
    plan.ROUTER = (sys.executable, FAKE, "router")
    up.require_vllm = lambda: None
    up.read_serve_options = lambda model, words: machine.serve_options_in(words)
    cluster.FIRST_BACKOFF_S = 0.05
    process.GRACE_S = 1.0
    sys.exit(cli.main(["up", "--mode", "split", *sys.argv[1:]]))
