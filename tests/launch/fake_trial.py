"""Stands in for a process that computes like an instance, and takes no time for it.

``python fake_trial.py prompts|steps DTYPE``. Sharing cores makes prompts twice as fast
with a file ``trial.shares`` in ``FAKE_DIR``, else it changes nothing. With
``trial.dies`` it ends instead; with ``trial.hangs`` it never answers. ``trial.pids``
gets its process id.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder = Path(os.environ["FAKE_DIR"])
    with (folder / "trial.pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    if (folder / "trial.dies").exists():
        sys.exit("no torch here")
    is_shared = os.environ.get("OMP_WAIT_POLICY") == "PASSIVE"
    is_quick = is_shared and sys.argv[1] == "prompts" and (folder / "trial.shares").exists()
    print("a line of some library\n{}\n7", flush=True)
    say([])
    for _ in sys.stdin:
        if (folder / "trial.hangs").exists():
            time.sleep(600)
        say([0.005 if is_quick else 0.01] * 10)


def say(took: list[float]) -> None:
    print(json.dumps({"took": took, "cpu_s": 0.0}), flush=True)


if __name__ == "__main__":
    main()
