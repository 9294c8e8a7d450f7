"""`vllm-tetri up --mode split` with fake instances and a fake router."""

import sys
from pathlib import Path

from vllm_tetri import cli
from vllm_tetri.launch import child, keeper, plan, sharing, trial, up

FAKE = str(Path(__file__).with_name("fake_child.py"))
FAKE_TRIAL = str(Path(__file__).with_name("fake_trial.py"))

if __name__ == "__main__":
    plan.SERVE = (sys.executable, FAKE, "serve")
    plan.ROUTER = (sys.executable, FAKE, "router")
    trial.WORK = (sys.executable, FAKE_TRIAL)
    sharing.MAX_OTHERS_PART = 1.0  # tests beside it are others
    up.require_vllm = lambda: None
    keeper.FIRST_BACKOFF_S = 0.05
    child.GRACE_S = 1.0
    sys.exit(cli.main(["up", "--mode", "split", *sys.argv[1:]]))
