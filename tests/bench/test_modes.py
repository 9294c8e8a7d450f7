"""`vllm-tetri bench modes`: what is asked, what is kept, and what is made of it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web

from vllm_tetri import cli
from vllm_tetri.bench.arrivals import Slo
from vllm_tetri.bench.modes import client as modes_client
from vllm_tetri.bench.modes import load as modes_load
from vllm_tetri.bench.modes import run as modes_run
from vllm_tetri.bench.modes.cells import Cell, Raw, Request
from vllm_tetri.bench.modes.client import Pulse, Reply, Turn
from vllm_tetri.bench.modes.figures import (
    COMPARED,
    METRICS,
    Results,
    Slos,
    best_other,
    figures,
    ratio,
    slos,
)
from vllm_tetri.bench.modes.load import CLASSES, KNEE, PLAIN, RATES
from vllm_tetri.bench.modes.report import cells, markdown, ratios, sustained, verdicts
from vllm_tetri.bench.modes.run import Block, blocks, schedule_of
from vllm_tetri.bench.modes.systems import DEFAULT, SYSTEMS, Site, System, serve_options
from vllm_tetri.errors import UnsupportedError

CAPACITIES = {"lpld": 4.0, "lphd": 1.0, "hpld": 2.0, "hphd": 0.5, "mixed": 1.5}
SLO = Slos(Slo(2.0, 0.1), Slo(0.5, 0.05))
LOAD = ("lpld", KNEE)
BY_KEY = {metric.key: metric for metric in METRICS}


# -- what is asked -----------------------------------------------------------------


def test_a_schedule_depends_on_class_rate_and_repeat_only() -> None:
    first = schedule_of(LOAD, 0, 20, CAPACITIES, 7)
    assert first == schedule_of(LOAD, 0, 20, CAPACITIES, 7)
    others = [(LOAD, 1, 7), (("lpld", "past"), 0, 7), (("hpld", KNEE), 0, 7), (LOAD, 0, 8)]
    for load, repeat, seed in others:
        assert schedule_of(load, repeat, 20, CAPACITIES, seed)[0] != first[0]
        assert schedule_of(load, repeat, 20, CAPACITIES, seed)[1] != first[1]


@pytest.mark.parametrize("name", PLAIN)
def test_lengths_fill_the_ranges_of_their_class(name: str) -> None:
    found = [each.length for each in modes_load.at_once(name, 4000, Random(0))]
    (least, most), (shortest, longest) = PLAIN[name]
    prompts = sorted(each.prompt_tokens for each in found)
    answers = sorted(each.output_tokens for each in found)
    assert least <= prompts[0] < prompts[-1] <= most
    assert shortest == answers[0] < answers[-1] == longest
    assert prompts[2000] == pytest.approx(math.sqrt(least * most), rel=0.1)
    assert answers[2000] == pytest.approx((shortest + longest) / 2, rel=0.1)


def test_mixed_has_all_four_alike() -> None:
    found = [each.length for each in modes_load.at_once("mixed", 4000, Random(0))]
    for is_heavy in (False, True):
        for is_long in (False, True):
            count = sum(
                (each.prompt_tokens >= 512) == is_heavy and (each.output_tokens > 128) == is_long
                for each in found
            )
            assert count == pytest.approx(1000, rel=0.1)


def test_requests_come_at_a_part_of_the_capacity() -> None:
    for rate, part in RATES.items():
        found = modes_load.schedule(("hpld", rate), 4000, CAPACITIES, Random(1))
        assert 4000 / found[-1].at_s == pytest.approx(part * 2.0, rel=0.1)
        assert modes_load.rate_per_s(("hpld", rate), CAPACITIES) == pytest.approx(part * 2.0)


def test_a_swing_goes_from_one_class_to_the_other_and_back() -> None:
    found = modes_load.schedule(("swing", KNEE), 3000, CAPACITIES, Random(1))
    for phase, name in enumerate(("lphd", "hpld", "lphd")):
        own = [each for each in found if each.phase == phase]
        prompts, answers = PLAIN[name]
        assert len(own) == 1000
        assert all(prompts[0] <= each.length.prompt_tokens <= prompts[1] for each in own)
        assert all(answers[0] <= each.length.output_tokens <= answers[1] for each in own)
        assert 999 / (own[-1].at_s - own[0].at_s) == pytest.approx(0.7 * CAPACITIES[name], rel=0.1)
    assert 3000 / found[-1].at_s == pytest.approx(
        modes_load.rate_per_s(("swing", KNEE), CAPACITIES), rel=0.1
    )


def test_a_swing_has_one_rate_and_needs_the_capacities_of_its_parts() -> None:
    assert modes_load.loads(CLASSES, list(RATES)).count(("swing", KNEE)) == 1
    assert len(modes_load.loads(CLASSES, list(RATES))) == 5 * 3 + 1
    assert modes_load.measured(["swing", "mixed"]) == ["lphd", "hpld", "mixed"]


def test_all_systems_share_the_same_memory_and_batch() -> None:
    site = Site("/models/m", ["--dtype", "float32"], (0, 1), None, Path())
    for system in SYSTEMS.values():
        words = serve_options(system, site)
        sizes = [
            int(words[words.index(option) + 1]) * system.engines
            for option in ("--kv-cache-memory-bytes", "--max-num-seqs")
        ]
        assert sizes == [1 << 30, 128]
        assert words[-2:] == ["--dtype", "float32"]
    assert set(DEFAULT) == set(SYSTEMS) - {"whole"}


def test_blocks_leave_out_what_is_done_and_keep_their_order() -> None:
    loads = modes_load.loads(["lpld", "hpld"], list(RATES))
    whole = blocks(["stock", "split"], loads, 2, 0, {})
    assert sorted((each.repeat, each.system) for each in whole) == [
        (0, "split"), (0, "stock"), (1, "split"), (1, "stock"),
    ]  # fmt: skip
    assert all(set(each.loads) == set(loads) for each in whole)
    first = whole[0]
    done = {(first.system, *load, 0): cell() for load in first.loads[:2]}
    left = blocks(["stock", "split"], loads, 2, 0, done)
    assert left == [Block(first.system, 0, first.loads[2:]), *whole[1:]]
    done = {(first.system, *load, 0): cell() for load in first.loads}
    assert blocks(["stock", "split"], loads, 2, 0, done) == whole[1:]


# -- figures -----------------------------------------------------------------------


def request(ttft_s: float, gaps_s: tuple[float, ...], at_s: float = 0.0) -> Request:
    gaps_us = [round(1e6 * gap) for gap in gaps_s]
    reply = Reply(ttft_s, ttft_s + sum(gaps_s), gaps_us)
    return Request(at_s, 10, len(gaps_s) + 1, reply)


def cell(
    system: str = "stock",
    ttft_s: float = 0.4,
    gap_s: float = 0.04,
    *,
    rate: str = KNEE,
    repeat: int = 0,
    failed: int = 0,
) -> Cell:
    """Two requests of five tokens that were answered alike, and some that failed."""
    good = [request(ttft_s, (gap_s,) * 4)] * 2
    bad = [Request(0.0, 10, 5, Reply(error="HTTP/1.1 503"))] * failed
    return Cell(system, "lpld", rate, repeat, 2.8, 4.0, 0.9, 0.01, [*good, *bad])


def results(*found: Cell) -> Results:
    return Results(found, SLO)


def test_figures_of_a_cell() -> None:
    mixed = replace(
        cell(), requests=[request(0.4, (0.04, 0.04)), request(1.0, (0.02, 0.1), at_s=1.0)]
    )
    found = figures(mixed, SLO)
    assert {metric.key for metric in METRICS} < set(found)
    assert found["ttft_mean_s"] == pytest.approx(0.7)
    assert found["jct_mean_s"] == pytest.approx((0.48 + 1.12) / 2)
    assert found["itl_p99_s"] == pytest.approx(0.0982)  # between 0.04 and 0.1
    assert found["goodput_loose"] == pytest.approx(2 / 4)
    assert found["goodput_strict"] == pytest.approx(1 / 4)
    assert (found["share_strict"], found["failed"]) == (0.5, 0)


def test_a_failed_request_is_in_time_for_nothing_and_has_no_times() -> None:
    found = figures(cell(failed=2), SLO)
    assert found["failed"] == 2
    assert found["share_loose"] == 0.5
    assert found["ttft_mean_s"] == pytest.approx(0.4)


def test_slos_are_multiples_of_a_lone_request_or_what_is_given() -> None:
    lone = {"ttft_s": 0.1, "tpot_s": 0.01}
    assert slos(lone, None, None) == Slos(Slo(1.0, 6 * 0.01), Slo(0.4, 0.025))
    assert slos(lone, [3.0, 0.2], None).loose == Slo(3.0, 0.2)


def test_the_largest_rate_that_holds_is_sustained() -> None:
    light, knee = cell(rate="light"), cell(gap_s=0.09)
    assert results(light, knee, cell(rate="past", gap_s=0.2)).sustained("lpld", "stock") == KNEE
    assert results(light, cell(ttft_s=2.1)).sustained("lpld", "stock") == "light"
    assert results(light, cell(failed=1)).sustained("lpld", "stock") == "light"
    assert results(cell(gap_s=0.2)).sustained("lpld", "stock") is None


def test_ratios_are_taken_repeat_by_repeat_and_against_the_best_of_the_others() -> None:
    found = results(
        *(cell("stock", 0.4, 0.04, repeat=each) for each in range(2)),
        *(cell("stock-128", 0.2, 0.08, repeat=each) for each in range(2)),
        cell("adaptive", 0.1, 0.04),
        cell("adaptive", 0.1, 0.02, repeat=1),
        *(cell("split", 0.01, 0.01, repeat=each) for each in range(2)),
    )
    ttft, itl = BY_KEY["ttft_mean_s"], BY_KEY["itl_p99_s"]
    assert best_other(found, LOAD, ttft) == "stock-128"  # split is ours
    assert best_other(found, LOAD, itl) == "stock"
    first = ratio(found, LOAD, "adaptive", "stock-128", ttft)
    assert first is not None
    assert first.value is not None
    assert (first.value.mean, first.value.half, first.won) == (0.5, 0.0, True)
    second = ratio(found, LOAD, "adaptive", "stock", itl)
    assert second is not None
    assert second.value is not None
    assert second.value.mean == pytest.approx(0.75)
    assert second.won is None  # 1.0 and 0.5


def test_more_goodput_is_better_and_more_time_is_worse() -> None:
    strong = [cell("stock", 0.4, 0.04, repeat=each) for each in range(2)]
    weak = [cell("adaptive", 0.6, 0.04, repeat=each) for each in range(2)]
    found = results(*strong, *weak)
    for key in ("ttft_mean_s", "goodput_strict"):
        lost = ratio(found, LOAD, "adaptive", "stock", BY_KEY[key])
        assert lost is not None
        assert lost.won is False
    none = ratio(found, LOAD, "stock", "adaptive", BY_KEY["goodput_strict"])
    assert none is not None
    assert none.value is None  # nothing to divide by


def test_one_repeat_proves_nothing() -> None:
    found = results(cell("stock"), cell("adaptive", 0.01))
    single = ratio(found, LOAD, "adaptive", "stock", BY_KEY["ttft_mean_s"])
    assert single is not None
    assert single.won is None
    assert "0 better, 0 worse, 1 open" in verdicts(found, "adaptive")


HEAD: dict[str, Any] = {
    "conditions": {
        "device": "abacus", "cores": 2, "vllm": "0", "model": "m", "options": [], "requests": 2,
        "kv_bytes": 1 << 30, "max_num_seqs": 128,
    },
    "lone": {"ttft_s": 0.1, "tpot_s": 0.01},
    "capacities": CAPACITIES,
    "foreign": 0.02,
}  # fmt: skip


def test_the_report_shows_gains_and_losses() -> None:
    made = [
        each
        for repeat in range(2)
        for each in (
            cell("stock", 0.4, 0.04, repeat=repeat),
            cell("adaptive", 0.2, 0.08, repeat=repeat, failed=repeat),
        )
    ]
    found = results(*made)
    grid = ratios(found, "adaptive")
    (row,) = grid.rows
    assert len(row) == len(grid.heads) == 1 + 2 * len(COMPARED)
    assert row[:2] == ["lpld knee", "0.50 ±0.00 ✓"]
    assert row[2] == "0.50 ±0.00 ✓ (stock)"
    assert "2.00 ±0.00 ✗" in row
    (table,) = cells(found)
    assert [each[0] for each in table.rows] == ["stock", "adaptive"]
    assert table.title == "lpld knee, 2.80 requests/s"
    assert sustained(found).rows == [["lpld", "knee (2.80/s)", "none"]]  # one request failed

    raw = Raw(HEAD, {each.key: each for each in made})
    text = markdown(raw, found)
    assert "Not measured: stock-128, stock-256, replicas, nixl, split, adaptive-slo." in text
    assert "1 of 9 requests failed." in text
    assert "Not complete" not in text
    assert "More than 10 %" not in text

    busy = replace(made[0], foreign=0.4)
    text = markdown(Raw(HEAD, {**raw.cells, busy.key: busy}), found)
    assert "More than 10 % in: stock lpld knee 1." in text


# -- the client --------------------------------------------------------------------


class Fake:
    """An OpenAI server that answers with tokens at once, or as it is told."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refuse = 0
        self.last_words = (
            'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
        )

    async def complete(self, asked: web.Request) -> web.StreamResponse:
        body = await asked.json()
        self.bodies.append(body)
        if self.refuse:
            self.refuse -= 1
            return web.json_response({"error": "busy"}, status=503)
        answer = web.StreamResponse()
        await answer.prepare(asked)
        for _ in range(body["max_tokens"]):
            text = json.dumps({"choices": [{"text": "\ndata: {x"}]})
            await answer.write(f"data: {text}\n\n".encode())
        await answer.write(self.last_words.replace("%d", str(body["max_tokens"])).encode())
        await answer.write_eof()
        return answer

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def turn(url: str, tokens: list[int], quiet_s: float = 60.0) -> Turn:
    at_s = [0.01 * place for place in range(len(tokens))]
    return Turn(url, "m", at_s, [5] * len(tokens), tokens, "seed", quiet_s)


