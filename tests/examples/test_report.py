"""Tables from results: those of the documentation, and those of a run."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from examples.benchmarks import report
from examples.benchmarks.classes import CLASSES, schedule
from examples.benchmarks.figures import Results, interval


@pytest.mark.parametrize("title", report.DERIVED)
def test_a_table_of_the_documentation_is_derived_from_kept_results(title: str) -> None:
    page, derive = report.DERIVED[title]
    derived = derive()
    assert derived.count("\n") > 2
    assert report.missing(derived, (report.DOCS / page).read_text()) == []


def test_a_changed_number_is_noticed() -> None:
    page = "| a | b |\n|---|--:|\n| x | 1.0 |\n"
    assert report.missing("| a | b |\n| --- | --- |\n| x | 1.0 |", page) == []
    assert report.missing("| a | b |\n| --- | --- |\n| x | 1.1 |", page) == ["| x | 1.1 |"]


def test_a_repeat_beside_which_others_used_the_cores_counts_for_no_system() -> None:
    rows = product(("hpld", "lpld"), (0, 1), ("stock", "both"))
    cells = pd.DataFrame(rows, columns=["name", "repeat", "system"])
    is_disturbed = cells.eval("name == 'hpld' and repeat == 1 and system == 'stock'")
    found = report.undisturbed(cells.assign(others_percent=is_disturbed * 12.0))
    assert len(found) == 6
    assert not len(found.query("name == 'hpld' and repeat == 1"))


def test_a_run_becomes_one_row_per_system(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    head = {"by": ["name", "system"], "metrics": ["ttft_mean_ms", "absent"], "conditions": {}}
    results = Results(path, head)
    for system, values in (("stock", (10.0, 12.0)), ("split", (20.0,))):
        for repeat, value in enumerate(values):
            results.add(name="mixed", system=system, repeat=repeat, ttft_mean_ms=value)
    rows = report.summary(*report.load(path))
    assert [row["system"] for row in rows] == ["stock", "split"]
    assert rows[0]["ttft_mean_ms"] == f"11.0 ± {interval((10.0, 12.0)):.1f}"
    assert rows[1]["ttft_mean_ms"] == "20.0"
    assert report.markdown(rows).count("\n") == 3
    report.draw(*report.load(path), "ttft_mean_ms", tmp_path / "run.svg")
    assert (tmp_path / "run.svg").stat().st_size > 1000


def test_a_run_goes_on_after_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Results(path, {"seed": 1}).add(name="a", repeat=0)
    with path.open("a") as file:
        file.write('{"cell": {"name": "b"')
    again = Results(path, {"seed": 2})
    assert again.head == {"seed": 1}
    assert again.has(name="a", repeat=0)
    assert not again.has(name="b")


@pytest.mark.parametrize("name", CLASSES)
def test_a_schedule_depends_on_its_seed_only(name: str) -> None:
    first, again = (schedule(name, 8, 2.0, "seed") for _ in range(2))
    assert first == again
    assert first != schedule(name, 8, 2.0, "other seed")
    assert [each.at_s for each in first] == sorted(each.at_s for each in first)
