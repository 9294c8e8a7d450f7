"""What results of each command are beside the papers' numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.report.builders import ORDER, SATURATION, read, simulated
from vllm_tetri.bench.report import paper_numbers
from vllm_tetri.bench.report.claims import claims
from vllm_tetri.bench.report.losses import losses
from vllm_tetri.bench.report.tables import claims_table
from vllm_tetri.bench.report.values import Source


def test_order_beside_the_paper() -> None:
    values = read("order", ORDER)
    found = {each.number.key: each.ours for each in claims("e2", values)}
    (chunked,), (sjf,), (batch,) = found["e2 chunked"], found["e2 sjf"], found["e2 batch"]
    assert chunked.found.mean == pytest.approx(-0.5)
    assert chunked.found.half == pytest.approx(0)
    assert sjf.found.mean == pytest.approx(-0.2)
    assert batch.found.mean == pytest.approx(-0.5)
    assert values.get("e2", Source.MEASURED, "full queue", "stock, budget = chunk", "ttft_mean_s")


def test_the_only_stock_in_overhead_has_our_chunk_as_its_budget() -> None:
    overhead = {"stock, 256 a step": {"schedule_s": [1e-4]}, "fcfs": {"schedule_s": [1e-4]}}
    values = read("order", {"overhead": overhead})
    assert [each.system for each in values.all] == ["stock, budget = chunk", "fcfs"]


def test_admission_and_dispatch() -> None:
    def run(jct_s: float, preempted: int) -> dict[str, Any]:
        return {"jct_s": [jct_s], "total_s": 9.0, "counters": {"preemptions": preempted}}

    systems = {"greedy": [run(10, 7)], "reserve-dynamic, oracle 100.0%": [run(8.8, 1)]}
    found = {
        each.number.key: each.ours for each in claims("e5", read("admission", {"systems": systems}))
    }
    assert found["e5 dynamic ideal"][0].found.mean == pytest.approx(-0.12)
    assert found["e5 static ideal"] == []

    def spread(decode_s: float, *heavy: int) -> dict[str, Any]:
        shares = [
            {"heavy": each, "light": 1, "tokens": 10, "done_s": place}
            for place, each in enumerate(heavy)
        ]
        return {"shares": shares, "decode_s": decode_s, "jct_s": 1.0}

    policies = {
        "power-of-two-ratio": [spread(8, 2, 4)], "power-of-two": [spread(9, 2, 4)],
        "random": [spread(10, 0, 6)],
    }  # fmt: skip
    values = read("dispatch", {"instances": {"4": policies}})
    random = next(e for e in claims("e6", values) if e.number.key == "e6 random")
    assert [each.text(random.number) for each in random.ours] == [
        "the paper's measure, 4 instances: -20 %", "ours, 4 instances: -10 %",
    ]  # fmt: skip
    assert random.number.value is None
    # An imagined device's times are not called measured.
    assert {each.source for each in values.all} == {Source.PACED}
    assert claims_table(claims("e6", values)).heads[3] == "paced engines"
    assert claims_table(claims("e7", values)).heads[3] == "real engines"
    slowest = values.get("e6", Source.PACED, "4 decode instances", "random", "heavy_of_slowest")
    assert slowest is not None
    assert slowest.found.mean == 6


def test_step_costs_are_estimates_of_interference() -> None:
    values = read("saturation", SATURATION)
    (chunk,) = claims("e8", values)[0].ours
    assert chunk.found.mean == 256
    found = {each.number.key: each.ours for each in claims("e7", values)}
    (heavy,) = found["e7 decode heavy"]
    assert heavy.ask.source is Source.ESTIMATE
    decode_s = 0.04 + 48e-6
    assert heavy.found.mean == pytest.approx((decode_s + 0.2) / decode_s)
    (latency,), (throughput,) = found["e7 half latency"], found["e7 half throughput"]
    assert 1 + throughput.found.mean == pytest.approx(1 / (1 + latency.found.mean))
    assert found["e7 light 7"] == []


def test_interference_flips_transfers_and_hand_overs() -> None:
    points = [
        {"system": system, "watched": "light", "others": others, "count": count, "ttft_s": ttft_s}
        for system, factor in (("stock, 2048 a step", 1.0), ("ours, sjf 16", 0.5))
        for others, count, ttft_s in (("nobody", 0, 1.0), ("light", 7, 2.0 * factor))
    ]
    found = claims("e7", read("interference", {"points": points}))
    light = next(each for each in found if each.number.key == "e7 light 7")
    assert [each.found.mean for each in light.ours] == pytest.approx([2.0, 1.0])

    times = [{"source": "prefill", "commit_s": 0.001, "drain_s": 0.1}] * 3
    overall = {"jct_s": 1.0, "ttft_s": 0.1, "attained": 1.0}
    swing = {"balance": [{"overall": overall, "instances": 3, "makespan_s": 9.0, "flips": 1}]}
    values = read("flip", {"loads": {"swing": swing}, "timing": times})
    assert {(each.group == "swing", each.source) for each in values.all} == {
        (True, Source.PACED), (False, Source.MEASURED),
    }  # fmt: skip
    (flip,) = claims("e9", values)
    assert [each.text(flip.number) for each in flip.ours] == ["from prefill: 1 ms ±0 ms"]

    row = {"page_bytes": 256 << 10, "memcpy": 9e9, "shm": 5e9, "tcp": 1e9, "raw": 1.5e9}
    direct, network = claims("e10", read("transfer", {"rows": [row]}))
    assert direct.ours[0].found.mean == pytest.approx(5.0)
    assert network.ours[0].found.mean == pytest.approx(1.0)

    lengths = {"100": {"stock": [[0.1, 0.2, 0.3]] * 2, "prefill + decode": [[0.15, 0.3, 0.4]] * 2}}
    values = read("handover", {"lengths": lengths})
    lost = {each.mine.metric: each for each in losses(values.all)}
    assert set(lost) == {"ttft_mean_s", "second_s"}
    assert lost["ttft_mean_s"].is_certain
    assert lost["second_s"].times is None  # 0 in stock: a ratio would say nothing


def test_predictor_and_lengths() -> None:
    interval = {"value": 0.6, "low": 0.5, "high": 0.7}
    method = {"metrics": {"accuracy": interval}, "calibration_error": None}
    granularity = {"buckets": {"granularity_tokens": 200}, "methods": {"predictor": method}}
    found = claims("e4", read("lengths", {"granularities": [granularity]}))
    (accuracy,) = next(each.ours for each in found if each.number.key == "e4 200")
    assert accuracy.text(paper_numbers.BY_KEY["e4 200"]) == "60 % ±10 %"

    def run(ttft_s: float, total_s: float) -> dict[str, Any]:
        return {"ttft_s": [ttft_s] * 4, "total_s": total_s, "missed": 0}

    modes = {
        "no predictor": [run(1.0, 4.0)], "no predictor, again": [run(1.0, 4.0)],
        "parallel": [run(1.1, 5.0)], "sequential": [run(2.0, 8.0)],
    }  # fmt: skip
    raw = {"places": {"own": {"runs": {"all at once": modes}}}}
    by_key = {each.number.key: each.ours for each in claims("e3", read("predictor", raw))}
    assert by_key["e3 latency"][0].found.mean == pytest.approx(0.1)
    assert by_key["e3 throughput"][0].found.mean == pytest.approx(-0.2)
    assert by_key["e3 unaffected"][0].found.mean == pytest.approx(0.0)


def test_rows_of_the_simulator() -> None:
    row = {"experiment": "e1", "group": "lpld, roce", "metric": "jct_mean_s", "values": [0.6, 0.6]}
    rows = [{**row, "system": "tetri"}, {**row, "system": "vllm-2023", "values": [1.0, 1.0]}]
    values = read("paper", {"rows": rows})
    jct = next(each for each in claims("e1", values) if each.number.key == "e1 lpld jct")
    (ours,) = jct.ours
    assert ours.ask.source is Source.SIMULATED
    assert ours.text(jct.number) == "roce: -40 % ±0 %"
    with pytest.raises(ValueError, match="speed"):
        simulated({**row, "system": "tetri", "metric": "speed"})
