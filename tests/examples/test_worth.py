"""What lengths are worth: simulated with answers that a model gave."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean

import pandas as pd
import pytest

from examples.benchmarks.report import RESULTS
from examples.predictor.worth import CLASSIFIER_SHARE, PREDICTORS, cases, play, requests

ROWS = pd.read_csv(RESULTS / "head-mixed.csv.gz").dropna()


def test_requests_are_the_same_whatever_is_known_of_them() -> None:
    drawn = {who: requests(ROWS, 3.0, who, 1) for who in PREDICTORS}
    bare = [[replace(each, predicted=None) for each in specs] for specs in drawn.values()]
    assert bare[0] == bare[1] == bare[2] == bare[3] == drawn["histogram"]
    for each in drawn["oracle"]:
        assert each.predicted.lengths == (each.output_tokens,)
    right = [each.predicted.median_tokens // 200 == min(each.output_tokens // 200, 9)
             for each in drawn["classifier"]]  # fmt: skip
    assert fmean(right) == pytest.approx(CLASSIFIER_SHARE, abs=0.06)


def test_every_case_is_one_of_a_load() -> None:
    assert len(set(cases())) == len(list(cases()))


def test_the_shortest_first_shortens_the_mean_where_lengths_are_known() -> None:
    times = partial(play, ROWS, 1, 3.0, "reserve-dynamic")
    assert times("shortest", "oracle", 0)["jct_s"] < times("fcfs", "oracle", 0)["jct_s"]
