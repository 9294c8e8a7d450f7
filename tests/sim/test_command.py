"""`vllm-tetri sim`."""

from __future__ import annotations

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
