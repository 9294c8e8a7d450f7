"""Requests that are placed by what they would cost, and modes that change."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.fakes import (
    FREE,
    Cluster,
    FakeInstance,
    Watching,
    begin,
    cluster,
    eventually,
    full,
    held_back,
    let_go,
    metric,
    refused,
    until_reported,
)
from vllm_tetri import cli
from vllm_tetri.handover import PrefillParams
from vllm_tetri.policy.adaptive import Objective
from vllm_tetri.router import command, placement
from vllm_tetri.types import InstanceLoad, Mode, Role, StepCoefficients

LONG = [1] * 4000
BUSY = replace(FREE, light=40, remaining_tokens=40 * 100, context_tokens=40 * 300)
OVERLOADED = replace(FREE, queued_prefill_tokens=200_000)
NEARLY_OVERLOADED = replace(FREE, queued_prefill_tokens=100_000)


def pair(prefill: InstanceLoad = FREE, decode: InstanceLoad = FREE) -> tuple[FakeInstance, ...]:
    p = FakeInstance("p", Role.PREFILL, decode="d")
    d = FakeInstance("d", Role.DECODE, decode="d")
    p.load, d.load = prefill, decode
    return p, d


async def where(made: Cluster, **body: Any) -> tuple[str, str]:
    """Return the instances that computed the prompt and wrote the output."""
    status, answer, headers = await made.ask(**body)
    assert status == 200, answer
    return headers["x-tetri-prefill"], headers["x-tetri-decode"]


# -- every mode -----------------------------------------------------------------------


async def test_split_mode_shares_a_request_even_if_that_only_costs() -> None:
    async with cluster(*pair()) as made:
        await until_reported(made)
        assert await where(made) == ("p", "d")
        assert made["p"].leg() == PrefillParams(made["p"].leg().transfer, made["p"].leg().request)


async def test_whole_mode_never_shares_and_uses_every_role() -> None:
    async with cluster(*pair(decode=BUSY), mode=Mode.WHOLE) as made:
        await until_reported(made)
        assert await where(made, prompt=LONG) == ("p", "p")
        made["p"].load, made["d"].load = OVERLOADED, FREE
        await until_reported(made)
        assert await where(made, prompt=LONG) == ("d", "d")
        assert "kv_transfer_params" not in made["d"].calls[-1][1]


async def test_adaptive_mode_serves_whole_or_split_as_it_is_cheaper() -> None:
    async with cluster(*pair(), mode=Mode.ADAPTIVE) as made:
        await until_reported(made)
        assert await where(made, prompt=LONG) == ("d", "d")
        made["d"].load = BUSY
        await until_reported(made)
        assert await where(made, prompt=LONG) == ("p", "d")
        leg = made["p"].leg()
        assert isinstance(leg, PrefillParams)
        assert leg.anywhere
        made["p"].load = OVERLOADED
        await until_reported(made)
        assert await where(made, prompt=LONG) == ("d", "d")


async def test_alike_instances_spare_some_of_outputs_where_that_is_worth_it(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    many = [FakeInstance(name, Role.BOTH, decode="d") for name in "abcd"]
    for each in many:
        each.load = replace(
            FREE, light=30, remaining_tokens=6_000, context_tokens=9_000, usual_tokens=400,
            handover_s=0.004, cost=StepCoefficients(0.006, 2e-5, 4e-8, 5e-5, 1e-9, confidence=1.0),
        )  # fmt: skip
    async with cluster(*many, mode=Mode.ADAPTIVE) as made:
        await until_reported(made)

        async def spared() -> list[str]:
            await where(made)
            return (await made.get("/tetri/v1/instances"))["spared"]

        caplog.set_level("INFO", placement.__name__)
        deadline = time.monotonic() + 10
        while not (found := await spared()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert await made.command("status") == 0
        words = f"compute prompts only, at the present load: {', '.join(found)}"
        assert words in capsys.readouterr().out
        assert any(f"at the present load: {', '.join(found)}" in each for each in caplog.messages)
        for name in found:  # outputs there have ended, and no other came
            made[name].load = replace(made[name].load, light=0, remaining_tokens=0)
        await until_reported(made)
        prefill, decode = await where(made, prompt=LONG)
        assert (prefill in found, decode) == (True, "d")
        _, _, headers = await made.ask(prompt=LONG, best_of=2)  # cannot be split
        assert headers["x-tetri-decode"] not in found
        await made.order("mode", {"mode": "whole"})
        assert await spared() == []


async def test_a_prompt_on_a_decode_instance_may_be_answered_there_by_hand_over() -> None:
    """Direction is per request: the first chunk is done, and the choice made again."""
    async with cluster(*pair(decode=BUSY), mode=Mode.ADAPTIVE) as made:
        made["p"].decode = "p"
        await until_reported(made)
        assert await where(made, prompt=LONG) == ("p", "p")
        assert len(made["p"].calls) == 2


async def test_what_cannot_be_split_is_served_whole_in_every_mode() -> None:
    async with cluster(*pair(decode=BUSY)) as made:
        for mode in Mode:
            await made.order("mode", {"mode": mode})
            await until_reported(made)
            prefill, decode = await where(made, prompt=LONG, best_of=2)
            assert prefill == decode


async def test_answers_of_known_length_are_priced_by_it() -> None:
    steady = replace(FREE, queued_prefill_tokens=2500)
    async with cluster(*pair(steady, BUSY), mode=Mode.WHOLE) as made:
        await until_reported(made)
        assert await where(made, max_tokens=1) == ("d", "d")
        made.scheduler.set_mode(Mode.WHOLE)  # forgets nothing, looks again
        assert await where(made, max_tokens=4000, ignore_eos=True) == ("p", "p")
        huge = 10**400  # no float is as large
        assert await where(made, max_tokens=huge, ignore_eos=True) == ("p", "p")


async def test_requests_in_a_burst_spread_before_any_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = [FakeInstance(name, Role.BOTH) for name in "abcd"]
    for each in many:
        each.load = FREE
    held_back(*many)
    async with cluster(*many, mode=Mode.ADAPTIVE) as made:
        await until_reported(made)
        now = time.monotonic()  # for placements, however long the burst takes
        monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=lambda: now))
        tasks = await begin(made, 8)
        assert [len(each.calls) for each in many] == [2, 2, 2, 2]
        let_go(*many)
        assert [status for status, *_ in await asyncio.gather(*tasks)] == [200] * 8


async def test_a_body_without_a_prompt_is_an_instance_s_to_complain_about() -> None:
    async with cluster(*pair(decode=BUSY)) as made:
        for mode in (Mode.WHOLE, Mode.ADAPTIVE):
            made.scheduler.set_mode(mode)
            async with made.client.post(f"{made.url}/v1/completions", json={}) as response:
                assert response.status == 200
                assert (await response.json())["kind"] == "whole"


# -- failures and room ----------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.ADAPTIVE, Mode.WHOLE])
async def test_an_instance_that_fails_leads_to_another_one(mode: Mode) -> None:
    async with cluster(*pair(), mode=mode) as made:
        await until_reported(made)
        first, _ = await where(made)
        other = "p" if first == "d" else "d"
        await made[first].stop_http()
        assert await where(made) == (other, other)


@pytest.mark.parametrize("mode", [Mode.ADAPTIVE, Mode.WHOLE])
async def test_overloaded_instances_lead_to_another_one_and_then_to_503(mode: Mode) -> None:
    both = held_back(*(FakeInstance(name, Role.BOTH) for name in "ab"))
    async with cluster(*both, mode=mode, max_in_flight_each=1) as made:
        tasks = await begin(made, 1)
        tasks += await begin(made, 1)
        assert [len(each.calls) for each in both] == [1, 1]
        await refused(made, "instances (2)")
        let_go(*both)
        assert [status for status, *_ in await asyncio.gather(*tasks)] == [200, 200]
        assert (await made.ask())[0] == 200


@pytest.mark.parametrize("mode", [Mode.ADAPTIVE, Mode.WHOLE])
async def test_instances_that_say_they_are_full_lead_on_and_then_to_503(mode: Mode) -> None:
    async with cluster(*pair(decode=BUSY), mode=mode) as made:
        await until_reported(made)
        busy = {"p"}

        async def serve(fake: FakeInstance, request: Any, body: Any) -> Any:
            return await (full() if fake.id in busy else fake.answer(request, body))

        for each in made.instances.values():
            each.handler = serve
        assert await where(made, prompt=LONG) == ("d", "d")
        assert len(made["p"].calls) == 1
        busy.add("d")
        await refused(made, "instances (2)", prompt=LONG)


# -- another mode at run time ---------------------------------------------------------


async def test_the_mode_is_shown_and_changed() -> None:
    async with cluster(*pair(decode=BUSY)) as made:
        assert await made.get("/tetri/v1/mode") == {"mode": "split"}
        for mode in ("adaptive", "whole", "split"):
            assert await made.order("mode", {"mode": mode}) == (200, {"mode": mode})
            assert await made.get("/tetri/v1/mode") == {"mode": mode}
            assert (await made.get("/tetri/v1/instances"))["mode"] == mode


async def test_a_request_under_way_goes_on_as_it_began() -> None:
    async with cluster(*pair()) as made:
        held_back(made["p"])
        (asking,) = await begin(made, 1)
        await made.order("mode", {"mode": "whole"})
        let_go(made["p"])
        status, _, headers = await asking
        assert status == 200
        assert (headers["x-tetri-prefill"], headers["x-tetri-decode"]) == ("p", "d")


async def test_instances_see_all_others_in_adaptive_mode_only() -> None:
    async with cluster(*pair()) as made:

        def seen() -> dict[str, set[str]]:
            return {
                name: {each.info.id for each in fake.agent.snapshot().view.instances}
                for name, fake in made.instances.items()
                if fake.agent is not None
            }

        await eventually(lambda: seen() == {"p": {"d"}, "d": set()})
        await made.order("mode", {"mode": "adaptive"})
        await eventually(lambda: seen() == {"p": {"p", "d"}, "d": {"p", "d"}})
        await made.order("mode", {"mode": "whole"})
        await eventually(lambda: seen()["p"] == {"d"})


async def test_roles_are_not_watched_outside_split_mode() -> None:
    watcher = Watching()
    async with cluster(*pair(), watcher=watcher) as made:
        await eventually(lambda: watcher.looks)
        for mode in ("adaptive", "whole"):
            await made.order("mode", {"mode": mode})
            looks = watcher.looks
            await eventually(lambda: "inactive" in made.scheduler.flips.explanation)
            answer = await made.get("/tetri/v1/instances")
            assert "not split by role" in answer["watcher"]
            assert watcher.looks == looks
            await made.order("mode", {"mode": "split"})
            await eventually(lambda looks=looks: watcher.looks > looks)


async def test_the_command_shows_and_changes_the_mode(capsys: pytest.CaptureFixture[str]) -> None:
    async def run(*words: str) -> tuple[int, str]:
        status = await made.command("mode", *words)
        return status, capsys.readouterr().out.strip()

    async with cluster() as made:
        assert await run() == (0, "split")
        assert await run("adaptive") == (0, "adaptive")
        assert made.scheduler.placer.mode is Mode.ADAPTIVE
        assert await run() == (0, "adaptive")


# -- what clients were promised -------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
async def test_what_would_come_late_is_refused_at_once(mode: Mode) -> None:
    promised = {"objective": Objective(ttft_s=1.0), "refuses_late": True, "mode": mode}
    async with cluster(*pair(OVERLOADED, OVERLOADED), **promised) as made:
        await until_reported(made)
        status, answer, headers = await made.ask()
        assert (status, headers["x-tetri-error"]) == (429, "expected_late")
        assert "first token expected in" in answer["error"]["message"]
        assert headers["Retry-After"] == "60"
        assert not made["p"].calls
        assert not made["d"].calls
        assert await made.table() == []
        assert await metric(made, 'tetri_requests_total{outcome="late",route="none"}') == 1
        made["p"].load = made["d"].load = FREE
        await until_reported(made)
        assert (await made.ask())[0] == 200


async def test_a_pace_that_would_not_be_kept_is_refused_too() -> None:
    promised = {"objective": Objective(tpot_s=0.02), "refuses_late": True}
    both = FakeInstance("b", Role.BOTH)
    both.load = BUSY
    async with cluster(both, mode=Mode.ADAPTIVE, **promised) as made:
        await until_reported(made)
        status, answer, headers = await made.ask(max_tokens=100)
        assert (status, headers["x-tetri-error"]) == (429, "expected_late")
        assert "ms a token expected" in answer["error"]["message"]
        assert 1 <= int(headers["Retry-After"]) <= 60


async def test_late_requests_are_served_late_unless_told_otherwise() -> None:
    promised = {"objective": Objective(ttft_s=1.0), "mode": Mode.ADAPTIVE}
    async with cluster(*pair(NEARLY_OVERLOADED, NEARLY_OVERLOADED), **promised) as made:
        await until_reported(made)
        assert (await made.ask())[0] == 200


async def test_a_place_that_keeps_the_promise_is_chosen() -> None:
    cheap, quick = FakeInstance("cheap", Role.BOTH), FakeInstance("quick", Role.BOTH)
    cheap.load = replace(FREE, queued_prefill_tokens=400)
    quick.load = replace(BUSY, light=30, remaining_tokens=3000, context_tokens=9000)
    body: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    for objective, chosen in ((Objective(), "cheap"), (Objective(ttft_s=0.17), "quick")):
        made_of = {"objective": objective, "mode": Mode.WHOLE}
        async with cluster(cheap, quick, **made_of) as made:
            await until_reported(made)
            assert await where(made, **body) == (chosen, chosen)


@pytest.mark.parametrize("words", [[], ["--ttft-slo", "inf"]])
def test_without_a_promise_nothing_can_be_refused_as_late(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--port", "0", "--control", "tcp://127.0.0.1:0", "--refuse-late"]
    assert cli.main(["router", *options, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "vllm-tetri: --refuse-late needs a target: give --ttft-slo or --tpot-slo"


@pytest.mark.parametrize("option", ["--ttft-slo", "--tpot-slo"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
def test_promises_are_positive_seconds(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args([option, value])
    assert caught.value.code == 2
    assert option in capsys.readouterr().err


async def test_the_regret_that_is_told_is_a_metric() -> None:
    async with cluster(*pair()) as made:
        assert await metric(made, "tetri_regret_ratio") == 0
        told = {"regret": 0.25, "error": 0.125}
        assert await made.order("regret", told) == (200, {"regret": 0.25})
        assert await metric(made, "tetri_regret_ratio") == 0.25
        assert await metric(made, "tetri_regret_error_ratio") == 0.125
        assert (await made.order("regret", {"regret": "much"}))[0] == 400
