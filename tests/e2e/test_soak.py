"""A minute of faults on a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import SERVE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_minute_of_faults_leaves_nothing_and_changes_no_answer(
    tiny_llama: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "vllm_tetri.cli", "bench", "soak", str(tiny_llama)]
    words += ["--minutes", "1", "--fault-every", "8", "--clients", "4"]
    words += ["--output", str(tmp_path / "soak"), "--json", "--", *SERVE]
    words += ["--tetri-chunk-size", "64", "--tetri-arena-bytes", "64M"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert len(found["faults"]) >= 3
    kept = {each["text"]: each for each in found["promises"]}
    for text in (
        "no answer is wrong",
        "requests are answered",
        "nothing stays in an instance without requests",
        "everything comes back and comes to rest",
        "the end leaves nothing",
    ):
        assert kept[text]["is_kept"], kept[text]
