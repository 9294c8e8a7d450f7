"""`vllm-tetri bench decisions`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_tetri import cli
from vllm_tetri.bench.decisions import CLUSTERS, INSTANCES

pytest.importorskip("matplotlib")


def test_everything_is_measured_printed_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "found"
    words = ["--decisions", "3", "--repeats", "1", "--output", str(folder)]
    assert cli.main(["bench", "decisions", *words]) == 0

    found = json.loads((folder / "decisions.json").read_text())
    assert set(found["dispatch"]) == set(CLUSTERS)
    assert set(found["view"]) == {str(size) for size in INSTANCES}
    assert found["admission"]["as predicted"]["running"] > 200
    assert (folder / "decisions.svg").stat().st_size > 0
    output = capsys.readouterr().out
    assert all(name in output for name in CLUSTERS)


@pytest.mark.parametrize("option", ["--decisions", "--repeats"])
def test_wrong_use_is_refused(refuses: Callable[[list[str], str], None], option: str) -> None:
    refuses(["decisions", option, "0"], option)