async def played(fake: Fake, tokens: list[int]) -> list[Reply]:
    runner, url = await fake.start()
    try:
        return await modes_client.play(turn(url, tokens))
    finally:
        await runner.cleanup()


async def test_every_token_is_timed() -> None:
    fake = Fake()
    found = await played(fake, [3, 20])
    assert [len(each.gaps_us) for each in found] == [2, 19]
    assert all(0 < each.ttft_s <= each.jct_s and not each.error for each in found)
    for each in found:
        assert sum(each.gaps_us) / 1e6 == pytest.approx(each.jct_s - each.ttft_s, abs=1e-4)
    assert [len(body["prompt"]) for body in fake.bodies] == [5, 5]
    assert fake.bodies[0]["prompt"] != fake.bodies[1]["prompt"]


async def test_a_refused_request_fails_alone() -> None:
    fake = Fake()
    fake.refuse = 1
    first, second = await played(fake, [3, 3])
    assert "503" in first.error
    assert "busy" in first.error
    assert not second.error


@pytest.mark.parametrize(
    ("last_words", "complaint"),
    [
        ("data: [DONE]\n\n", "0 of 3 tokens"),
        ('data: {"usage":{"completion_tokens":2}}\n\n', "2 of 3 tokens"),
        ('data: {"error":{"message":"lost"}}\n\n', "lost"),
    ],
)
async def test_an_answer_that_is_not_whole_has_failed(last_words: str, complaint: str) -> None:
    fake = Fake()
    fake.last_words = last_words
    (found,) = await played(fake, [3])
    assert complaint in found.error


