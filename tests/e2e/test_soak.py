"""A minute of faults on a real cluster: two routers, and instances with predictors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import SERVE
from tests.predictor.tiny_artefact import make

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_minute_of_faults_leaves_nothing_and_changes_no_answer(
    tiny_llama: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "vllm_tetri.cli", "bench", "soak", str(tiny_llama)]
    words += ["--minutes", "1", "--fault-every", "7", "--rest-every", "5", "--clients", "4"]
    words += ["--predictor", str(make(tmp_path / "artefact"))]
    words += ["--output", str(tmp_path / "soak"), "--json", "--", *SERVE]
    words += ["--tetri-chunk-size", "64", "--tetri-arena-bytes", "64M"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    found = json.loads(done.stdout)
    kinds = [each["kind"] for each in found["faults"]]
    assert len(kinds) >= 3
    assert len(set(kinds)) == len(kinds)
    assert len(found["rests"]) >= 2
    kept = {each["text"]: each for each in found["promises"]}
    for text in (
        "no request is lost",
        "no router breaks a connection while it lives",
        "no answer is wrong",
        "requests are answered",
        "nothing stays in an instance without requests",
        "everything comes back and comes to rest",
        "the end leaves nothing",
    ):
        assert kept[text]["is_kept"], kept[text]
