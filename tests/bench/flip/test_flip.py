"""`vllm-tetri bench flip`: its load, what it makes of a run, and one real run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from vllm_tetri import cli
from vllm_tetri.bench import arrivals
from vllm_tetri.bench.arrivals import Answered, Arrival, Kind, Length, Slo, Source, figures
from vllm_tetri.bench.fleet import Member
from vllm_tetri.bench.flip import command as flip
from vllm_tetri.bench.flip import report as flip_report
from vllm_tetri.bench.flip import times as flip_times
from vllm_tetri.bench.flip.command import Load, kinds_of, moves, systems
from vllm_tetri.bench.flip.run import Look, Run, Watch, flipped, run_of
from vllm_tetri.bench.pace import Counts, Pace
from vllm_tetri.errors import ConfigError, UnsupportedError
from vllm_tetri.types import Role

CUT = Length(3500, 512)
PROMPTS = {Kind.CODE: 1670, Kind.CONVERSATION: 1100}  # mean tokens after the cut
RATES = {Kind.CODE: 1.3, Kind.CONVERSATION: 1.0}
SWING = [Kind.CODE, Kind.CONVERSATION] * 2
SLO = Slo(ttft_s=5.0, tpot_s=0.1)


def drawn(seed: int = 0, *, phase_s: float = 60.0, **rates: float) -> list[Arrival]:
    sources = {kind: Source(kind, [], CUT) for kind in Kind}
    return arrivals.draw(SWING, phase_s, {**RATES, **rates}, sources, Random(seed))


# -- arrivals ----------------------------------------------------------------------


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert drawn(1) == drawn(1) != drawn(2)


def test_arrivals_come_in_order_each_in_its_phase() -> None:
    found = drawn()
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    assert all(each.phase == int(each.at_s // 60) for each in found)


def test_each_kind_comes_at_its_rate() -> None:
    found = drawn(phase_s=5000.0)
    for phase, kind in enumerate(SWING):
        count = sum(each.phase == phase for each in found)
        assert count == pytest.approx(5000 * RATES[kind], rel=0.05)


def test_built_in_lengths_are_like_the_traces() -> None:
    for kind, prompt, prompts, answer, answers in (
        (Kind.CODE, 1470, 1670, 13, 27),
        (Kind.CONVERSATION, 1020, 1100, 129, 208),
    ):
        source, rng = Source(kind, [], CUT), Random(0)
        found = [source.draw(rng) for _ in range(10000)]
        prompt_tokens = sorted(each.prompt_tokens for each in found)
        output_tokens = sorted(each.output_tokens for each in found)
        assert prompt_tokens[5000] == pytest.approx(prompt, rel=0.05)
        assert sum(prompt_tokens) / 10000 == pytest.approx(prompts, rel=0.05)
        assert output_tokens[5000] == pytest.approx(answer, rel=0.1)
        assert sum(output_tokens) / 10000 == pytest.approx(answers, rel=0.05)
        assert prompt_tokens[-1] <= 3500
        assert 2 <= output_tokens[0] < output_tokens[-1] <= 512


def test_the_right_split_copes_and_the_wrong_one_does_not() -> None:
    pace, kv_tokens = Pace(""), 8192
    prompts_per_s = {kind: 256 / pace.step_s(256, 1000) / mean for kind, mean in PROMPTS.items()}
    batch = kv_tokens / 1300  # a prompt of 1,100 and what is written of long answers
    answers_per_s = batch / pace.step_s(round(batch), kv_tokens) / 208
    code, conversation = flip._RATES
    assert code < 0.8 * 2 * prompts_per_s[Kind.CODE]
    assert code > 1.4 * prompts_per_s[Kind.CODE]
    assert conversation < 0.8 * prompts_per_s[Kind.CONVERSATION]
    assert conversation < 0.8 * 2 * answers_per_s
    assert conversation > 1.3 * answers_per_s


def test_a_trace_gives_its_lengths_and_they_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n\n,20,900\n,7,1\n"
    )
    known = arrivals.read(path, "--code")
    assert known == [Length(4808, 10), Length(20, 900), Length(7, 1)]
    source, rng = Source(Kind.CODE, known, CUT), Random(0)
    assert {source.draw(rng) for _ in range(100)} == {
        Length(3500, 10),
        Length(20, 512),
        Length(7, 2),
    }


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no column ContextTokens"),
        (b"ContextTokens,Other\n1,2\n", "no column GeneratedTokens"),
        (b"ContextTokens,GeneratedTokens\n", "no requests"),
        (b"ContextTokens,GeneratedTokens\n1,2\n3,many\n", "line 3"),
        (b"ContextTokens,GeneratedTokens\n1\n", "line 2"),
        (b"ContextTokens,GeneratedTokens\n0,2\n", "at least 1"),
        (b"\xff", "--code"),
    ],
)
def test_a_wrong_trace_is_named(content: bytes, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as raised:
        arrivals.read(path, "--code")
    assert str(path) in str(raised.value)


def test_a_request_fixes_the_length_of_its_answer() -> None:
    (body,) = arrivals.bodies("model", [Arrival(0.0, 0, Length(5, 7))], Random(0))
    found = json.loads(body)
    assert len(found["prompt"]) == 5
    assert (found["max_tokens"], found["ignore_eos"]) == (7, True)


async def answered_by(tokens: int, asks: list[Arrival]) -> tuple[list[Answered], list[float]]:
    """What a server makes of it that writes so many tokens, and when it was asked."""
    asked = []

    async def complete(request: web.Request) -> web.StreamResponse:
        asked.append(time.monotonic() - started)
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})
        await answer.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        return answer

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        requests = arrivals.bodies("model", asks, Random(0))
        started = time.monotonic()
        send = arrivals.send
        found = await asyncio.to_thread(
            send, url, asks, requests, started=started, scale=0.5, limit_s=10
        )
    finally:
        await runner.cleanup()
    return found, asked


async def test_requests_are_sent_at_their_times() -> None:
    asks = [Arrival(at_s, 0, Length(3, 4)) for at_s in (0.0, 0.4, 0.2)]
    found, asked = await answered_by(4, asks)
    assert [each.arrival for each in found] == asks
    assert all(0 < each.first_s <= each.done_s for each in found)
    for at_s, due in zip(asked, (0.0, 0.1, 0.2), strict=True):
        assert at_s >= due


async def test_an_answer_of_another_length_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match="3 of 4 tokens"):
        await answered_by(3, [Arrival(0.0, 0, Length(3, 4))])


# -- systems -----------------------------------------------------------------------


def test_every_split_is_a_system_and_policies_start_from_the_most_even_one() -> None:
    found = systems(3)
    assert list(found) == ["1P2D", "2P1D", "idle", "threshold", "balance"]
    assert {each.name: (each.prefills, each.flip) for each in found.values()} == {
        "1P2D": (1, "off"),
        "2P1D": (2, "off"),
        **{name: (2, name) for name in flip.POLICIES},
    }
    assert systems(4)["balance"].prefills == 2


def test_a_swing_begins_with_the_other_kind_in_every_other_repeat() -> None:
    assert kinds_of(Load.SWING, 4, 0) == SWING
    assert kinds_of(Load.SWING, 3, 1) == [Kind.CONVERSATION, Kind.CODE, Kind.CONVERSATION]
    assert kinds_of(Load.CONVERSATION, 2, 1) == [Kind.CONVERSATION] * 2


@pytest.mark.parametrize(
    ("prefills", "expected"),
    [
        (0, [("a", Role.DECODE), ("b", Role.DECODE)]),
        (1, [("b", Role.DECODE)]),
        (2, []),
        (3, [("c", Role.PREFILL)]),
        (4, [("c", Role.PREFILL), ("d", Role.PREFILL)]),
    ],
)
def test_roles_are_set_by_the_fewest_flips(prefills: int, expected: list[Any]) -> None:
    roles = {"a": "prefill", "c": "decode", "b": "prefill", "d": "decode"}
    assert moves(roles, prefills) == expected


# -- runs --------------------------------------------------------------------------


def row(role: str, state: str = "ready", flips: int = 0, **of_flip: Any) -> dict[str, Any]:
    known = {"source": "decode", "target": "prefill", "commit_s": 0.0, "drain_s": 0.0}
    known |= {"reason": "wanted", "problem": "", "age_s": 0.0}
    return {"role": role, "state": state, "flips": flips, "flip": {**known, **of_flip} or None}


BEFORE = {
    "a": row("prefill", epoch=1, stage="done"),
    "b": {**row("decode"), "flip": None},
    "c": row("decode", epoch=4, stage="done", flips=2),
}
DRAINING = {**BEFORE, "c": row("decode", "flipping", 2, epoch=5, stage="draining", age_s=0.1)}
AFTER = {
    **BEFORE,
    "c": row("prefill", "ready", 3, epoch=5, stage="done", drain_s=3.0, commit_s=0.02, age_s=1),
}
LOOKS = [Look(0.0, BEFORE), Look(1.1, DRAINING), Look(4.5, AFTER)]
ANSWERED = [
    Answered(Arrival(1.0, 0, Length(100, 11)), first_s=1.0, done_s=2.0),
    Answered(Arrival(1.5, 0, Length(100, 11)), first_s=6.0, done_s=7.0),
    Answered(Arrival(61.0, 1, Length(100, 6)), first_s=3.0, done_s=4.0),
]


def made(answered: list[Answered] = ANSWERED) -> Run:
    return run_of(
        answered,
        SWING,
        SLO,
        looks=LOOKS,
        before=BEFORE,
        after=AFTER,
        busy_s=20.0,
        late_s=0.01,
        scale=0.5,
    )


def test_a_request_is_in_time_with_both_its_first_and_its_further_tokens() -> None:
    found = figures(ANSWERED, SLO)
    assert found.requests == 3
    assert found.ttft_s == pytest.approx(10 / 3)
    assert found.jct_s == pytest.approx(13 / 3)
    assert found.jct_p99_s == pytest.approx(6.94)
    assert found.tpot_s == pytest.approx(0.4 / 3)
    assert found.attained == pytest.approx(1 / 3)


def test_a_run_has_figures_of_its_phases_and_what_it_took() -> None:
    run = made()
    assert [phase and phase.requests for phase in run.phases] == [2, 1, None, None]
    assert (run.makespan_s, run.busy_s, run.late_s, run.flips) == (65.0, 40.0, 0.02, 1)


def test_flips_of_the_run_are_known_with_how_long_they_took() -> None:
    (found,) = made().flipped
    assert (found.instance, found.source, found.target) == ("c", "decode", "prefill")
    assert (found.stage, found.drain_s, found.commit_s) == ("done", 6.0, 0.02)
    assert found.at_s == pytest.approx(2.0)


def test_a_flip_that_was_first_seen_done_was_ordered_before_its_drain() -> None:
    (found,) = flipped([Look(4.5, AFTER)], BEFORE, 0.5)
    assert found.at_s == pytest.approx(1.0)


def test_the_timeline_has_roles_and_requests() -> None:
    found = made().timeline
    assert found.at_s == pytest.approx([0.0, 2.2, 9.0])
    assert (found.prefill, found.decode) == ([1, 1, 2], [2, 1, 1])
    assert (found.prompts, found.answers) == ([0, 1, 0], [0, 1, 0])


def test_the_cluster_is_looked_at_until_it_is_left() -> None:
    rows = iter([{}, BEFORE])
    with Watch(lambda: next(rows, AFTER), time.monotonic()) as watch:
        deadline = time.monotonic() + 30
        while not watch.looks and time.monotonic() < deadline:
            time.sleep(0.01)
    assert watch.looks[0].rows == BEFORE


# -- report ------------------------------------------------------------------------


def results() -> dict[str, Any]:
    slower = [Answered(each.arrival, each.first_s, 2 * each.done_s) for each in ANSWERED]
    fast, slow = asdict(made()), asdict(made(slower))
    every = {"1P2D": [slow, slow], "2P1D": [fast, fast], "balance": [fast, slow], "idle": [slow]}
    conditions = {
        "phases": 4,
        "phase_s": 60.0,
        "rates": [1.3, 1.0],
        "code": "x",
        "conversation": "y",
        "instances": 3,
        "kv_tokens": 8192,
        "slo_ttft_s": 5.0,
        "slo_tpot_s": 0.1,
        "pace": "p",
        "scale": 0.5,
    }
    # As it comes back from the file.
    loads = {"swing": every, "code": {"2P1D": [fast]}}
    found: dict[str, Any] = json.loads(json.dumps({"conditions": conditions, "loads": loads}))
    return found


def test_systems_are_compared_with_the_best_split_repeat_by_repeat() -> None:
    swing = results()["loads"]["swing"]
    assert flip_report.best_fixed(swing) == "2P1D"
    assert flip_report.best_fixed({"idle": swing["idle"]}) is None
    ratio = flip_report.paired(
        swing["balance"],
        swing["2P1D"],
        lambda run, other: flip_report.jct_s(run) / flip_report.jct_s(other),
    )
    assert ratio.mean == pytest.approx(1.5)
    assert flip_report.of_kind(swing["2P1D"][0], "conversation", "jct_s") == pytest.approx(4.0)
    assert flip_report.of_kind(swing["2P1D"][0], "neither", "jct_s") is None


def test_tables_show_every_system_and_its_flips() -> None:
    console = Console(width=150)
    with console.capture() as shown:
        flip_report.show(console, results())
    text = shown.get()
    assert "to 2P1D" in text
    assert "50 ±635 %" in text
    assert "balance, swing" in text


@pytest.mark.parametrize("loads", [["swing", "code"], ["code"]])
def test_the_picture_shows_loads_and_one_swing(loads: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results()
    found["loads"] = {load: found["loads"][load] for load in loads}
    flip_report.draw(found, tmp_path / "flip.svg")
    text = (tmp_path / "flip.svg").read_text()
    assert "keep the pace" in text
    assert "2P1D, fixed" in text
    assert ("balance: instances by role" in text) == ("swing" in loads)


# -- the command -------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--instances", "2"],
        ["--phase", "0"],
        ["--phases", "0"],
        ["--rates", "1"],
        ["--rates", "1,0"],
        ["--longest", "1"],
        ["--longest-prompt", "4000"],
        ["--kv-tokens", "100"],
        ["--flip-after", "0"],
        ["--slo-ttft", "0"],
        ["--slo-tpot", "0"],
        ["--systems", "3P0D"],
        ["--loads", "none"],
        ["--code", "nowhere.csv"],
        ["--conversation", "nowhere.csv"],
        ["--scale", "0"],
        ["--repeats", "0"],
    ],
)
def test_wrong_values_are_refused_before_an_instance_starts(
    words: list[str], refuses: Callable[[list[str], str], None]
) -> None:
    refuses(["flip", "model", *words], words[0])


class FakeFleet:
    """Instances that only remember their roles, and what they were told."""

    said: list[str]
    roles: dict[str, str]
    served_name, url = "model", ""

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self).said = []

    def start(self, members: list[Member]) -> None:
        self.roles = {each.name: each.role for each in members}

    def restart_router(self, options: list[str]) -> None:
        self.said.append(" ".join(options))

    def flip(self, name: str, role: str, *, now: bool = False) -> dict[str, Any]:
        source, self.roles[name] = self.roles[name], role
        times = {"drain_s": 0.0 if now else 0.2, "commit_s": 0.001}
        return {"flip": {"source": source, "target": role, **times}}

    def instances(self) -> dict[str, dict[str, Any]]:
        return {name: {**row(role), "flip": None} for name, role in self.roles.items()}

    def at_rest(self) -> dict[str, dict[str, Any]]:
        self.said.append("".join(sorted(role[0] for role in self.roles.values())))
        return self.instances()

    def clear_counts(self) -> None:
        pass

    def counts(self) -> dict[str, Counts]:
        return {name: Counts(paced_s=1.0) for name in self.roles}

    def __enter__(self) -> FakeFleet:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run it with a fake fleet that breaks after so many sendings; returns the JSON."""
    pytest.importorskip("matplotlib")

    def run(*words: str, sendings: int = 1000) -> dict[str, Any]:
        left = iter(range(sendings))

        def send(_: str, asks: list[Arrival], *__: Any, **___: Any) -> list[Answered]:
            if next(left, None) is None:
                raise UnsupportedError("broken")
            return [Answered(each, 0.5, 1.0) for each in asks]

        monkeypatch.setattr("vllm_tetri.bench.flip.command.Fleet", FakeFleet)
        monkeypatch.setattr("vllm_tetri.bench.setting.require_vllm", lambda: None)
        monkeypatch.setattr("vllm_tetri.bench.arrivals.send", send)
        parser = argparse.ArgumentParser()
        flip.add_arguments(parser)
        own = ["--output", str(tmp_path), "--timing", "0"]
        options = parser.parse_args(["model", *own, *words])
        options.tail = []
        with contextlib.suppress(UnsupportedError):
            flip.run(options)
        found: dict[str, Any] = json.loads((tmp_path / "flip.json").read_text())
        return found["loads"]

    return run


