"""Cells of `vllm-tetri bench modes` whose figures can be worked out by hand."""

from __future__ import annotations

from typing import Any

from vllm_tetri.bench.arrivals import Slo
from vllm_tetri.bench.modes.cells import Cell, Request
from vllm_tetri.bench.modes.client import Reply
from vllm_tetri.bench.modes.figures import METRICS, Results, Slos
from vllm_tetri.bench.modes.load import KNEE

CAPACITIES = {"lpld": 4.0, "lphd": 1.0, "hpld": 2.0, "hphd": 0.5, "mixed": 1.5}
SLO = Slos(Slo(2.0, 0.1), Slo(0.5, 0.05))
LOAD = ("lpld", KNEE)
BY_KEY = {metric.key: metric for metric in METRICS}
HEAD: dict[str, Any] = {
    "conditions": {
        "device": "abacus", "cores": 2, "vllm": "0", "model": "m", "options": [], "requests": 2,
        "kv_bytes": 1 << 30, "max_num_seqs": 128,
    },
    "lone": {"ttft_s": 0.1, "tpot_s": 0.01},
    "capacities": CAPACITIES,
    "foreign": 0.02,
}  # fmt: skip


def request(ttft_s: float, gaps_s: tuple[float, ...], at_s: float = 0.0) -> Request:
    gaps_us = [round(1e6 * gap) for gap in gaps_s]
    reply = Reply(ttft_s, ttft_s + sum(gaps_s), gaps_us)
    return Request(at_s, 10, len(gaps_s) + 1, reply)


def refused(status: int = 503) -> Request:
    return Request(0.0, 10, 5, Reply(error=f"HTTP/1.1 {status}"))


def cell(
    system: str = "stock",
    ttft_s: float = 0.4,
    gap_s: float = 0.04,
    *,
    rate: str = KNEE,
    repeat: int = 0,
    answered: int = 2,
    failed: int = 0,
) -> Cell:
    """Requests of five tokens that were answered alike, and some that failed."""
    good = [request(ttft_s, (gap_s,) * 4)] * answered
    return Cell(system, "lpld", rate, repeat, 2.8, 4.0, 0.9, 0.01, [*good, *[refused()] * failed])


def results(*found: Cell) -> Results:
    return Results(found, SLO)
