"""`vllm-tetri bench report`: what is read, what is made of it, and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from vllm_tetri import cli
from vllm_tetri.bench.modes.cells import Cell, Request
from vllm_tetri.bench.modes.client import Reply
from vllm_tetri.bench.report import paper_numbers
from vllm_tetri.bench.report.claims import ASKS, claims
from vllm_tetri.bench.report.document import Document, Folded, Heading, Items, Table, Text
from vllm_tetri.bench.report.html import html
from vllm_tetri.bench.report.load import load
from vllm_tetri.bench.report.losses import beside, losses
from vllm_tetri.bench.report.markdown import markdown
from vllm_tetri.bench.report.paper_numbers import Form, PaperNumber, told
from vllm_tetri.bench.report.read import READERS
from vllm_tetri.bench.report.svg import SvgError, inline
from vllm_tetri.bench.report.tables import chunked_table, claims_table, perf_table, tally
from vllm_tetri.bench.report.values import METRICS, Source, Value, Values, perf, value
from vllm_tetri.bench.suite.experiments import EXPERIMENTS
from vllm_tetri.bench.suite.jobs import JOBS
from vllm_tetri.errors import ConfigError

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


# -- numbers of papers -------------------------------------------------------------


def test_every_number_of_a_paper_belongs_to_an_experiment_and_names_its_place() -> None:
    keys = [each.key for each in paper_numbers.NUMBERS]
    assert len(set(keys)) == len(keys)
    assert {each.experiment for each in paper_numbers.NUMBERS} == set(EXPERIMENTS)
    for each in paper_numbers.NUMBERS:
        assert re.search(r"Figure|section", each.source)
        assert each.text()


def test_what_stands_beside_them_exists() -> None:
    assert {ask.key for ask in ASKS} <= set(paper_numbers.BY_KEY)
    assert {ask.metric for ask in ASKS} <= {*METRICS, paper_numbers.PERF}
    assert set(READERS) == set(JOBS)


def test_the_papers_perf_per_dollar_follows_from_its_other_numbers() -> None:
    """So the formula that the report names as the paper's is it (two roundings apart)."""
    by_key = paper_numbers.BY_KEY
    for name in ("lpld", "lphd", "hpld", "hphd", "mixed"):
        jct = by_key[f"e1 {name} jct"].value
        used = by_key[f"e1 {name} resource"].value or 0.0
        stated = by_key[f"e1 {name} perf"].value
        assert jct is not None
        assert stated is not None
        found = perf(
            measured("a", "jct_mean_s", 1 + jct), measured("b", "jct_mean_s", 1.0),
            measured("a", "resource_s", 1 + used), measured("b", "resource_s", 1.0),
        )  # fmt: skip
        assert found is not None
        assert found.paper.mean == pytest.approx(stated, abs=0.05)
        assert found.plain.mean == pytest.approx(1 / ((1 + jct) * (1 + used)))


@pytest.mark.parametrize(
    ("form", "number", "text"),
    [
        (Form.CHANGE, -0.44, "-44 %"),
        (Form.CHANGE, -0.078, "-7.8 %"),
        (Form.CHANGE, -0.0001, "0 %"),
        (Form.TIMES, 1.4, "1.40x"),
        (Form.SIZE, 512, "512 tokens"),
    ],
)
def test_numbers_in_words(form: Form, number: float, text: str) -> None:
    assert told(form, number, "tokens") == text


def test_a_statement_without_a_number_keeps_its_words() -> None:
    assert PaperNumber("e1 x", "x", Form.CHANGE, None, "Figure 1", "comparable").text() == (
        "comparable"
    )


# -- reading -----------------------------------------------------------------------


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


