"""Numbers of papers."""

from __future__ import annotations

import re

import pytest

from tests.bench.report.builders import measured
from vllm_tetri.bench.report import paper_numbers
from vllm_tetri.bench.report.claims import ASKS
from vllm_tetri.bench.report.paper_numbers import Form, PaperNumber, told
from vllm_tetri.bench.report.read import READERS
from vllm_tetri.bench.report.values import METRICS, perf
from vllm_tetri.bench.suite.experiments import EXPERIMENTS
from vllm_tetri.bench.suite.jobs import JOBS


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
