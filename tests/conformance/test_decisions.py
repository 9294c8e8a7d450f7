"""Simulated instances decide what real ones decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.compare import assert_same, steps
from tests.conformance.scripts import one, random_one, random_stock, random_three, spec, three
from vllm_tetri.policy.admission import ADMISSIONS
from vllm_tetri.policy.order import ORDERS
from vllm_tetri.sim.config import Stock
from vllm_tetri.sim.log import DecodeChosen

SEEDS = range(3)


@pytest.mark.parametrize("order", list(ORDERS))
def test_prompts_in_chunks(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [
        spec(0, 0.1, 200, 20), spec(1, 0.2, 30, 5), spec(2, 0.3, 64, 40), spec(3, 0.4, 1, 9),
        spec(4, 2.5, 10, 1), spec(5, 2.6, 128, 3), spec(6, 2.7, 65, 30), spec(7, 4.5, 15, 12),
    ]  # fmt: skip
    setting = one(order=order, sched_batch=4)

    decided = assert_same(setting, specs, tmp_path, monkeypatch)

    assert any(len(step.prompts) > 1 for step in steps(decided))  # they share chunks


@pytest.mark.parametrize("admission", list(ADMISSIONS))
def test_a_small_pool(admission: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As long as outputs of that bucket are expected to be.
    specs = [spec(number, 0.1 + number / 4, 50 + 9 * number, 100, 0) for number in range(6)]
    setting = one(admission=admission, kv_blocks=20)

    decided = assert_same(setting, specs, tmp_path, monkeypatch)

    is_greedy = admission == "greedy"
    assert any(step.preempted for step in steps(decided)) is is_greedy


@pytest.mark.parametrize("admission", list(ADMISSIONS))
def test_kv_that_comes_to_small_pools(
    admission: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [spec(number, 0.1 + number / 3, 30 + 20 * number, 70, 0) for number in range(9)]

    decided = assert_same(three(admission=admission, kv_blocks=24), specs, tmp_path, monkeypatch)

    assert {each.to for each in decided if isinstance(each, DecodeChosen)} == {"d0", "d1"}


@pytest.mark.parametrize("budget", [64, 128])
def test_vllm_as_it_comes(budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [spec(number, 0.1 + number / 4, 50 + 29 * number, 70) for number in range(6)]
    setting = one(kind=Stock(budget), kv_blocks=24)

    decided = assert_same(setting, specs, tmp_path, monkeypatch)

    assert any(step.preempted for step in steps(decided))


@pytest.mark.parametrize("seed", SEEDS)
def test_any_requests_on_one(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*random_one(seed), tmp_path, monkeypatch)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_requests_on_vllm(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*random_stock(seed), tmp_path, monkeypatch)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_requests_on_three(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*random_three(seed), tmp_path, monkeypatch)