def test_modes_are_values_of_several_experiments(tmp_path: Path) -> None:
    cells(tmp_path, cut='{"cell": ')
    found = load(tmp_path)
    assert found.problems == {}
    assert (tmp_path / "modes" / "cells.jsonl").read_text().endswith('{"cell": ')  # as it was
    get = found.values.get
    ttft = get("e1", Source.MEASURED, "lpld knee", "split", "ttft_mean_s")
    assert ttft is not None
    assert ttft.samples == {0: pytest.approx(0.2), 1: pytest.approx(0.2)}
    used = get("e1", Source.MEASURED, "lpld knee", "stock", "resource_s")
    assert used is not None
    assert used.found.mean == pytest.approx(0.5 * 2.0 * 2)
    # A larger rate was not asked, so nobody knows the largest.
    assert get("e11", Source.MEASURED, "lpld", "split", "sustained_per_s") is None
    table = perf_table(found.values, Source.MEASURED)
    assert table is not None
    assert [row[:2] for row in table.rows] == [["lpld knee", "split"]]


def test_times_of_those_who_were_not_refused_are_no_results(tmp_path: Path) -> None:
    cells(tmp_path, refused=("split", 1))
    values = load(tmp_path).values
    found = {each.metric: each for each in values.all if each.system == "split"}
    for metric in ("ttft_mean_s", "jct_p99_s", "itl_p99_s", "resource_s"):
        assert list(found[metric].samples) == [0]
    assert found["failed"].samples == {0: 0, 1: 1}
    assert found["goodput_strict"].samples == {0: 1.0, 1: 0.5}
    assert found["share_strict"].samples == {0: 1.0, 1: 0.5}


def test_claims_of_modes_say_what_they_are_of(tmp_path: Path) -> None:
    paces = {"stock": (0.1, 70_000), **dict.fromkeys(("stock-128", "stock-256"), (0.2, 10_000))}
    rates = {"light": 1.4, "knee": 2.8, "past": 4.4}
    cells(tmp_path, paces={**paces, "split": (0.2, 10_000)}, name="mixed", rates=rates)
    values = load(tmp_path).values
    (chunked,) = claims("e13", values)
    assert [each.ask.label.partition(",")[0] for each in chunked.ours] == [
        "split to stock-128", "split to stock-256",
    ]  # fmt: skip
    assert all("not a highest rate" in each.ask.label for each in chunked.ours)
    # Stock stalls at every rate: there is no ratio to what it sustains.
    assert [each.ours for each in claims("e11", values)] == [[]]
    best = values.get("e11", Source.MEASURED, "mixed", "stock-256", "sustained_per_s")
    assert best is not None
    assert best.found.mean == pytest.approx(4.4)

    calm = {**paces, "stock": (0.1, 10_000), "split": (0.2, 10_000)}
    cells(tmp_path, name="mixed", paces=calm, rates=rates)
    (capacity,) = claims("e11", load(tmp_path).values)
    assert [each.found.mean for each in capacity.ours] == [1.0, 1.0]
    cells(tmp_path, name="mixed", paces=calm)
    values = load(tmp_path).values
    assert [each.ours for each in claims("e11", values)] == [[]]  # of one rate of three
    (goodput,) = claims("e12", values)[0].ours
    assert "not a highest rate" in goodput.ask.label


# -- where disaggregation loses ----------------------------------------------------


def test_what_is_worse_than_the_best_other_is_listed() -> None:
    found = [
        measured("split", "ttft_mean_s", 2.0, 2.1), measured("stock", "ttft_mean_s", 1.0, 1.05),
        measured("replicas", "ttft_mean_s", 1.9, 1.9),
        measured("split", "jct_mean_s", 1.0, 1.0), measured("stock", "jct_mean_s", 2.0, 2.0),
        measured("adaptive", "goodput_strict", 1.0, 2.0),
        measured("stock", "goodput_strict", 1.9, 2.0),
        measured("split", "goodput_strict", 3.0), measured("adaptive", "flips", 5.0),
        measured("stock", "flips", 1.0), measured("split", "total_s", 5.0),
    ]  # fmt: skip
    lost = losses(found)
    assert [(e.mine.system, e.mine.metric, e.best.system) for e in lost] == [
        ("split", "ttft_mean_s", "stock"),
        ("adaptive", "goodput_strict", "stock"),
    ]
    assert [each.is_certain for each in lost] == [True, False]
    assert lost[0].times is not None
    assert lost[0].times.mean == pytest.approx(2.0)
    # Four comparisons: nothing else measured what split's total is, and flips are no merit.
    assert len(beside(found)) == 4
    assert tally(beside(found))[0] == (
        "split, measured: worse than the best of the others in 1 of 3 comparisons, 1 of them "
        "with 95 % certainty"
    )


