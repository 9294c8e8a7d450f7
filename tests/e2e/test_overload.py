"""A short overload of a real cluster, with two clients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import SERVE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_crowd_is_refused_and_the_cluster_is_what_it_was(
    tiny_llama: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "vllm_tetri.cli", "bench", "overload", str(tiny_llama)]
    words += ["--minutes", "0.25", "--max-in-flight", "64", "--keys"]
    words += ["--output", str(tmp_path / "overload"), "--json", "--", *SERVE]
    words += ["--tetri-arena-bytes", "64M"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    found = json.loads(done.stdout)
    kept = {each["text"]: each for each in found["promises"]}
    for text in (
        "every answer is whole, or a clear refusal",
        "nobody dies of it",
        "everything comes to rest",
        "the end leaves nothing",
    ):
        assert kept[text]["is_kept"], kept[text]
    rows = {each["name"]: each for each in found["rows"]}
    assert rows["overload"]["refused"] > rows["overload"]["served"] > 0
    # Who asks for little is refused less than who asks for all too much.
    greedy, modest = rows["- greedy client"], rows["- modest client"]
    assert modest["refused"] / modest["sent"] < greedy["refused"] / greedy["sent"]
    assert not (tmp_path / "overload" / "keys").exists()
