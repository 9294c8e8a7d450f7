"""`vllm-tetri bench`: the verdict on two measured systems, and child processes."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.eventually import eventually
from vllm_tetri import bench
from vllm_tetri.errors import UnsupportedError


def measured(completed: int, value: float) -> dict[str, Any]:
    return {"completed": completed, **dict.fromkeys(bench.FIGURES, value)}


def test_a_system_that_completed_fewer_requests_fails_however_fast_it_was() -> None:
    words, is_passed = bench.verdict(measured(8, 10.0), measured(7, 1.0))
    assert not is_passed
    assert "ours completed 7 requests and stock 8" in words


@pytest.mark.parametrize("ours", [0, 8])
def test_nothing_that_stock_completed_compares_with_nothing(ours: int) -> None:
    assert not bench.verdict(measured(0, 0.0), measured(ours, 1.0))[1]


def test_the_verdict_names_what_is_better() -> None:
    words, is_passed = bench.verdict(measured(8, 10.0), measured(8, 9.0) | {"p99_itl_ms": 11.0})
    assert is_passed
    assert "TTFT mean" in words
    assert "ITL" not in words
    assert "throughput" not in words


def test_other_percentiles_than_usual_are_left_out() -> None:
    results = [measured(8, each) for each in (10.0, 9.0)]
    for each in results:
        del each["p99_ttft_ms"], each["p99_itl_ms"]
    assert bench.verdict(*results)[1]


@pytest.mark.parametrize(
    ("words", "num_gpus", "replicas"),  # 0: the option is not needed
    [
        ("--mode split", 1, 0),  # both instances of ours share the GPU
        ("--mode split", 2, 2),
        ("--mode split --prefill 1 --decode 3", 8, 4),
        ("--prefill 3", 8, 4),  # and one for decode
        ("--mode split --prefill 2 --decode 2 -- -tp 2", 4, 2),
        ("--mode split --prefill 1 --decode 1 -- -tp 2", 2, 0),
        ("--both 2 -- --data-parallel-size 4", 8, 0),
        ("--both 2 -- -dp=4", 8, 0),
    ],
)
def test_stock_has_as_many_replicas_as_our_instances_have_gpus(
    words: str, num_gpus: int, replicas: int
) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    before, _, after = words.partition(" -- ")
    options = parser.parse_args(["model", *before.split()])
    options.tail = after.split()
    expected = ["--data-parallel-size", str(replicas)] if replicas else []
    assert bench.replica_options(options, num_gpus) == expected


@pytest.mark.parametrize(("tail", "is_eager"), [("", True), ("-O3", False), ("-cc.mode=3", False)])
def test_both_systems_compile_if_asked_for(tail: str, is_eager: bool) -> None:
    options = argparse.Namespace(tail=tail.split())
    assert ("--enforce-eager" in bench.serve_options_of(options, 2)) is is_eager


def test_a_child_ends_with_its_descendants_when_the_block_is_left(tmp_path: Path) -> None:
    script = "import subprocess; subprocess.run(['sleep', '1000'])"
    with bench.Child([sys.executable, "-c", script], tmp_path / "log") as process:
        below = partial(psutil.Process(process.pid).children, recursive=True)
        eventually(lambda: any(each.name() == "sleep" for each in below()), 30)
        tree = below()
    gone = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    assert not any(each.is_running() and each.status() not in gone for each in tree)


def test_ctrl_c_waits_for_a_child_that_ends_slowly(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), sys.exit()))\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    log = tmp_path / "log"
    process = bench.Child([sys.executable, "-c", script], log)
    process.wait_until(lambda: "ready" in log.read_text(), 30)
    with pytest.raises(KeyboardInterrupt), process:
        raise KeyboardInterrupt
    assert process.returncode is not None


def test_a_server_that_ends_before_it_is_ready_is_reported_with_its_last_lines(
    tmp_path: Path,
) -> None:
    with (
        bench.Child([sys.executable, "-c", "print('no such model')"], tmp_path / "log") as process,
        pytest.raises(UnsupportedError, match="no such model"),
    ):
        process.wait_until(lambda: False, 30)


def test_the_progress_of_a_load_is_that_of_its_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "load.py"
    script.write_text(
        "import json, os, pathlib, sys, time\n"
        "word = dict(zip(sys.argv, sys.argv[1:]))\n"
        "print('warming up 2/2 [00:00]', '\\r 50%|##  | 2/4 [00:01', end='', flush=True)\n"
        "result = pathlib.Path(word['--result-dir'], word['--result-filename'])\n"
        "while not result.with_name('go').exists(): time.sleep(0.01)\n"
        "result.write_text(json.dumps({'key': os.environ['OPENAI_API_KEY']}))\n"
    )
    monkeypatch.setattr(bench, "VLLM", (sys.executable, str(script)))
    monkeypatch.setenv("VLLM_API_KEY", "# some\nof servers\nanother")
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    told = []

    def tell(completed: int) -> None:
        told.append(completed)
        if completed == 2:
            (tmp_path / "go").touch()

    options = parser.parse_args(["model", "--num-prompts", "4"])
    found = bench.send_load(options, "http://127.0.0.1:1", tmp_path, "ours", tell)
    assert found == {"key": "of servers"}
    assert set(told) <= {0, 2}