def test_what_was_asked_otherwise_is_not_compared() -> None:
    found = [
        measured("split", "ttft_mean_s", 2.0),
        measured("stock", "ttft_mean_s", 1.0, group="lpld light"),
        *simulated(
            {"experiment": "e1", "group": "lpld knee", "system": "vllm-2023",
             "metric": "ttft_mean_s", "values": [1.0]}
        ),
    ]  # fmt: skip
    assert beside(found) == []


def test_equal_systems_lose_nothing_and_one_run_is_not_certain() -> None:
    equal = [measured("split", "jct_mean_s", 1.0), measured("stock", "jct_mean_s", 1.0)]
    assert losses(equal) == []
    once = [measured("split", "jct_mean_s", 1.1), measured("stock", "jct_mean_s", 1.0)]
    assert [each.is_certain for each in losses(once)] == [None]


def test_nothing_in_time_at_all_is_a_loss() -> None:
    none = [measured("split", "goodput_strict", 0.0), measured("stock", "goodput_strict", 1.0)]
    assert [each.mine.system for each in losses(none)] == ["split"]
    both = [measured("split", "goodput_strict", 0.0), measured("stock", "goodput_strict", 0.0)]
    assert losses(both) == []


def test_chunked_rivals_are_judged_alone() -> None:
    values = Values([
        measured("split", "ttft_mean_s", 2.0, 2.0), measured("stock", "ttft_mean_s", 0.5, 0.5),
        measured("stock-256", "ttft_mean_s", 1.0, 1.0),
    ])  # fmt: skip
    table = chunked_table(values, Source.MEASURED)
    assert table is not None
    assert table.rows == [["lpld knee", "split", "2.00 ±0.00 (stock-256) ✗"]]
    assert chunked_table(values, Source.SIMULATED) is None


# -- the page ----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some results, one that cannot be read, one without what it should have."""
    made = tmp_path / "suite"
    put(made, "order", ORDER)
    (made / "order" / "order.svg").write_text(SVG)
    put(made, "saturation", SATURATION)
    (made / "saturation" / "saturation.svg").write_text("<svg")
    put(made, "dispatch", '{"instances": ')
    put(made, "admission", {"conditions": {}})
    cells(made)
    row = {"experiment": "e1", "group": "lpld, roce", "metric": "jct_mean_s", "values": [0.6]}
    put(made, "paper", {
        "conditions": {"profile": "<b>opt-13b</b>"},
        "rows": [{**row, "system": "tetri"}, {**row, "system": "vllm-2023", "values": [1.0]}],
    })  # fmt: skip
    return made


def page(folder: Path) -> tuple[str, str]:
    assert cli.main(["bench", "report", str(folder)]) == 0
    return (folder / "report.html").read_text(), (folder / "report.md").read_text()


def test_the_page_is_whole_and_needs_nothing_else(folder: Path) -> None:
    text, _ = page(folder)
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    tags = [each.tag.rpartition("}")[2] for each in root.iter()]
    assert not {"script", "link", "img", "iframe", "object"} & set(tags)
    for each in root.iter():
        for name, held in each.attrib.items():
            if name.rpartition("}")[2] in ("href", "src"):
                assert held.startswith("#")
    assert not re.search(r"url\((?!#)|@import|<b>", text)
    names = [each.attrib["id"] for each in root.iter() if "id" in each.attrib]
    assert len(set(names)) == len(names)
    used = {held[1:] for e in root.iter() for n, held in e.attrib.items() if n.endswith("href")}
    assert used <= set(names)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_every_experiment_is_there_and_what_is_missing_says_how_to_run_it(folder: Path) -> None:
    for text in page(folder):
        for each in EXPERIMENTS.values():
            assert each.title in text
            assert each.figures in text or each.figures.capitalize() in text
        assert f"vllm-tetri bench suite MODEL --output {folder} --only e3 --predictor ..." in text
        assert "not run" in text
        assert "Where disaggregation loses" in text
        assert "roce: -40 %" in text


