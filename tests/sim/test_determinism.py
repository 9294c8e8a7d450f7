"""The same options and seed give the same bytes, in whatever process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_OPTIONS = {
    "modes": "--mode split adaptive whole --prefill 6 --decode 6 --both 2 --stock 2048 --replicas 9"
    " --rate 12 --requests 60 --arrivals gamma:3 --accuracy 0.7 --link roce --kv-blocks 160",
    "traffic": "--mode split adaptive --prefill 2 --decode 2 --rate 3 --requests 48 --seed 5"
    " --link 0.01 --send request",
}
_PROGRAM = """
import sys
from vllm_tetri import cli
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig, make_instances
from vllm_tetri.sim.workload import draw

code = cli.main(["sim", *sys.argv[1:]])
for mode in ("split", "adaptive"):
    for each in simulate(ClusterConfig(make_instances(5, 5), mode), draw("mixed", 40, 9.0, seed=2)):
        print(each, *(part.tobytes().hex() for part in each.gap_parts))
sys.exit(code)
"""


@pytest.mark.parametrize("name", _OPTIONS)
def test_two_processes_say_the_same_to_the_bit(name: str) -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _PROGRAM, *_OPTIONS[name].split()],
            capture_output=True,
            timeout=120,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]

    assert len(outputs[0]) > 10_000
    assert outputs[0] == outputs[1]
