"""What replies amount to, how sure a mean over repeats is, and the file that keeps results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from examples.benchmarks.client import Reply


def tpot_s(reply: Reply) -> float:
    """Seconds from the first token to the last, per further token."""
    return (reply.jct_s - reply.ttft_s) / max(1, reply.num_tokens - 1)


def figures(replies: Sequence[Reply]) -> dict[str, float]:
    """Return latencies of what was served, in milliseconds, and how many requests failed."""
    served = [each for each in replies if not each.error]
    found = {"completed": float(len(served)), "failed": float(len(replies) - len(served))}
    if served:
        ttft, jct = (1e3 * np.array([getattr(x, k) for x in served]) for k in ("ttft_s", "jct_s"))
        gaps = np.array([gap for each in served for gap in each.gaps_us] or [0]) / 1e3
        found |= {
            "ttft_mean_ms": float(ttft.mean()),
            "ttft_p50_ms": float(np.median(ttft)),
            "ttft_p99_ms": float(np.quantile(ttft, 0.99)),
            "itl_p99_ms": float(np.quantile(gaps, 0.99)),
            "tpot_mean_ms": 1e3 * float(np.mean([tpot_s(each) for each in served])),
            "jct_mean_ms": float(jct.mean()),
            "jct_p99_ms": float(np.quantile(jct, 0.99)),
        }
    return found


def share_in_time(replies: Sequence[Reply], ttft_slo: float, tpot_slo: float) -> float:
    """Share of all requests that were served within both SLOs, in seconds."""
    in_time = [
        not each.error and each.ttft_s <= ttft_slo and tpot_s(each) <= tpot_slo for each in replies
    ]
    return sum(in_time) / len(in_time)


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean (Student); NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


class Results:
    """Lines of one file: a head, then one per cell. A cut last line is dropped.

    Args:
        head: `conditions` of the run, and for the report `by`, the names that tell cells apart,
            and `metrics`, the names of their numbers. The head of a file that exists wins.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        good = [json.loads(line) for line in lines if line.endswith("}")]
        self.head: dict[str, Any] = good[0]["head"] if good else dict(head)
        self.cells = [each["cell"] for each in good[1:]]
        self.rewrite()

    @classmethod
    def of(
        cls,
        path: Path,
        by: Sequence[str],
        metrics: Sequence[str],
        conditions: Mapping[str, Any],
        *,
        is_new: bool = False,
    ) -> Results:
        """Begin a file with such a head, or continue it unless it `is_new`."""
        if is_new:
            path.unlink(missing_ok=True)
        return cls(path, {"by": [*by], "metrics": [*metrics], "conditions": conditions})

    def rewrite(self) -> None:
        """Write the file anew, with what the head holds now."""
        self._path.write_text("")
        for each in [{"head": self.head}, *({"cell": cell} for cell in self.cells)]:
            self._append(each)

    def has(self, **key: Any) -> bool:
        """Whether a cell is there already."""
        return any(all(cell[k] == v for k, v in key.items()) for cell in self.cells)

    def add(self, **cell: Any) -> None:
        """Append a cell."""
        self.cells.append(cell)
        self._append({"cell": cell})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
