"""The planner."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_tetri import cli
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.sim.cost.hardware import gpu
from vllm_tetri.sim.cost.profiles import Least, Profile
from vllm_tetri.sim.plan.command import plain, recommendation
from vllm_tetri.sim.plan.goodput import Demand, Score, highest_rate
from vllm_tetri.sim.plan.search import config_of, plan
from vllm_tetri.sim.plan.values import Found, Layout, Plan, Question, System
from vllm_tetri.types import StepCoefficients

# Prompts disturb decodes a lot: 64 tokens take as long as ten steps.
TOUCHY = StepCoefficients(0.01, 1e-4, 0.0, 0.0016, 0.0, confidence=1.0)
# A step takes about the same with prompts and without: nothing is won by roles.
CALM = StepCoefficients(0.05, 1e-3, 0.0, 1e-4, 0.0, confidence=1.0)

TIGHT, LOOSE = Objective(0.6, 0.025), Objective(0.3, 0.12)


def made(cost: StepCoefficients, **changes: Any) -> Profile:
    return replace(Profile("test", cost, "made up", is_estimate=False, price=2.0), **changes)


def question(cost: StepCoefficients, slo: Objective, **changes: Any) -> Question:
    usual: dict[str, Any] = {
        "profiles": (made(cost),),
        "demand": Demand("lphd", ((100, 20),), least_requests=60),
        "slo": slo,
        "devices": 3,
    }
    return Question(**{**usual, **changes})


@pytest.fixture(scope="module")
def touchy() -> Plan:
    return plan(question(TOUCHY, TIGHT))


@pytest.fixture(scope="module")
def calm() -> Plan:
    return plan(question(CALM, LOOSE))


# -- goodput ---------------------------------------------------------------------------------


def falling_at(limit: float, asked: list[float]) -> Callable[[float], Score]:
    def scored(rate: float) -> Score:
        asked.append(rate)
        return Score(1.0, 0.0, 0.0) if rate <= limit else Score(0.5, 0.5, 0.0)

    return scored


@pytest.mark.parametrize("guess", [7.0, 1.0, 100.0, 6.9, 7.1])
def test_the_highest_rate_is_found_from_any_guess(guess: float) -> None:
    asked: list[float] = []

    rate, beyond = highest_rate(falling_at(7.0, asked), guess, 0.9)

    assert rate == pytest.approx(7.0, rel=0.03)
    assert rate <= 7.0
    assert beyond.ttft_missed == 0.5
    assert len(asked) < 15


@pytest.mark.parametrize(("limit", "least", "most"), [(-1.0, 0, 0), (math.inf, 500, math.inf)])
def test_a_rate_of_nothing_or_without_end_is_not_looked_for_long(
    limit: float, least: float, most: float
) -> None:
    asked: list[float] = []

    rate, _ = highest_rate(falling_at(limit, asked), 10.0, 0.9)

    assert least <= rate <= most
    assert len(asked) < 15


def test_requests_at_another_rate_are_the_same_ones_closer_together() -> None:
    demand = Demand("mixed", least_requests=50)

    slow, fast = demand.specs(1.0, 0.0), demand.specs(4.0, 0.0)

    assert len(slow) == len(fast) == 50
    assert len(demand.specs(4.0, 100.0)) == 400
    for one, other in zip(slow, fast, strict=True):
        assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)
        assert one.arrival_s == pytest.approx(4 * other.arrival_s)


# -- plans -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_handing_over_wins_where_prompts_disturb_decodes(touchy: Plan) -> None:
    assert not touchy.best.layout.is_aggregated
    assert touchy.recommended is touchy.best
    assert touchy.is_clear
    assert touchy.margin > 0.2
    assert touchy.rival is not None
    assert touchy.rival.layout.is_aggregated
    assert recommendation(touchy)[0].startswith("Take ")


@pytest.mark.slow
def test_coupled_wins_where_nothing_disturbs_and_says_so(calm: Plan) -> None:
    assert calm.recommended.layout.is_aggregated
    lines = recommendation(calm)
    assert lines[0].startswith("Do not separate prefill and decode")
    assert "simulated" in lines[-1]


@pytest.mark.slow
def test_the_ratio_follows_from_single_instances(touchy: Plan) -> None:
    (single,) = touchy.singles
    best = next(each for each in touchy.found if each.layout.system is System.SPLIT)

    # Prompts take 0.17 s, a batch of answers much less: two of three compute prompts.
    assert single.prefill.rate < single.decode.rate
    assert best.layout.name == "split 2P+1D"
    assert best.rate <= 1.2 * min(2 * single.prefill.rate, single.decode.rate)


@pytest.mark.slow
def test_every_layout_uses_what_there_is(touchy: Plan) -> None:
    assert {each.layout.num_devices for each in touchy.found} == {3}
    assert {each.layout.system for each in touchy.found} == set(System)
    rates = [each.per_device for each in touchy.found]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.slow
def test_roles_that_hardly_win_are_not_recommended(touchy: Plan) -> None:
    assert touchy.rival is not None
    hardly = replace(touchy.best, rate=touchy.rival.rate * 1.03)
    close = replace(touchy, found=(hardly, touchy.rival))

    assert close.best is hardly
    assert close.recommended is touchy.rival
    assert any("too little for the effort" in line for line in recommendation(close))


@pytest.mark.slow
def test_for_a_rate_as_few_as_serve_it() -> None:
    found = plan(question(CALM, LOOSE, devices=None, rate=12.0))

    single = max(each.whole_rate for each in found.singles)
    assert found.best.rate >= 12 * 0.97
    assert 12 / single * 0.9 <= found.best.devices <= 12 / single * 1.2 + 1
    assert found.best.layout.system is not System.SPLIT
    assert all(each.devices >= found.best.devices for each in found.found)


@pytest.mark.slow
def test_what_cannot_serve_is_an_error_that_says_why() -> None:
    slow = made(replace(TOUCHY, base_s=0.5), name="slow")
    small = made(TOUCHY, name="small", kv_tokens=64)
    wide = made(TOUCHY, name="wide", num_devices=8)

    with pytest.raises(ConfigError) as error:
        plan(question(TOUCHY, TIGHT, profiles=(slow, small, wide)))

    assert str(error.value).split("; ") == [
        "slow: a request alone takes 500 ms per token",
        "small: its KV pool holds 64 tokens, a request may have 120",
        "wide: an instance takes 8 GPUs",
    ]
    with pytest.raises(ConfigError, match=r"100% miss 0\.1 s to the first token"):
        plan(question(TOUCHY, Objective(0.1, 1.0)))


@pytest.mark.slow
def test_a_price_is_per_gpu_and_token(touchy: Plan) -> None:
    row = plain(touchy)["recommended"]

    assert row["price_per_hour"] == 6.0
    tokens_an_hour = touchy.recommended.rate * 20 * 3600
    assert row["price_per_million_output_tokens"] == pytest.approx(6e6 / tokens_an_hour)
    layout = replace(touchy.recommended.layout, profile=made(TOUCHY, price=None))
    free = replace(touchy, found=(replace(touchy.recommended, layout=layout),))
    assert "price_per_hour" not in plain(free)["recommended"]


def test_links_count_where_kv_bytes_are_known() -> None:
    linked = question(CALM, LOOSE, link=1e9)
    layout = Layout(System.SPLIT, made(CALM, kv_token_bytes=1000), 1, 1, 0, 512)

    assert config_of(linked, layout).link == 1e9
    unknown = replace(layout, profile=made(CALM))
    assert config_of(linked, unknown).link is None


# -- other profiles by role, and nodes -----------------------------------------------------------

# As TOUCHY, but with dearer decodes: a step of seven takes as long as the SLO.
BUSY = replace(TOUCHY, request_s=2e-3)
# The first computes prompts fast, the second one decodes as well and costs a fifth.
QUICK = made(BUSY, name="quick", gpu=gpu("h100"), price=5.0, kv_token_bytes=1000)
CHEAP = made(
    replace(BUSY, prompt_s=0.0055), name="cheap", gpu=gpu("a100"), price=1.0, kv_token_bytes=1000
)  # fmt: skip
MIXED = Layout(System.SPLIT, QUICK, 2, 3, 0, 512, CHEAP, nodes=2)


def test_what_a_layout_takes_is_the_sum_over_its_instances() -> None:
    assert MIXED.name == "2 x split 2P+3D"
    assert dict(MIXED.profiles) == {QUICK: 4, CHEAP: 6}
    # TDP: 4 of 700 W, 6 of 400 W. Servers of 8 and 6 units hold eight.
    totals = {Least.GPUS: 10, Least.PRICE: 26.0, Least.POWER: 5200, Least.SPACE: 4 + 4.5}
    assert {each: MIXED.total(each) for each in Least} == totals

    wide = replace(MIXED, profile=replace(QUICK, num_devices=2))
    assert wide.num_devices == 14
    assert wide.total(Least.PRICE) == 46.0
    assert replace(MIXED, profile=made(TOUCHY, price=None)).total(Least.POWER) == 6 * 400


def test_idle_gpus_count_as_those_in_use() -> None:
    found = Found(MIXED, 30.0, Score(1.0, 0.0, 0.0), devices=15)

    assert found.total(Least.GPUS) == 15
    assert found.total(Least.PRICE) == pytest.approx(26.0 * 15 / 10)
    assert found.per_device == 2.0


def test_a_role_has_the_steps_and_memory_of_its_profile() -> None:
    wide = replace(CHEAP, kv_tokens=3200)

    config = config_of(question(TOUCHY, TIGHT), replace(MIXED, decode_profile=wide))

    engines = {str(each.id): each.engine for each in config.instances}
    assert len(engines) == 5  # of one node
    assert engines["prefill-1"].cost == QUICK.cost
    assert engines["decode-2"].cost == wide.cost
    assert engines["decode-2"].pool_tokens == 3200
    assert engines["prefill-0"].pool_tokens != 3200


@pytest.mark.slow
def test_each_role_gets_the_profile_that_suits_it_for_the_least_price() -> None:
    slo = Objective(0.35, TIGHT.tpot_s)
    asked = question(BUSY, slo, profiles=(QUICK, CHEAP), devices=None, rate=6.0)

    found = plan(replace(asked, least=Least.PRICE))

    # Prompts take 0.17 and 0.56 s, decodes as long on both.
    best = found.best.layout
    assert (best.profile, best.decode_profile) == (QUICK, CHEAP)
    assert not best.is_aggregated
    totals = [each.total(Least.PRICE) for each in found.found]
    assert totals == sorted(totals)
    assert all(each.rate >= 6 * 0.97 for each in found.found)
    alike = [each for each in found.found if each.layout.profiles.keys() == {QUICK}]
    assert all(each.total(Least.PRICE) > totals[0] for each in alike)


def test_nodes_serve_as_many_times_what_one_serves() -> None:
    one = Found(replace(MIXED, nodes=1), 3.0, Score(0.5, 0.5, 0.0), devices=5)

    assert one.on_nodes(3, None) == replace(
        one, layout=replace(MIXED, nodes=3), rate=9.0, devices=15
    )
    assert one.on_nodes(3, 17).devices == 17
    assert one.on_nodes(1, None) == one


@pytest.mark.slow
def test_kv_stays_on_nodes_that_are_as_full_as_they_can_be() -> None:
    several = plan(question(BUSY, TIGHT, devices=7, node=3))

    (single,) = several.singles
    by_system = {each.layout.system: each for each in reversed(several.found)}
    split = by_system[System.SPLIT]
    assert split.layout.name == "2 x split 2P+1D"
    assert split.rate <= 2 * 1.2 * min(2 * single.prefill.rate, single.decode.rate)
    assert split.devices == 7  # one of them idle
    assert by_system[System.ADAPTIVE].layout.nodes == 2
    assert by_system[System.STOCK].layout.nodes == 1
    assert by_system[System.STOCK].layout.both == 7


@pytest.mark.slow
def test_for_a_rate_as_many_nodes_as_serve_it() -> None:
    several = plan(question(BUSY, TIGHT, devices=None, rate=20.0, node=3))

    best = next(each for each in several.found if not each.layout.is_aggregated)
    assert best.layout.nodes > 1
    assert best.rate >= 20 * 0.97
    assert best.layout.num_devices <= 3 * best.layout.nodes
    assert (best.layout.nodes - 1) * best.rate / best.layout.nodes < 20


# -- the command -----------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path) -> list[str]:
    profile = tmp_path / "mine.json"
    values = dict.fromkeys(("token_s", "context_s"), 0.0)
    values |= {"base_s": 0.05, "request_s": 2e-3, "prompt_s": 1e-4, "version": 1}
    profile.write_text(json.dumps(values))
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("ContextTokens,GeneratedTokens\n50,5\n60,6\n")
    return ["sim", "plan", "--profile", str(profile), "--trace", str(lengths), "--requests", "40"]


SLOS = ["--ttft-slo", "0.3", "--tpot-slo", "0.1"]


@pytest.mark.slow
def test_the_command_prints_a_table_and_advice(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*measured, *SLOS, "--gpus", "2", "--price", "3"]) == 0

    out = capsys.readouterr().out
    assert "split 1P+1D" in out
    assert "stock vLLM 2B" in out
    assert "6.00" in out
    assert re.search(r"^(Take|Do not separate) ", out, re.MULTILINE)
    assert "All of this is simulated" in out
    assert "estimate" not in out


@pytest.mark.slow
def test_the_command_speaks_json_and_names_estimates(
    touchy: Plan,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    layout = touchy.best.layout
    guessed = replace(layout, profile=replace(layout.profile, is_estimate=True))
    best = replace(touchy.best, layout=guessed)
    singles = tuple(replace(each, profile=guessed.profile) for each in touchy.singles)
    answer = replace(touchy, singles=singles, found=(best, *touchy.found[1:]))
    monkeypatch.setattr("vllm_tetri.sim.plan.command.plan", lambda *_: answer)

    assert cli.main([*measured, *SLOS, "--json", "-"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert told["simulated"]
    assert told["estimate"]
    assert told["recommended"]["devices"] == 3
    assert told["recommended"]["goodput"] == best.rate
    assert "measured nowhere" in told["why"][-1]


@pytest.mark.parametrize(
    "words",
    [
        [*SLOS],
        [*SLOS, "--model", "llama-3-8b"],
        [*SLOS, "--model", "llama-3-8b", "--gpu", "h100", "--profile", "smollm2-1core"],
        [*SLOS, "--model", "llama-3-70b", "--gpu", "h100", "--gpus", "1"],
        [*SLOS, "--model", "llama-3-8b", "--gpu", "h100", "--parallel", "3"],
        [*SLOS, "--profile", "smollm2-1core", "--gpus", "0"],
        [*SLOS, "--profile", "smollm2-1core", "--gpus", "2", "--rate", "1"],
        [*SLOS, "--profile", "smollm2-1core", "--rate", "0"],
        [*SLOS, "--profile", "smollm2-1core", "--trace", "none.csv"],
        [*SLOS, "--profile", "smollm2-1core", "--link", "wet string"],
        [*SLOS, "--profile", "smollm2-1core", "--price", "0"],
        [*SLOS, "--profile", "smollm2-1core", "--requests", "0"],
        [*SLOS, "--profile", "smollm2-1core", "--node", "0"],
        [*SLOS, "--profile", "smollm2-1core", "--least", "power"],
        [*SLOS, "--model", "llama-3-8b", "--gpu", "h100", "--price", "2", "1"],
        [*SLOS, "--profile", "smollm2-1core", "--attainment", "2"],
        ["--ttft-slo", "0", "--tpot-slo", "1", "--profile", "smollm2-1core"],
        ["--ttft-slo", "1", "--tpot-slo", "0.001", "--profile", "smollm2-1core"],
    ],
)
def test_bad_input_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sim", "plan", *words]) == 2

    assert capsys.readouterr().err.count("\n") == 1