async def test_nobody_there_is_a_failure_too() -> None:
    (found,) = await modes_client.play(turn("http://127.0.0.1:9", [3]))
    assert "refused" in found.error.lower()


async def test_a_server_that_is_stuck_is_given_up() -> None:
    never = asyncio.Event()

    class Stuck(Fake):
        async def complete(self, asked: web.Request) -> web.StreamResponse:
            if (await asked.json())["max_tokens"] == 2:
                await never.wait()
            return await super().complete(asked)

    runner, url = await Stuck().start()
    try:
        fine, late = await modes_client.play(turn(url, [3, 2], quiet_s=1.0))
    finally:
        never.set()
        await runner.cleanup()
    assert not fine.error
    assert "nothing came for 1 s" in late.error


def test_a_slow_server_is_waited_for_as_long_as_something_comes() -> None:
    pulse = Pulse(quiet_s=5.0)
    assert pulse.left_s(100.0) == 5.0  # nobody waits
    pulse.sent(100.0)
    assert pulse.left_s(104.0) == 1.0
    for second in range(101, 200):
        pulse.came(second)
        assert pulse.left_s(second + 4) == 1.0
    pulse.sent(203.0)
    assert pulse.left_s(207.0) == 1.0
    assert pulse.left_s(208.0) == 0.0
    pulse.ended()
    assert pulse.left_s(208.0) == 0.0  # the other one still waits
    pulse.ended()
    assert pulse.left_s(300.0) == 5.0


