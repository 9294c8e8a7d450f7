"""Systems of several instances, by name, and the command that compares them."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from tests.sim.builders import SHAPE, ask, shape
from vllm_tetri import cli
from vllm_tetri.errors import ConfigError
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.policy.admission import DecodePolicy
from vllm_tetri.policy.order import PrefillPolicy
from vllm_tetri.policy.promise import Late
from vllm_tetri.sim.cluster import run, simulate
from vllm_tetri.sim.engine.kinds import Unchunked
from vllm_tetri.sim.figures import Slo, figures
from vllm_tetri.sim.mode.modes import RoundRobin
from vllm_tetri.sim.mode.splitwise import SplitwiseMode
from vllm_tetri.sim.setting import Place, Setting, Shape, places
from vllm_tetri.sim.systems import APART, SYSTEMS, Parts, system_of
from vllm_tetri.sim.views import Picture
from vllm_tetri.sim.workload import Ask, draw
from vllm_tetri.types import InstanceId, Role

SMALL = Shape(kv_blocks=260, arena_tokens=6000)
SLO = Slo(1.0, 0.1)
MACHINE = shape(
    engine=Unchunked(),
    order=PrefillPolicy.FCFS,
    admission=DecodePolicy.GREEDY,
    chunk_tokens=50,
)


def parts(instances: int = 4, **changes: object) -> Parts:
    return Parts(instances, SMALL, objective=Objective(1.0, 0.1), **changes)  # type: ignore[arg-type]


# -- all of them ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("kind", ["mixed", "hphd"])
def test_every_request_is_served_token_by_token_or_refused(name: str, kind: str) -> None:
    asks = draw(kind, 100, 3.0, seed=2, accuracy=0.8)

    outcome = run(system_of(name, parts()), asks)

    done = [each.ask for each in outcome.served] + [each.ask for each in outcome.refused]
    assert sorted(each.id for each in done) == [each.id for each in asks]
    for each in outcome.served:
        gaps = np.concatenate(each.gap_parts)
        assert len(gaps) == each.ask.output_tokens - 1
        assert gaps.min() > 0
        assert each.ttft_s + gaps.sum() == pytest.approx(each.jct_s)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_same_seed_gives_the_same_to_the_bit(name: str) -> None:
    asks = draw("mixed", 60, 3.0, seed=1)

    first, second = (run(system_of(name, parts()), asks) for _ in range(2))

    assert first == second


@pytest.mark.parametrize("name", SYSTEMS)
def test_all_are_made_of_as_many_equal_instances(name: str) -> None:
    found = system_of(name, parts(5, prefill=2)).instances

    assert len(found) == 5
    assert {each.shape.cost for each in found} == {SMALL.cost}
    assert {each.shape.kv_blocks for each in found} == {SMALL.kv_blocks}
    prompts = sum(each.role is Role.PREFILL for each in found)
    assert prompts == (2 if name in APART else 0)


@pytest.mark.parametrize(("instances", "division"), [(2, (1, 1)), (3, (1, 2)), (8, (4, 4))])
def test_half_of_the_instances_are_for_prompts(instances: int, division: tuple[int, int]) -> None:
    assert Parts(instances).divided() == division


def test_systems_that_cannot_be_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"no system 'vllm2'; there are static, orca"):
        system_of("vllm2", parts())
    with pytest.raises(ConfigError, match="at least 2"):
        system_of("tetri", Parts(1))
    with pytest.raises(ConfigError, match="0 instances"):
        Parts(0)
    for prefill in (0, 4):
        with pytest.raises(ConfigError, match=f"{prefill} of 4 instances for prompts"):
            Parts(4, prefill=prefill)


def test_distserve_decodes_where_fewest_are() -> None:
    asks = [ask(number, 10, 100, 4.0 * number) for number in range(12)]
    setting = system_of("distserve", Parts(3, SHAPE))

    served = simulate(setting, asks)

    at = [each.decode for each in served]
    assert at.count(InstanceId("decode-0")) == at.count(InstanceId("decode-1")) == 6


# -- Splitwise -------------------------------------------------------------------------------


class _Watched(SplitwiseMode):
    """Keeps itself, to be looked at."""

    last: _Watched

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        type(self).last = self
        self.most = 0

    def route(self, picture: Picture, ask: Ask, now: float):  # type: ignore[no-untyped-def]
        route = super().route(picture, ask, now)
        self.most = max(self.most, len(self.mixed))
        return route


def test_below_the_threshold_everybody_stays_in_its_pool() -> None:
    asks = [ask(number, 40, 10, 2.0 * number) for number in range(20)]

    served = simulate(Setting(places(2, 2, shape=MACHINE), _Watched), asks)

    assert _Watched.last.most == 0
    assert {each.prefill for each in served} <= {"prefill-0", "prefill-1"}
    assert {each.decode for each in served} <= {"decode-0", "decode-1"}


def test_a_long_queue_moves_a_machine_into_the_mixed_pool_and_back() -> None:
    burst = [ask(number, 45, 10, 0.01 * number) for number in range(20)]
    calm = [ask(number, 40, 10, 100 + 4.0 * number) for number in range(20, 30)]

    served = simulate(Setting(places(2, 2, shape=MACHINE), _Watched), [*burst, *calm])

    assert {str(each.prefill) for each in served[:20]} > {"prefill-0", "prefill-1"}
    assert {each.prefill for each in served[20:]} <= {"prefill-0", "prefill-1"}
    assert {each.decode for each in served[20:]} == {"decode-0", "decode-1"}
    assert _Watched.last.most >= 1
    assert _Watched.last.mixed == {}


def test_a_prompt_machine_writes_answers_for_which_there_is_no_memory_elsewhere() -> None:
    small = shape(
        engine=Unchunked(), admission=DecodePolicy.GREEDY, order=PrefillPolicy.FCFS, kv_blocks=8
    )
    cluster = tuple(
        Place(each.id, each.role, small) if each.role is Role.DECODE else each
        for each in places(2, 1, shape=MACHINE)
    )
    asks = [ask(number, 30, 60, 1.0 * number) for number in range(8)]

    served = simulate(Setting(cluster, _Watched), asks)

    assert served[0].decode == "decode-0"
    assert {each.prefill for each in served if each.decode != "decode-0"} <= {
        each.decode for each in served
    }
    assert any(each.decode != "decode-0" for each in served)
    assert _Watched.last.mixed == {}


# -- Mooncake ---------------------------------------------------------------------------------


def test_what_would_be_late_is_refused_and_counted() -> None:
    burst = [ask(number, 500, 5, 0.05 * number) for number in range(40)]
    setting = Setting(places(1, 1), "mooncake", objective=Objective(2.0, 0.1))

    outcome = run(setting, burst)

    assert len(outcome.refused) > 20
    assert {each.ask.id for each in outcome.served} >= {0, 1, 2, 3}
    assert all("first token expected in" in each.reason for each in outcome.refused)
    patient = simulate(Setting(places(1, 1), "mooncake"), burst)
    late, latest = (max(each.ttft_s for each in some) for some in (outcome.served, patient))
    assert 2.5 * late < latest
    found = figures(outcome.served, Slo(2.0, 0.1), outcome.refused)
    kept = sum(each.ttft_s <= 2.0 and each.tpot_s <= 0.1 for each in outcome.served)
    assert (found.refused, found.requests) == (len(outcome.refused), 40)
    assert found.good == pytest.approx(kept / 40)


def test_nothing_is_refused_where_nothing_was_promised() -> None:
    burst = [ask(number, 60, 5, 0.2 * number) for number in range(30)]

    roomy = places(1, 1, shape=shape(kv_blocks=2000))

    assert not run(Setting(roomy, "mooncake"), burst).refused


def test_what_has_no_room_to_be_decoded_is_refused() -> None:
    cluster = (
        Place(InstanceId("p"), Role.PREFILL, SHAPE),
        Place(InstanceId("d"), Role.DECODE, shape(kv_blocks=10, chunk_tokens=8)),
    )
    asks = [ask(number, 60, 80, 2.5 * number) for number in range(6)]

    outcome = run(Setting(cluster, "mooncake"), asks)

    assert {each.reason for each in outcome.refused} == {"no decode instance has room for its KV"}


def test_short_prompts_are_computed_where_they_are_decoded() -> None:
    cluster = (
        Place(InstanceId("p"), Role.PREFILL, SHAPE),
        Place(InstanceId("d"), Role.DECODE, shape(chunk_tokens=30)),
    )
    asks = [ask(0, 25, 5), ask(1, 40, 5, 20.0), ask(2, 20, 5, 40.0), ask(3, 5, 5, 60.0)]

    free = simulate(Setting(cluster, "mooncake"), asks)
    strict = simulate(Setting(cluster, "mooncake", objective=Objective(9.0, 1.21)), asks)

    assert [each.prefill for each in free] == ["d", "p", "d", "d"]
    assert [each.prefill for each in strict] == ["p", "p", "d", "d"]  # 1.25, 1.4, 1.2, 1.05 s


class _RefusesAll(RoundRobin):
    def route(self, picture: Picture, ask: Ask, now: float):  # type: ignore[no-untyped-def]
        return Late("no", 1)


def test_a_mode_may_refuse_everything() -> None:
    outcome = run(Setting(places(both=1, shape=SHAPE), _RefusesAll), [ask(0, 9, 9), ask(1, 9, 9)])

    found = figures(outcome.served, SLO, outcome.refused)
    assert (found.good, found.goodput, found.refused, found.requests) == (0.0, 0.0, 2, 2)
    assert math.isnan(found.ttft_mean_s)
    assert outcome.busy == {"both-0": 0.0}


# -- the command ------------------------------------------------------------------------------


def test_named_systems_are_rows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--system", "static", "mooncake", "--instances", "3", "--prefill-instances", "2"]

    assert cli.main(["sim", *words, "--requests", "40", "--rate", "30"]) == 0

    lines = capsys.readouterr().out.splitlines()
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines if re.match(r"\s*(sta|moo)", line)]
    assert [row[0] for row in rows] == ["static 3", "mooncake 2P+1D"]
    assert int(rows[0][10]) == 0
    assert 0 < int(rows[1][10]) < 40


def test_all_names_every_system_beside_modes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sim", "--system", "all", "--mode", "round-robin", "--requests", "10"]) == 0

    out = capsys.readouterr().out
    assert all(re.search(rf"^\s*{name} (2|1P\+1D) ", out, re.MULTILINE) for name in SYSTEMS)
    assert "round-robin 1P+1D" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--system", "orka"], "no system 'orka'; there are static, orca, vllm-2023"),
        (["--system", "tetri", "--instances", "1"], "--system tetri: .* at least 2"),
        (["--system", "tetri", "--prefill-instances", "2"], "2 of 2 instances"),
        (["--system", "vllm", "--instances", "0"], "0 instances"),
        (["--system", "orca", "--window", "0"], "window tokens: 0"),
        (["--system", "orca", "--window", "500"], "longer than the window of both-0: 500"),
        (["--system", "static", "--kv-blocks", "10"], "does not fit into a KV pool"),
    ],
)
def test_wrong_systems_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sim", *words, "--requests", "20"]) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