def test_every_system_gets_the_same_requests_from_its_own_split(bench: Any) -> None:
    found = bench("--loads", "swing", "--repeats", "2", "--flip-after", "20")
    assert sorted(found["swing"]) == sorted(systems(3))
    for repeat in range(2):
        assert len({runs[repeat]["overall"]["requests"] for runs in found["swing"].values()}) == 1
        for name, runs in found["swing"].items():
            assert len(runs) == 2
            assert runs[repeat]["timeline"]["prefill"][0] == (1 if name == "1P2D" else 2)
    assert FakeFleet.said.count("--flip idle --flip-after 10.0") == 2
    assert FakeFleet.said.count("--flip balance --flip-after 10.0") == 2


def test_a_broken_off_run_keeps_what_it_had_and_goes_on(bench: Any) -> None:
    words = ("--loads", "code", "--systems", "2P1D,balance", "--repeats", "2")
    begun = bench(*words, sendings=2 + 3)  # two to warm up
    assert sorted(len(runs) for runs in begun["code"].values()) == [1, 2]
    whole = bench(*words, "--add")
    assert [len(runs) for runs in whole["code"].values()] == [2, 2]
    FakeFleet.said = []
    assert bench(*words, "--add") == whole
    assert FakeFleet.said == []


def flipping_fleet() -> Any:
    cluster = FakeFleet()
    roles = [Role.DECODE, Role.PREFILL, Role.PREFILL]
    cluster.start([Member(f"i{place}", role) for place, role in enumerate(roles)])
    return cluster


