"""Runs the project's own tests and benchmarks as parts of a step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, name: str, *words: str, **environment: str) -> str:
    """Run a module of Python and return what it printed; AssertionError with the last line if it
    fails. The step's own limit ends it."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=False,
                              env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                              stdout=out, stderr=subprocess.STDOUT)  # fmt: skip
    printed = log.read_text(errors="replace")
    last = (printed.strip().splitlines() or ["nothing"])[-1]
    assert done.returncode == 0, f"{name} ended with {done.returncode}: {last}"
    return printed


def run_pytest(folder: Path, *words: str, **environment: str) -> dict[str, Any]:
    """Run tests of this tree; they use the package that this process would import, and no plugins
    but those that the project asks for."""
    plugins = ("-p", "xdist.plugin", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout")
    options = ("-q", "-o", "pythonpath=", "-p", "no:cacheprovider", *plugins)
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    output = run(folder, "pytest", "pytest", *options, *words, **environment)
    last = output.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", last)
    assert passed, f"no test ran: {last}"
    return {"passed": int(passed[1]), "summary": last.strip("= ")}


def transfers(folder: Path, *, is_small: bool) -> Any:
    """Rows of `examples.benchmarks.transfer`."""
    size = ("--total-mib", "4", "--repeats", "1") if is_small else ("--repeats", "5")
    result = folder / "transfer.json"
    run(folder, "transfer", "examples.benchmarks.transfer", *size, "--json", str(result))
    return json.loads(result.read_text())["rows"]


def benchmark(folder: Path, *words: str, serve: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run one of examples/benchmarks with options of `vllm serve`; `head` and `cells` of its result
    file."""
    name = "-".join(each for each in words[:2] if each[0].isalpha())
    output = folder / f"{name}.jsonl"
    files = ("--folder", str(folder), "--output", str(output))
    run(folder, name, f"examples.benchmarks.{words[0]}", *words[1:], *files, "--", *serve)
    head, *cells = map(json.loads, output.read_text().splitlines())
    assert cells, f"{name} measured nothing"
    return {**head, "cells": [each["cell"] for each in cells]}
