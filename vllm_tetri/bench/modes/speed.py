"""How fast each core of the machine is at this moment, by a fixed piece of work.

Where cores are shared with other virtual machines, hours of benchmark do not run on one
machine but on a faster and a slower one: this shows it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_tetri.bench.process import guard
from vllm_tetri.errors import UnsupportedError

_SIDE = 384  # of matrices that stay in a core's cache
_WARM_UP_S = 0.2
_FLOPS = 2 * _SIDE**3
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def speeds(cores: Sequence[int], seconds: float) -> list[float]:
    """Of all these cores at the same time, in GFLOP/s of float32 products.

    Raises:
        UnsupportedError: A process ended without an answer.
    """
    running = [
        subprocess.Popen(
            [*guard([core]), sys.executable, "-m", __name__, str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ONE_THREAD},
        )
        for core in cores
    ]
    answers = [child.communicate()[0] for child in running]
    if any(child.returncode for child in running):
        raise UnsupportedError("the speed of the machine could not be measured")
    return [round(float(answer), 2) for answer in answers]


def _main(seconds: float) -> None:
    rng = np.random.default_rng(0)
    left, right = rng.random((2, _SIDE, _SIDE), dtype=np.float32)
    _repeat(left, right, _WARM_UP_S)
    print(_repeat(left, right, seconds) * _FLOPS / 1e9)


def _repeat(left: NDArray[np.float32], right: NDArray[np.float32], seconds: float) -> float:
    """Products per second."""
    count, started = 0, time.perf_counter()
    while (took_s := time.perf_counter() - started) < seconds:
        left @ right
        count += 1
    return count / took_s


if __name__ == "__main__":
    _main(float(sys.argv[1]))