def test_flips_are_timed_as_long_as_requests_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flip_times, "_PAUSE_S", 0.001)
    times = flip_times.time_flips(flipping_fleet(), lambda: time.sleep(0.3))
    assert len(times) > 10
    assert {each.source for each in times} == {"prefill", "decode"}
    assert [each.drain_s > 0 for each in times[:4]] == [True, True, False, False]
    console = Console(width=150)
    with console.capture() as shown:
        flip_report.show(console, {**results(), "timing": [asdict(each) for each in times]})
    assert re.search(r"from decode, at once.* 1\.00 ", shown.get())


def test_a_request_that_fails_while_roles_flip_is_an_error() -> None:
    def send() -> None:
        raise UnsupportedError("HTTP 503")

    with pytest.raises(UnsupportedError, match="HTTP 503"):
        flip_times.time_flips(flipping_fleet(), send)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run(tiny_llama: Path, tmp_path: Path) -> None:
    words = ["--phase", "6", "--phases", "2", "--repeats", "1", "--scale", "0.5"]
    words += ["--systems", "1P2D,balance", "--loads", "swing", "--output", str(tmp_path)]
    words += ["--longest-prompt", "500", "--longest", "32", "--timing", "12"]
    assert cli.main(["bench", "flip", str(tiny_llama), *words]) == 0
    found = json.loads((tmp_path / "flip.json").read_text())
    counts = {runs[0]["overall"]["requests"] for runs in found["loads"]["swing"].values()}
    assert len(counts) == 1
    assert counts != {0}
    assert (tmp_path / "flip.svg").stat().st_size
    assert found["timing"]
