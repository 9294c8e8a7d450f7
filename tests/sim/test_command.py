"""`vllm-tetri sim`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tetri import cli

FEW = ["--requests", "20"]


def test_systems_are_rows_over_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    modes = ["--mode", "split", "whole", "--stock", "2048", "--replicas", "2"]

    assert cli.main(["sim", *modes, *FEW]) == 0

    lines = capsys.readouterr().out.splitlines()
    rows = [
        re.split(r"\s{2,}", line.strip()) for line in lines if "P+1D" in line or "stock" in line
    ]
    assert [row[0] for row in rows] == ["split 1P+1D", "whole 1P+1D", "2 stock, budget 2048"]
    assert [row[9] for row in rows] == ["100%", "0%", "0%"]


def test_stock_has_the_front_of_its_own_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"base_s": 0.01, "request_s": 0, "token_s": 0, "prompt_s": 0, "context_s": 0}
    slow, quick = tmp_path / "slow.json", tmp_path / "quick.json"
    slow.write_text(json.dumps({"version": 1, **steps, "front_s": 0.5}))
    quick.write_text(json.dumps({"version": 1, **steps}))
    profiles = ["--profile", str(slow), "--stock-profile", str(quick)]
    few = ["--kind", "lpld", "--rate", "0.01", "--requests", "5"]

    assert cli.main(["sim", "--mode", "whole", "--stock", "2048", *profiles, *few]) == 0

    lines = capsys.readouterr().out.splitlines()
    ours = next(line.split() for line in lines if "whole" in line)
    stock = next(line.split() for line in lines if "stock" in line)
    assert (int(ours[2]), int(stock[4])) == (510, 10)


def test_phases_and_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("ContextTokens,GeneratedTokens\n20,5\n")

    assert cli.main(["sim", "--phases", "lpld:4:3,hpld:1:3"]) == 0
    assert cli.main(["sim", "--lengths", str(path), *FEW]) == 0

    assert "20 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--mode", "both"],
        ["--kind", "heavy"],
        ["--profile", "none.json"],
        ["--prefill", "0", "--decode", "0"],
        ["--stock", "0"],
        ["--replicas", "0"],
        ["--phases", "mixed:1"],
        ["--phases", "mixed:1:1", "--lengths", "x.csv"],
        ["--slo", "0,1"],
        ["--rate", "nan"],
        ["--kv-blocks", "10"],
    ],
)
def test_bad_input_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sim", *words]) == 2

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
