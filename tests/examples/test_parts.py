"""Parts of the laboratory that need no engine: paces, loads, and instances without an engine."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pandas as pd
import pytest

from examples.benchmarks import cluster, compare, flip, moves, pace, transfer
from examples.benchmarks.client import Reply, Request
from examples.benchmarks.cluster import Site
from examples.benchmarks.report import RESULTS
from examples.benchmarks.router import System, Turn
from examples.predictor.worth import said_by
from tests.needed import needed
from vllm_tetri.engine import pacing
from vllm_tetri.engine.prediction import code_in
from vllm_tetri.launch.machine import free_port
from vllm_tetri.predictor.base import Query


def test_a_busy_engine_makes_up_for_a_late_step() -> None:
    timeline = pace.Timeline(pace.Pace("", scale=2.0))  # 13 ms, and 0.6 ms for a decode

    def due(now: float) -> float:
        return timeline.begin(pacing.StepWork(now, 1, 0, 0, 0))

    assert due(1.0) == pytest.approx(1.02722)
    assert timeline.end(1.03) == pytest.approx(0.00278)
    assert due(1.031) == pytest.approx(1.05444)  # counts from 1.02722
    timeline.end(1.05444)
    assert due(5.0) == pytest.approx(5.02722)  # after idle time it begins anew


def test_options_of_a_paced_engine_carry_its_pace(tmp_path: Path) -> None:
    device = pace.Pace(str(tmp_path / "late"), 0.25, "opt-13b-2xv100")
    site = pace.on_device(Site("model", (0,), tmp_path), device, 3200, is_ours=False)
    words = site.serve
    given = json.loads(words[words.index("--additional-config") + 1])
    assert pace.Pace(**given["pace"]) == device
    assert words[words.index("--num-gpu-blocks-override") + 1] == "101"
    (tmp_path / "late/1.late").write_text("0.5\n")
    (tmp_path / "late/2.late").write_text("0.25\n")
    assert pace.worst_s(tmp_path / "late") == 0.5
    assert pace.worst_s(tmp_path / "late") == 0.0


def test_a_modelled_device_has_its_own_clock_and_link(tmp_path: Path) -> None:
    words = ["--profile", "opt-13b-2xv100", "--scale", "4", "--kv-tokens", "3200"]
    parser = argparse.ArgumentParser()
    pace.add_device(parser)
    device = pace.device_of(parser.parse_args(words))

    def played(requests: Sequence[Request]) -> list[Reply]:
        (due,) = requests
        assert due.at_s == 12.0
        return [Reply(ttft_s=4.0, jct_s=6.0, gaps_us=[100, 200])]

    (reply,) = device.in_its_time(played)([Request(3.0, [1], 1)])
    assert (reply.ttft_s, reply.jct_s, reply.gaps_us) == (1.0, 1.5, [25, 50])

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    site = Site(str(tmp_path), (0,), tmp_path)
    assert "--tetri-link" not in device.on(site, cluster.System()).serve
    serve = device.on(site, cluster.System(up=("--both", "1"))).serve
    # 25 GB/s with 1,536 instead of 819,200 bytes of a token, four times as slow.
    assert serve[serve.index("--tetri-link") + 1] == "emulate:11.719MB/s,5us"
    assert pace.Device().on(site, cluster.System()) is site
    assert pace.Device().in_its_time(played) is played


ROWS = pd.read_csv(RESULTS / "head-mixed.csv.gz").dropna()
TINY = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "vocab_size": 1024,
}  # fmt: skip
OPTIONS = argparse.Namespace(
    num_prompts=4, request_rate=2.0, predictor=None, dispatch="power-of-two", phase=10.0,
    request_rates=[1.0, 1.0], scale=0.5, batches=[4, 16], rows=None,
)  # fmt: skip


@pytest.mark.parametrize("name", compare.experiments(OPTIONS))
def test_every_system_of_an_experiment_gets_the_same_requests(name: str) -> None:
    experiment = compare.experiments(OPTIONS)[name]
    first, again = (experiment.loads(OPTIONS, Random("seed")) for _ in range(2))
    assert first == again
    assert len(experiment.variants) > 1 or name == "dispatch"
    longest = max(len(each.prompt) + each.output_tokens for load in first.values() for each in load)
    assert longest < (pace.WINDOW_TOKENS if experiment.is_paced else 2048)


@pytest.mark.parametrize("name", ["admission", "dispatch"])
def test_predictors_are_compared_by_what_they_said_before(name: str, tmp_path: Path) -> None:
    rows = RESULTS / "head-mixed.csv.gz"
    options = argparse.Namespace(**vars(OPTIONS) | {"rows": rows, "folder": tmp_path})
    experiment = compare.experiments(options)[name]
    asked = experiment.loads(options, Random("seed"))["at once"]
    lengths = {each.output_tokens for each in asked}
    predictors = {variant.serve[variant.serve.index("--tetri-predictor") + 1]
                  for variant in experiment.variants.values()}  # fmt: skip
    folders = {Path(each) for each in predictors if "/" in each}
    assert {each.name for each in folders} == {"head", "classifier"}
    for folder in folders:
        code = code_in(folder)
        assert code.check(folder) == code.check(folder) != ""
        predictor = code.make(folder, "", ())
        for name, tokens in [("known", min(lengths)), ("unknown", 10**6)]:
            predictor.ask(Query(name, [1, 2, 3], tokens))
        (_, said), (_, nothing) = predictor.poll()
        assert nothing is None
        assert said.lengths in {each.lengths for each in said_by(folder.name, ROWS)[min(lengths)]}


def test_phases_of_a_swinging_load_follow_one_another() -> None:
    requests = flip.draw(["code", "conversation"], OPTIONS, Random(0))
    early = [each for each in requests if each.at_s < 5.0]
    late = [each for each in requests if each.at_s >= 5.0]
    assert early
    assert late
    assert [each.at_s for each in requests] == sorted(each.at_s for each in requests)

    def mean(outputs: list[int]) -> float:
        return sum(outputs) / len(outputs)

    assert mean([each.output_tokens for each in early]) < mean(
        [each.output_tokens for each in late]
    )


@pytest.mark.parametrize(
    ("slow_ms", "lost", "broken"), [(4.9, 0, 0), (5.1, 0, 1), (4.9, 1, 1), (60.0, 2, 2)]
)
def test_a_slow_commit_or_a_lost_request_breaks_the_verdict_of_flips(
    slow_ms: float, lost: int, broken: int
) -> None:
    timing = {"load": "timing", "asked": 9, "lost": 0}
    cells = [{**timing, "system": "drained", "commit_s": 0.001} for _ in range(100)]
    cells += [{**timing, "system": "at once", "commit_s": slow_ms / 1e3} for _ in range(100)]
    cells.append({"load": "swing", "system": "balance", "completed": 9.0, "failed": float(lost)})

    kept = [each.is_kept for each in flip.promises(cells)]

    assert len(kept) == 3
    assert kept.count(False) == broken


@pytest.mark.parametrize(
    ("drain_s", "gaps", "tail_s", "failed", "broken"),
    [(0.3, 1.9, 6.0, 0, 0), (0.4, 1.9, 6.0, 0, 1), (0.3, 2.1, 8.0, 0, 2), (0.4, 2.1, 8.0, 1, 4)],
)
def test_slow_drains_pauses_and_tails_break_the_verdict_of_moves(
    drain_s: float, gaps: float, tail_s: float, failed: int, broken: int
) -> None:
    both = {"completed": 9.0, "failed": float(failed)}
    cells = [
        {"load": "flips", "system": "moves", "drain_p99_s": drain_s, "move_s": 0.25, **both},
        {"load": "skew", "system": "moves", "jct_p99_s": tail_s, "paused_gaps": [gaps], **both},
        {"load": "skew", "system": "stays", "jct_p99_s": 10.0, **both},
    ]
    kept = [each.is_kept for each in moves.promises(cells)]
    assert len(kept) == 4
    assert kept.count(False) == broken


@pytest.fixture(scope="module")
def fakes() -> Iterator[dict[str, str]]:
    command = [sys.executable, "-m", "examples.benchmarks.fake", "--input-len", "5"]
    for name in ("--aggregated", "--split"):
        command += [name, f"tcp://127.0.0.1:{free_port()}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.communicate()


async def test_fake_instances_are_timed_directly(fakes: dict[str, str]) -> None:
    aggregated = Turn(System("aggregated", "direct", fakes["aggregated"]), 5)
    pair = Turn(System("pair", "direct", fakes["prefill"], fakes["decode"]), 5)
    # Timers of an event loop may be a millisecond early.
    for turn, least_ms in ((aggregated, 0.0), (pair, 9.0)):
        times = await turn.time(3, 2, Random(0))
        assert len(times) == 2
        assert all(least_ms <= first <= second for first, second in times)


async def test_streams_flow_until_they_are_left(fakes: dict[str, str]) -> None:
    turn = Turn(System("aggregated", "direct", fakes["aggregated"]), 5)
    found = await turn.flow(2, 0.01)
    assert 20 < found["events_per_s"] <= 220
    assert "events_per_cpu_s" not in found  # there is no router to pay for
    assert (await turn.loop())["requests_per_s"] > 10


@pytest.mark.slow
def test_thousands_of_requests_wait_in_little_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.benchmarks.waiting", "--requests", "2000"]
    done = subprocess.run(
        [*command, "--input-len", "1000", "--folder", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["shape"], row["answered"]) for row in rows] == [
        ("aggregated", 2000),
        ("pair", 2000),
    ]
    for row in rows:
        assert row["bytes_each"] < 100_000 + 4 * row["body_bytes"]


@pytest.mark.slow
def test_transfer_moves_pages_by_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed("nixl")
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["", "--total-mib=4", "--repeats=1", f"--json={path}"])
    transfer.main()
    assert "memcpy" in capsys.readouterr().out
    first, *_ = json.loads(path.read_text())["rows"]
    assert first["page_bytes"] == 16384
    assert first["nixl"] > 0
