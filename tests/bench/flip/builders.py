"""A run of `vllm-tetri bench flip` that can be worked out by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from vllm_tetri.bench.arrivals import Answered, Arrival, Kind, Length, Slo
from vllm_tetri.bench.flip.run import Look, Run, run_of

SWING = [Kind.CODE, Kind.CONVERSATION] * 2
SLO = Slo(ttft_s=5.0, tpot_s=0.1)


def row(role: str, state: str = "ready", flips: int = 0, **of_flip: Any) -> dict[str, Any]:
    known = {"source": "decode", "target": "prefill", "commit_s": 0.0, "drain_s": 0.0}
    known |= {"reason": "wanted", "problem": "", "age_s": 0.0}
    return {"role": role, "state": state, "flips": flips, "flip": {**known, **of_flip} or None}


BEFORE = {
    "a": row("prefill", epoch=1, stage="done"),
    "b": {**row("decode"), "flip": None},
    "c": row("decode", epoch=4, stage="done", flips=2),
}
DRAINING = {**BEFORE, "c": row("decode", "flipping", 2, epoch=5, stage="draining", age_s=0.1)}
AFTER = {
    **BEFORE,
    "c": row("prefill", "ready", 3, epoch=5, stage="done", drain_s=3.0, commit_s=0.02, age_s=1),
}
LOOKS = [Look(0.0, BEFORE), Look(1.1, DRAINING), Look(4.5, AFTER)]
ANSWERED = [
    Answered(Arrival(1.0, 0, Length(100, 11)), first_s=1.0, done_s=2.0),
    Answered(Arrival(1.5, 0, Length(100, 11)), first_s=6.0, done_s=7.0),
    Answered(Arrival(61.0, 1, Length(100, 6)), first_s=3.0, done_s=4.0),
]


def made(answered: list[Answered] = ANSWERED) -> Run:
    return run_of(
        answered,
        SWING,
        SLO,
        looks=LOOKS,
        before=BEFORE,
        after=AFTER,
        busy_s=20.0,
        late_s=0.01,
        scale=0.5,
    )


def results() -> dict[str, Any]:
    slower = [Answered(each.arrival, each.first_s, 2 * each.done_s) for each in ANSWERED]
    fast, slow = asdict(made()), asdict(made(slower))
    every = {"1P2D": [slow, slow], "2P1D": [fast, fast], "balance": [fast, slow], "idle": [slow]}
    conditions = {
        "phases": 4,
        "phase_s": 60.0,
        "rates": [1.3, 1.0],
        "code": "x",
        "conversation": "y",
        "instances": 3,
        "kv_tokens": 8192,
        "slo_ttft_s": 5.0,
        "slo_tpot_s": 0.1,
        "pace": "p",
        "scale": 0.5,
    }
    # As it comes back from the file.
    loads = {"swing": every, "code": {"2P1D": [fast]}}
    found: dict[str, Any] = json.loads(json.dumps({"conditions": conditions, "loads": loads}))
    return found