def test_what_cannot_be_read_is_said_and_stops_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, plain = page(folder)
    shown = capsys.readouterr().out
    for job in ("dispatch", "admission"):
        assert f"{job} is left out" in shown
        assert f"{job}: unreadable" in plain
    assert "no 'systems'" in plain
    assert "saturation.svg" in text  # why it is not shown


def test_a_rival_that_was_not_run_is_named(folder: Path) -> None:
    for text in page(folder):
        assert text.count("vllm-router (") == 1
        assert "Without the rival, vllm-router." in text
    cells(folder, paces={**PACES, "replicas": (0.1, 30_000)})
    for text in page(folder):
        assert "vllm-router" not in text


def test_markdown_names_pictures_where_they_are(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "elsewhere" / "page.html"
    assert cli.main(["bench", "report", str(folder), "--output", str(output)]) == 0
    text = (output.parent / "page.md").read_text()
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert "../suite/order/order.svg" in pictures
    assert "page-e2.svg" in pictures
    assert all((output.parent / each).exists() for each in pictures)


def test_equal_results_make_equal_pages(folder: Path) -> None:
    assert page(folder) == page(folder)


def test_an_empty_folder_is_all_not_run(tmp_path: Path) -> None:
    _, text = page(tmp_path)
    assert "Nothing to compare was run." in text
    assert text.count("not run. Run it with") >= len(EXPERIMENTS)


def test_a_missing_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "bench suite" in error
    assert error.count("\n") == 1


def test_a_failed_job_says_where_its_words_are(folder: Path) -> None:
    job = {"command": [], "status": "failed", "exit_status": 3, "took_s": 1.0, "finished": "now"}
    record = {"format": 1, "conditions": {"variant": "quick", "model": "m"}, "jobs": {"flip": job}}
    (folder / "suite.json").write_text(json.dumps(record))
    _, text = page(folder)
    assert f"failed (exit status 3), see `{folder}/flip/output.log`" in text
    assert f"vllm-tetri bench suite m --quick --output {folder} --only e9" in text
    (folder / "suite.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"suite\.json"):
        load(folder)


def test_pictures_lose_what_belongs_to_files(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    path.write_text(SVG)
    found = inline(path, "p7-")
    assert found.startswith("<svg")
    assert "metadata" not in found
    assert 'id="p7-m1"' in found
    assert 'href="#p7-m1"' in found
    assert "url(#p7-c1)" in found
    assert 'width="' not in found
    assert 'viewBox="0 0 10 5"' in found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<svg",
        "<html></html>",
        '<svg><image href="http://x/y.png"/></svg>',
        "<svg><script>1</script></svg>",
        '<svg><path style="fill: url(http://x)"/></svg>',
        '<svg><path onclick="f()"/></svg>',
        "<svg onload = 'f()'></svg>",
        '<svg><style>@import "x.css";</style></svg>',
        '<svg><a target="javascript:f()"/></svg>',
    ],
)
def test_other_pictures_are_not_taken(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.svg"
    path.write_text(text)
    with pytest.raises(SvgError, match=r"a\.svg"):
        inline(path, "p")


def test_text_is_escaped_and_marked_up() -> None:
    made = Document(
        "a < b",
        [
            Heading(2, "h", "h"), Text("`x<y>` and *this*, [there](#h)"), Items(["1", "2"]),
            Table(["a|b", "n"], [["x|y", "1"]]), Folded("long", Table(["c"], [["d"]])),
        ],
    )  # fmt: skip
    text = html(made)
    assert "<title>a &lt; b</title>" in text
    assert '<code>x&lt;y&gt;</code> and <em>this</em>, <a href="#h">there</a>' in text
    assert '<td class="n">1</td>' in text
    assert "<details><summary>long</summary>" in text
    stars = html(Document("t", [Text("`a*b` and `c*d`, *so*")]))
    assert "<p><code>a*b</code> and <code>c*d</code>, <em>so</em></p>" in stars
    plain = markdown(made, Path())
    assert "| a\\|b | n |\n| --- | --: |\n| x\\|y | 1 |" in plain
    assert "- 1\n- 2" in plain