# -- whole runs, on fake systems ---------------------------------------------------


class Systems:
    """Fake systems in a thread; one of them may be told to fail."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.broken = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._runner, self.url = self._run(Fake().start())

    @contextmanager
    def serving(self, system: System, _: Site) -> Iterator[str]:
        self.started.append(system.name)
        if system.name == self.broken:
            raise UnsupportedError(f"{system.name} did not start")
        yield self.url

    def close(self) -> None:
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Systems]:
    found = Systems()
    monkeypatch.setattr(modes_run, "serving", found.serving)
    monkeypatch.setattr(modes_run, "_REST_S", 0.0)
    monkeypatch.setattr(modes_run, "_SPEED_S", 0.01)
    monkeypatch.setattr(modes_run, "_AT_ONCE", 4)
    yield found
    found.close()


TWO = ["stock", "adaptive"]
STOCK_FIRST = next(
    seed for seed in count() if blocks(TWO, [LOAD], 1, seed, {})[0].system == "stock"
)


def ran(folder: Path, *more: str) -> int:
    words = ["bench", "modes", "model", "--output", str(folder), "--requests", "4"]
    words += ["--repeats", "1", "--classes", "lpld,swing", "--rates", "knee"]
    return cli.main([*words, "--systems", ",".join(TWO), "--seed", str(STOCK_FIRST), *more])


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    read = map(json.loads, (folder / "cells.jsonl").read_text().splitlines())
    return [each[kind] for each in read if kind in each]


def asked(found: list[dict[str, Any]]) -> dict[Any, Any]:
    """Times and lengths of every cell."""
    names = ("at_s", "prompt_tokens", "output_tokens")
    return {
        (each["system"], each["name"]): [[one[name] for name in names] for one in each["requests"]]
        for each in found
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_an_interrupted_run_goes_on_where_it_stopped(
    fakes: Systems, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.broken = "adaptive"
    assert ran(tmp_path) == 2
    before = lines(tmp_path, "cell")
    assert [each["system"] for each in before] == ["stock", "stock"]
    head = (tmp_path / "modes.json").read_text()
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"cell": {"system": "sto')  # cut off

    fakes.broken, fakes.started = "", []
    assert ran(tmp_path, "--add") == 0
    assert fakes.started == ["adaptive"]
    assert (tmp_path / "modes.json").read_text() == head
    found = lines(tmp_path, "cell")
    assert found[: len(before)] == before
    assert len(found) == 4
    schedules = asked(found)
    assert len(schedules) == 4
    for name in ("lpld", "swing"):
        assert schedules["stock", name] == schedules["adaptive", name]
    assert all(each["gflops"] for each in lines(tmp_path, "speed"))
    assert "1 repeat of everything" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "modes-itl-p99.svg").stat().st_size > 1000

    capsys.readouterr()
    assert ran(tmp_path, "--add", "--seed", "500") == 2
    assert f"seed {STOCK_FIRST}, not 500" in capsys.readouterr().err
    assert lines(tmp_path, "cell") == found

    (tmp_path / "report.md").unlink()
    assert cli.main(["bench", "modes", "--report", str(tmp_path), "--strict", "9,9"]) == 0
    assert "TTFT 9000 ms" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["model", "--systems", "stock,fastest"], "--systems"),
        (["model", "--systems", "replicas"], "--rival"),
        (["model", "--rival", "/nowhere/vllm-router"], "--rival"),
        (["model", "--classes", "tiny"], "--classes"),
        (["model", "--classes", "swing", "--rates", "light"], "--rates"),
        (["model", "--rates", "fast"], "--rates"),
        (["model", "--loose", "1"], "--loose"),
        (["model", "--strict", "1,0"], "--strict"),
        (["model", "--requests", "1"], "--requests"),
        (["model", "--repeats", "0"], "--repeats"),
        (["model", "--cores", "1"], "--cores"),
        (["model", "--", "--max-num-seqs", "9"], "--max-num-seqs"),
        (["model", "--", "--no-enable-prefix-caching"], "--enable-prefix-caching"),
        (["--report", "nowhere"], "--report"),
        ([], "MODEL"),
    ],
)
def test_wrong_values_are_refused_before_an_engine_starts(
    words: list[str], option: str, refuses: Callable[[list[str], str], None]
) -> None:
    refuses(["modes", *words], option)


def test_a_broken_results_file_is_named(tmp_path: Path, refuses: Any) -> None:
    (tmp_path / "modes.json").write_text(json.dumps(HEAD))
    (tmp_path / "cells.jsonl").write_text('{"speed": {}}\n')
    refuses(["modes", "--report", str(tmp_path)], "cells.jsonl, line 1")
