"""Stands in for `vllm serve`: remembers a profile where it is told to, and stays.

With FAKE_DIES it ends at once, as an instance that refuses its options.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from vllm_tetri.engine.profile import DecodePoint, Profile, ProfileStore, profile_folder
from vllm_tetri.policy.cost import CurvePoint, StepCost

CURVE = tuple(CurvePoint(n, 0.04 + n / 2000) for n in (16, 32, 64, 128, 256, 512))
PROFILE = Profile(
    curve=CURVE,
    decodes=tuple(DecodePoint(n, 512, 0.04 + n / 1000) for n in (1, 2, 4, 8)),
    chunk_tokens=384,
    tile_tokens=16,
    cost=StepCost(CURVE, base_s=0.04, request_s=0.001),
    took_s=7.0,
)
CONDITIONS = {"model": "/models/fake", "device": "abacus", "threads": "1", "dtype": "bfloat16"}


def main() -> None:
    print("(EngineCore pid=2) INFO 01-01 00:00:00 [x.py:1] measuring what steps cost", flush=True)
    if "FAKE_DIES" in os.environ:
        sys.exit("no such model")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["FAKE_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    Path(os.environ["FAKE_PIDS"] + ".argv").write_text(" ".join(sys.argv[1:]))
    ProfileStore(profile_folder(), CONDITIONS).save(PROFILE)
    time.sleep(600)


if __name__ == "__main__":
    main()
