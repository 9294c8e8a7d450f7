"""The pair of stock instances that hand KV over by NIXL."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.bench.modes.builders import HEAD, cell, results
from vllm_tetri.bench.modes import command, nixl, systems
from vllm_tetri.bench.modes.cells import Raw
from vllm_tetri.bench.modes.report import markdown
from vllm_tetri.bench.modes.simulated import Profiles, beside
from vllm_tetri.bench.modes.systems import NIXL, REPLICAS, SYSTEMS, Site, serving
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.sim.cost.profiles import Profile
from vllm_tetri.types import StepCoefficients

METRICS = b"""# HELP vllm:nixl_bytes_transferred Histogram of bytes transferred
vllm:nixl_bytes_transferred_bucket{engine="0",le="2048.0",model_name="a b"} 0.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="a b"} %s
vllm:nixl_num_failed_transfers_total{engine="0",model_name="a b"} 3.0
"""


class FakeServer:
    """Notes how it was started."""

    started: list[FakeServer]

    def __init__(
        self,
        words: Sequence[str],
        cores: Sequence[int],
        log: Path,
        variables: Mapping[str, str] | None,
    ) -> None:
        self.words, self.cores, self.log, self.variables = words, cores, log, variables
        self.pid = 100 + len(self.started)
        self.url = f"http://server-{len(self.started)}"
        self.started.append(self)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.started.remove(self)


class Started:
    """Everything that was started for the pair."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.servers: list[FakeServer] = []
        self.router: Sequence[str] = ()
        self.put_back: list[tuple[int, Sequence[int]]] = []
        self.read: list[str] = []
        patch.setattr(FakeServer, "started", self.servers, raising=False)
        patch.setattr(systems, "Server", FakeServer)
        patch.setattr(systems, "_child", self._child)
        patch.setattr(systems, "_answers", lambda *_: True)
        patch.setattr(systems, "_has_models", lambda *_: True)
        patch.setattr(nixl, "put_back", lambda pid, cores: self.put_back.append((pid, cores)))
        patch.setattr(nixl, "require_read", self.read.append)

    @contextmanager
    def _child(self, words: Sequence[str], *_: Any) -> Iterator[SimpleNamespace]:
        self.router = words
        yield SimpleNamespace(poll=lambda: None)

    def after(self, word: str) -> str:
        return self.router[self.router.index(word) + 1]


def site(folder: Path) -> Site:
    return Site("/models/m", ["--dtype", "float32"], (4, 5, 6, 7), "/bin/vllm-router", folder)


def test_the_pair_halves_everything_and_only_one_has_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    started = Started(monkeypatch)
    with serving(SYSTEMS[NIXL], site(tmp_path)):
        prefill, decode = started.servers
        told = [
            json.loads(each.words[each.words.index("--kv-transfer-config") + 1])
            for each in (prefill, decode)
        ]
        assert [each["kv_role"] for each in told] == ["kv_producer", "kv_consumer"]
        assert {each["kv_connector"] for each in told} == {"NixlConnector"}
        assert (prefill.cores, decode.cores) == ((4, 5), (6, 7))
        ports = []
        for each in (prefill, decode):
            assert each.words[0] == "/models/m"
            assert each.words[each.words.index("--kv-cache-memory-bytes") + 1] == str(1 << 29)
            assert each.words[each.words.index("--max-num-seqs") + 1] == "64"
            assert each.words[-2:] == ["--dtype", "float32"]
            assert each.variables is not None
            assert each.variables["UCX_TLS"].startswith("sm,")
            ports.append(int(each.variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]))
        assert ports[0] != ports[1]
        assert started.put_back == [(prefill.pid, (4, 5)), (decode.pid, (6, 7))]
        assert "--vllm-pd-disaggregation" in started.router
        assert started.after("--prefill") == prefill.url
        assert started.after("--decode") == decode.url
        assert started.read == [decode.url]
    assert started.servers == []


def test_what_the_user_says_of_ucx_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert nixl.environment(5)["UCX_TLS"] == "tcp"


def test_replicas_are_started_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = Started(monkeypatch)
    with serving(SYSTEMS[REPLICAS], site(tmp_path)):
        assert [each.cores for each in started.servers] == [(4, 5), (6, 7)]
        assert not any("--kv-transfer-config" in each.words for each in started.servers)
        at = started.router.index("--worker-urls")
        assert list(started.router[at + 1 : at + 3]) == [each.url for each in started.servers]
        assert started.put_back == started.read == []


def test_reads_of_kv_are_found_in_metrics() -> None:
    assert nixl.has_read(METRICS.replace(b"%s", b"2.0"))
    assert not nixl.has_read(METRICS.replace(b"%s", b"0.0"))
    assert not nixl.has_read(b"vllm:num_requests_running 1.0\n")


def test_a_pair_that_hands_nothing_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_READ_WITHIN_S", 0.0)
    with pytest.raises(UnsupportedError, match="read no KV"):
        nixl.require_read("http://127.0.0.1:9")  # nobody there


MOVES = """
import os, sys, threading
os.sched_setaffinity(0, [int(sys.argv[1])])
threading.Thread(target=sys.stdin.read).start()
print("ready", flush=True)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_that_went_elsewhere_come_back() -> None:
    given, other = sorted(os.sched_getaffinity(0))[:2]
    words = [sys.executable, "-c", MOVES, str(other)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        tasks = [int(each.name) for each in Path(f"/proc/{child.pid}/task").iterdir()]
        assert len(tasks) == 2
        assert {tuple(os.sched_getaffinity(each)) for each in tasks} == {(other,)}

        nixl.put_back(child.pid, [given])

        assert {tuple(os.sched_getaffinity(each)) for each in tasks} == {(given,)}


def test_a_process_that_has_ended_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    nixl.put_back(child.pid, [0])


# -- who may be asked --------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"), [([], "--rival"), (["--rival", sys.executable], "PYTHONPATH=FOLDER")]
)
def test_the_pair_says_what_it_lacks(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    refuses: Callable[[list[str], str], None],
) -> None:
    monkeypatch.setattr(nixl, "available", lambda: False)
    refuses(["modes", "model", "--systems", "stock,nixl", *words], message)


def test_without_nixl_all_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    options = argparse.Namespace(systems=None, rival="/bin/vllm-router")
    monkeypatch.setattr(nixl, "available", lambda: False)
    found = command._systems(options, Console(file=told, width=500))
    assert NIXL not in found
    assert REPLICAS in found
    assert told.getvalue().startswith("nixl: left out, it needs the Python package nixl")
    monkeypatch.setattr(nixl, "available", lambda: True)
    assert NIXL in command._systems(options, Console(file=told))


# -- what is made of it ------------------------------------------------------------


def test_a_report_with_the_pair_says_what_it_is() -> None:
    made = cell(NIXL)
    assert nixl.CAVEAT in markdown(Raw(HEAD, {made.key: made}), results(made))
    others = cell("stock")
    assert nixl.CAVEAT not in markdown(Raw(HEAD, {others.key: others}), results(others))


def test_the_simulator_has_no_such_pair() -> None:
    known = Profile("test", StepCoefficients(base_s=0.01), "a test", is_estimate=False)
    assert beside([cell(NIXL)], Profiles(known, known)) == []
