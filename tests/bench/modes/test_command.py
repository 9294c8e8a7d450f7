"""Whole runs on fake systems, and what is refused before one."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.bench.modes.builders import HEAD, LOAD
from tests.bench.modes.fake_server import Fake
from vllm_tetri import cli
from vllm_tetri.bench.modes import run as modes_run
from vllm_tetri.bench.modes.run import blocks
from vllm_tetri.bench.modes.systems import Site, System
from vllm_tetri.errors import UnsupportedError


class Systems:
    """Fake systems in a thread; one of them may be told to fail."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.broken = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._runner, self.url = self._run(Fake().start())

    @contextmanager
    def serving(self, system: System, _: Site) -> Iterator[str]:
        self.started.append(system.name)
        if system.name == self.broken:
            raise UnsupportedError(f"{system.name} did not start")
        yield self.url

    def close(self) -> None:
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Systems]:
    found = Systems()
    monkeypatch.setattr(modes_run, "serving", found.serving)
    monkeypatch.setattr(modes_run, "_REST_S", 0.0)
    monkeypatch.setattr(modes_run, "_SPEED_S", 0.01)
    monkeypatch.setattr(modes_run, "_AT_ONCE", 4)
    yield found
    found.close()


TWO = ["stock", "adaptive"]
STOCK_FIRST = next(
    seed for seed in count() if blocks(TWO, [LOAD], 1, seed, {})[0].system == "stock"
)


def ran(folder: Path, *more: str) -> int:
    words = ["bench", "modes", "model", "--output", str(folder), "--requests", "4"]
    words += ["--repeats", "1", "--classes", "lpld,swing", "--rates", "knee"]
    return cli.main([*words, "--systems", ",".join(TWO), "--seed", str(STOCK_FIRST), *more])


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    read = map(json.loads, (folder / "cells.jsonl").read_text().splitlines())
    return [each[kind] for each in read if kind in each]


def asked(found: list[dict[str, Any]]) -> dict[Any, Any]:
    """Times and lengths of every cell."""
    names = ("at_s", "prompt_tokens", "output_tokens")
    return {
        (each["system"], each["name"]): [[one[name] for name in names] for one in each["requests"]]
        for each in found
    }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_an_interrupted_run_goes_on_where_it_stopped(
    fakes: Systems, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.broken = "adaptive"
    assert ran(tmp_path) == 2
    before = lines(tmp_path, "cell")
    assert [each["system"] for each in before] == ["stock", "stock"]
    head = (tmp_path / "modes.json").read_text()
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"cell": {"system": "sto')  # cut off

    fakes.broken, fakes.started = "", []
    assert ran(tmp_path, "--add") == 0
    assert fakes.started == ["adaptive"]
    assert (tmp_path / "modes.json").read_text() == head
    found = lines(tmp_path, "cell")
    assert found[: len(before)] == before
    assert len(found) == 4
    schedules = asked(found)
    assert len(schedules) == 4
    for name in ("lpld", "swing"):
        assert schedules["stock", name] == schedules["adaptive", name]
    assert all(each["gflops"] for each in lines(tmp_path, "speed"))
    assert "1 repeat of everything" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "modes-itl-p99.svg").stat().st_size > 1000

    capsys.readouterr()
    assert ran(tmp_path, "--add", "--seed", "500") == 2
    assert f"seed {STOCK_FIRST}, not 500" in capsys.readouterr().err
    assert lines(tmp_path, "cell") == found

    (tmp_path / "report.md").unlink()
    assert cli.main(["bench", "modes", "--report", str(tmp_path), "--strict", "9,9"]) == 0
    assert "TTFT 9000 ms" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["model", "--systems", "stock,fastest"], "--systems"),
        (["model", "--systems", "replicas"], "--rival"),
        (["model", "--rival", "/nowhere/vllm-router"], "--rival"),
        (["model", "--classes", "tiny"], "--classes"),
        (["model", "--classes", "swing", "--rates", "light"], "--rates"),
        (["model", "--rates", "fast"], "--rates"),
        (["model", "--loose", "1"], "--loose"),
        (["model", "--strict", "1,0"], "--strict"),
        (["model", "--requests", "1"], "--requests"),
        (["model", "--repeats", "0"], "--repeats"),
        (["model", "--cores", "1"], "--cores"),
        (["model", "--", "--max-num-seqs", "9"], "--max-num-seqs"),
        (["model", "--", "--no-enable-prefix-caching"], "--enable-prefix-caching"),
        (["model", "--", "--kv-transfer-config", "{}"], "--kv-transfer-config"),
        (["--report", "nowhere"], "--report"),
        ([], "MODEL"),
    ],
)
def test_wrong_values_are_refused_before_an_engine_starts(
    words: list[str], option: str, refuses: Callable[[list[str], str], None]
) -> None:
    refuses(["modes", *words], option)


def test_a_broken_results_file_is_named(tmp_path: Path, refuses: Any) -> None:
    (tmp_path / "modes.json").write_text(json.dumps(HEAD))
    (tmp_path / "cells.jsonl").write_text('{"speed": {}}\n')
    refuses(["modes", "--report", str(tmp_path)], "cells.jsonl, line 1")
