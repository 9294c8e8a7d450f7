"""`vllm-tetri sim`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tetri import cli

FEW = ["--requests", "20"]
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.5,{60 + second},4\n" for second in range(20)
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def rows(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, list[list[str]]]:
    """The title and the rows of the table."""
    assert cli.main(["sim", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(line.strip() for line in lines if "of virtual time" in line)
    shown = [line.strip() for line in lines if "P+1D" in line or "stock" in line]
    return title, [re.split(r"\s{2,}", line) for line in shown]


def test_systems_are_rows_over_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    modes = ["--mode", "split", "whole", "--stock", "2048", "--replicas", "2"]

    _, found = rows([*modes, *FEW], capsys)

    assert [row[0] for row in found] == ["split 1P+1D", "whole 1P+1D", "2 stock, budget 2048"]
    assert [row[9] for row in found] == ["100%", "0%", "0%"]


def test_a_file_that_cannot_be_written_costs_no_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sim", *FEW, "--json", str(tmp_path / "missing" / "found.json")]) == 2
    shown = capsys.readouterr()
    assert "P+1D" in shown.out
    assert "No such file" in shown.err


def test_json_holds_what_the_table_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"

    _, found = rows([*FEW, "--json", str(path)], capsys)
    assert cli.main(["sim", *FEW, "--json", "-"]) == 0

    written, printed = json.loads(path.read_text()), json.loads(capsys.readouterr().out)
    (row,) = written["systems"]
    assert written["systems"] == printed["systems"]
    assert (row["system"], f"{row['ttft_mean_s'] * 1e3:.0f}") == tuple(found[0][:2])
    assert set(row["busy"]) == {"prefill-0", "decode-0"}
    assert printed["options"]["ttft_slo"] == "1.0"


def test_policies_are_chosen_by_name_and_by_path(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--arrivals", "at-once", "--requests", "60", "--prefill", "2", "--decode", "2"]
    named = {
        "sjf": [],
        "fcfs": ["--prefill-policy", "fcfs"],
        "greedy": ["--decode-policy", "greedy", "--kv-blocks", "300"],
        "static": ["--decode-policy", "reserve-static", "--kv-blocks", "300"],
        "path": ["--dispatch-policy", "tests.sim.test_command:always_first"],
    }
    found = {}
    for name, words in named.items():
        assert cli.main(["sim", *load, *words, "--json", "-"]) == 0
        (found[name],) = json.loads(capsys.readouterr().out)["systems"]

    assert found["sjf"]["ttft_mean_s"] < found["fcfs"]["ttft_mean_s"]
    assert found["greedy"]["preemptions"] > found["static"]["preemptions"]
    assert found["path"]["busy"]["decode-1"] < found["sjf"]["busy"]["decode-1"]  # some moved


def always_first(candidates, need):  # type: ignore[no-untyped-def]
    """A dispatch policy: the first candidate with capacity."""
    return min(candidates.with_capacity(), key=lambda each: each.id, default=None)


def test_lengths_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("ContextTokens,GeneratedTokens\n20,5\n")

    assert "20 requests" in rows(["--lengths", str(path), *FEW], capsys)[0]


def test_a_trace_holds_number_and_times_of_requests(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rows(["--trace", trace], capsys)[0] == "20 requests over 19 s of virtual time"
    quick = ["--trace", trace, "--trace-speed", "4", "--requests", "13"]
    assert rows(quick, capsys)[0] == "13 requests over 3 s of virtual time"


def test_a_slow_link_delays_outputs_and_more_so_without_chunks(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = ["--trace", trace, "--chunk-size", "16"]
    slow = [*chunks, "--link", "0.02"]  # 46 KB a token: 18 ms

    jct = [
        int(rows(words, capsys)[1][0][5])
        for words in (chunks, [*chunks, "--link", "nvlink"], slow, [*slow, "--send", "request"])
    ]

    assert jct[1] <= jct[0] < jct[2] < jct[3]


@pytest.mark.parametrize(
    "words",
    [
        ["--profile", "none.json"],
        ["--prefill", "0", "--decode", "0"],
        ["--stock", "0"],
        ["--replicas", "0"],
        ["--accuracy", "1.1"],
        ["--ttft-slo", "0"],
        ["--rate", "nan"],
        ["--kv-blocks", "10"],
        ["--kv-blocks", "0"],
        ["--chunk-size", "0"],
        ["--tbt-slo", "0"],
        ["--decode-policy", "none"],
        ["--dispatch-policy", "none"],
        ["--prefill-policy", "no.such.module:policy"],
        ["--json", "/no/such/folder/found.json"],
        ["--link", "fast"],
        ["--link", "0"],
        ["--arrivals", "gamma"],
        ["--trace", "none.csv"],
        ["--trace", "none.txt"],
        ["--trace-speed", "2"],
        ["--trace", "TRACE", "--trace-speed", "0"],
        ["--trace", "TRACE", "--requests", "0"],
        ["--trace", "TRACE", "--lengths", "x.csv"],
        ["--trace", "TRACE", "--arrivals", "at-once"],
        ["--requests", "0"],
    ],
)
def test_bad_input_is_one_line(
    words: list[str], trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sim", *(trace if word == "TRACE" else word for word in words)]) == 2

    assert capsys.readouterr().err.count("\n") == 1


def test_it_runs_without_vllm_and_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('vllm', 'torch', 'zmq', 'msgspec')))\n"
        "from vllm_tetri import cli\n"
        "sys.exit(cli.main(['sim', '--requests', '5']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


_OPTIONS = {
    "modes": "--mode split adaptive whole --prefill 6 --decode 6 --both 2 --stock 2048 --replicas 9"
    " --rate 12 --requests 60 --arrivals gamma:3 --accuracy 0.7 --link roce --kv-blocks 160",
    "traffic": "--mode split adaptive --prefill 2 --decode 2 --rate 3 --requests 48 --seed 5"
    " --link 0.01 --send request",
}
_PROGRAM = """
import sys
from vllm_tetri import cli
from vllm_tetri.sim.cluster import simulate
from vllm_tetri.sim.config import ClusterConfig, make_instances
from vllm_tetri.sim.workload import draw

code = cli.main(["sim", *sys.argv[1:]])
for mode in ("split", "adaptive"):
    for each in simulate(ClusterConfig(make_instances(5, 5), mode), draw("mixed", 40, 9.0, seed=2)):
        print(each, *(part.tobytes().hex() for part in each.gap_parts))
sys.exit(code)
"""


@pytest.mark.parametrize("name", _OPTIONS)
def test_two_processes_say_the_same_to_the_bit(name: str) -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _PROGRAM, *_OPTIONS[name].split()],
            capture_output=True,
            timeout=120,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]

    assert len(outputs[0]) > 10_000
    assert outputs[0] == outputs[1]
