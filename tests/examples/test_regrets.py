"""What ways of serving cost beside the best one."""

from __future__ import annotations

from argparse import Namespace

import pytest

from examples.benchmarks import regrets


def test_each_cell_names_the_best_way_and_what_others_cost_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regrets, "CLASSES", ("hpld",))
    monkeypatch.setattr(regrets, "RATES", {"knee": 0.7})
    (cell,) = regrets.cells(
        "smollm2-1core", Namespace(num_prompts=80, seconds=0, rates="knee", repeats=1)
    )
    assert (cell["class"], cell["rate"]) == ("hpld", "knee")
    assert min(cell["usual"], cell["roles"], cell["usual_of_layouts"]) >= 0
    assert cell["usual_of_layouts"] <= cell["usual"]
    assert cell["roles"] > cell["usual_of_layouts"]  # decodes are dear where cores compute
    assert cell["best"].split()[0].strip(",") in ("adaptive", "whole", "split")
    shown = cell["figures"]
    assert shown.keys() >= regrets.LAYOUTS.keys()
    first, second = (tuple(shown[f"{regrets.STOCK}{tokens}"]) for tokens in regrets.BUDGETS)
    assert first != second, "budgets count"
    assert all(0 < ttft_s < jct_s for ttft_s, _, jct_s in shown.values())
