"""Short runs of the laboratory's soak and overload: a verdict of "broken" fails the test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.predictor.tiny_artefact import make

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SERVE = ("--dtype", "float32", "--kv-cache-memory-bytes", "134217728", "--max-num-seqs", "32",
         "--enable-prefix-caching", "--tetri-arena-bytes", "64M")  # fmt: skip


def verdict(script: str, model: Path, folder: Path, *words: str) -> dict[str, Any]:
    before, _, serve = " ".join(words).partition(" -- ")
    command = [sys.executable, "-m", f"examples.benchmarks.{script}", str(model)]
    command += [*before.split(), "--folder", str(folder), "--", *SERVE, *serve.split()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    content = json.loads((folder / f"{script}.json").read_text())
    assert isinstance(content, dict)
    return content


def test_faults_leave_nothing_and_change_no_output(tiny_llama: Path, tmp_path: Path) -> None:
    predictor = make(tmp_path / "artefact")
    words = ["--minutes", "0.5", "--fault-every", "5", "--rest-every", "2", "--clients", "4"]
    words += ["--predictor", str(predictor), "--", "--tetri-chunk-size", "64"]

    found = verdict("soak", tiny_llama, tmp_path, *words)

    kinds = [each["kind"] for each in found["faults"]]
    assert len(kinds) == len(set(kinds)) == 6
    assert len(found["rests"]) == 4  # one of them before the first fault
    assert found["rows"][-1]["good"] > 0


def test_an_overload_is_refused_and_over_at_once(tiny_llama: Path, tmp_path: Path) -> None:
    words = ("--seconds", "15", "--max-in-flight", "64", "--keys")

    found = verdict("overload", tiny_llama, tmp_path, *words)

    rows = {each["part"]: each for each in found["rows"]}
    assert rows["overload"]["refused"] > rows["overload"]["served"] > 0
    # A client that asks for little is refused less than one that asks for far too much.
    greedy, modest = rows["- greedy client"], rows["- modest client"]
    assert modest["refused"] / modest["sent"] < greedy["refused"] / greedy["sent"]
    assert rows["after"]["served"] > rows["after"]["refused"]
