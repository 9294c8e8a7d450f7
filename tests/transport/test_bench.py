"""The benchmark runs, prints its table and writes its figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from vllm_tetri.transport import bench


def test_a_small_run_measures_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    target = tmp_path / "figures.json"
    args = parser.parse_args(["--total-mib", "4", "--repeats", "1", "--json", str(target)])
    assert bench.run(args) == 0
    assert "shm/memcpy" in capsys.readouterr().out
    rows = json.loads(target.read_text())["rows"]
    assert [row["page_bytes"] for row in rows] == list(bench.PAGE_BYTES)
    assert all(value > 0 for row in rows for value in row.values() if value is not None)


def test_a_total_that_is_too_small_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(total_mib=1, repeats=1, streams=2, json=None)
    assert bench.run(args) == 2
    assert "--total-mib" in capsys.readouterr().out
