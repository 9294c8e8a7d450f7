"""Prints what torch says of the GPU that is visible first, as one line of JSON."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import torch

GIB = 1 << 30


def _all_gpus() -> int:
    """How many GPUs the driver has, whichever are visible to this process."""
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def main() -> None:
    found: dict[str, Any] = {"torch": torch.__version__, "all": _all_gpus()}
    found["count"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found["count"]:
        free, total = torch.cuda.mem_get_info(0)
        found |= {
            "name": torch.cuda.get_device_name(0),
            "capability": torch.cuda.get_device_capability(0),
            "cuda": torch.version.cuda,
            "free_gib": free / GIB,
            "total_gib": total / GIB,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
