"""Results of commands, in small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_tetri.bench.modes.cells import Cell, Request
from vllm_tetri.bench.modes.client import Reply
from vllm_tetri.bench.report.read import READERS
from vllm_tetri.bench.report.values import Value, Values, value
from vllm_tetri.bench.suite.jobs import JOBS

SVG = (
    '<?xml version="1.0"?><!DOCTYPE svg PUBLIC "a" "http://www.w3.org/x.dtd">'
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    'width="10pt" height="5pt" viewBox="0 0 10 5"><metadata><a href="http://x"/></metadata>'
    '<defs><path id="m1" d="M 0 0" clip-path="url(#c1)"/></defs><use xlink:href="#m1"/></svg>'
)


def measured(
    system: str, metric: str, *samples: float, group: str = "lpld knee", experiment: str = "e1"
) -> Value:
    found = value(experiment, group, system, metric, samples)
    assert found is not None
    return found


def simulated(row: Mapping[str, Any]) -> list[Value]:
    return [each for each in READERS["paper"](Path(), {"rows": [row]}) if each is not None]


def read(job: str, raw: Mapping[str, Any]) -> Values:
    return Values([each for each in READERS[job](Path(), raw) if each is not None])


def put(folder: Path, job: str, raw: Any) -> None:
    own = folder / job
    own.mkdir(parents=True, exist_ok=True)
    (own / JOBS[job].result).write_text(raw if isinstance(raw, str) else json.dumps(raw))


def turn(ttft_s: float) -> dict[str, Any]:
    return {"ttft_s": [ttft_s] * 2, "waiting_s": [ttft_s / 2] * 2, "total_s": 3.0}


ORDER = {
    "conditions": {"model": "small", "requests": 2, "engines": {"ours": {"vllm": "0.32"}}},
    "queue": {
        "systems": {
            "stock, 2048 a step": [turn(2.0), turn(4.0)],
            "stock, 256 a step": [turn(3.0), turn(3.0)],
            "fcfs": [turn(1.0), turn(2.0)],
            "sjf 16": [turn(0.8), turn(1.6)],
            "sjf 128": [turn(0.4), turn(0.8)],
        }
    },
}
SATURATION = {
    "format": 1,
    "conditions": {"model": "m", "device": "cpu"},
    "profile": {
        "chunk_tokens": 256,
        "curve": [{"tokens": 256, "seconds": 0.1}, {"tokens": 512, "seconds": 0.2}],
        "decodes": [{"num_decodes": 1, "context_tokens": 128, "seconds": 0.05}],
        "cost": {
            "curve": [{"tokens": 256, "seconds": 0.1}, {"tokens": 512, "seconds": 0.2}],
            "context_s": 0.0, "base_s": 0.04, "request_s": 0.0, "token_s": 1e-6, "shared_s": 0.0,
        },
    },
}  # fmt: skip
HEAD = {
    "conditions": {"model": "m", "cores": 2, "requests": 2},
    "capacities": {"lpld": 4.0},
    "lone": {"ttft_s": 0.1, "tpot_s": 0.01},
    "foreign": 0.0,
}
PACES = {"stock": (0.1, 30_000), "split": (0.2, 10_000)}  # first token, µs between others


def cells(
    folder: Path,
    *,
    cut: str = "",
    paces: Mapping[str, tuple[float, int]] = PACES,
    name: str = "lpld",
    rates: Mapping[str, float] | None = None,
    refused: tuple[str, int] | None = None,
) -> None:
    """Split is late with the first token and steady afterwards, in two repeats.

    Args:
        refused: System and repeat in which the second request has no answer.
    """
    put(folder, "modes", HEAD)
    lines = []
    for system, (ttft_s, gap_us) in paces.items():
        for rate, per_s in (rates or {"knee": 2.8}).items():
            for repeat in range(2):
                reply = Reply(ttft_s, ttft_s + 4 * gap_us / 1e6, [gap_us] * 4)
                second = Reply(0.0, 0.0, [], "429") if (system, repeat) == refused else reply
                requests = [Request(0.0, 10, 5, each) for each in (reply, second)]
                cell = Cell(system, name, rate, repeat, per_s, 2.0, 0.5, 0.0, requests)
                lines.append(json.dumps({"cell": asdict(cell)}) + "\n")
    (folder / "modes" / "cells.jsonl").write_text("".join(lines) + cut)
