"""Systems, whole runs on a fake fleet, and one real run."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.bench.flip.builders import SWING, results, row
from vllm_tetri import cli
from vllm_tetri.bench.arrivals import Answered, Arrival, Kind
from vllm_tetri.bench.fleet import Member
from vllm_tetri.bench.flip import command as flip
from vllm_tetri.bench.flip import report as flip_report
from vllm_tetri.bench.flip import times as flip_times
from vllm_tetri.bench.flip.command import Load, kinds_of, moves, systems
from vllm_tetri.bench.pace import Counts
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.types import Role


def test_every_split_is_a_system_and_policies_start_from_the_most_even_one() -> None:
    found = systems(3)
    assert list(found) == ["1P2D", "2P1D", "idle", "threshold", "balance"]
    assert {each.name: (each.prefills, each.flip) for each in found.values()} == {
        "1P2D": (1, "off"),
        "2P1D": (2, "off"),
        **{name: (2, name) for name in flip.POLICIES},
    }
    assert systems(4)["balance"].prefills == 2


def test_a_swing_begins_with_the_other_kind_in_every_other_repeat() -> None:
    assert kinds_of(Load.SWING, 4, 0) == SWING
    assert kinds_of(Load.SWING, 3, 1) == [Kind.CONVERSATION, Kind.CODE, Kind.CONVERSATION]
    assert kinds_of(Load.CONVERSATION, 2, 1) == [Kind.CONVERSATION] * 2


@pytest.mark.parametrize(
    ("prefills", "expected"),
    [
        (0, [("a", Role.DECODE), ("b", Role.DECODE)]),
        (1, [("b", Role.DECODE)]),
        (2, []),
        (3, [("c", Role.PREFILL)]),
        (4, [("c", Role.PREFILL), ("d", Role.PREFILL)]),
    ],
)
def test_roles_are_set_by_the_fewest_flips(prefills: int, expected: list[Any]) -> None:
    roles = {"a": "prefill", "c": "decode", "b": "prefill", "d": "decode"}
    assert moves(roles, prefills) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["--instances", "2"],
        ["--phase", "0"],
        ["--phases", "0"],
        ["--rates", "1"],
        ["--rates", "1,0"],
        ["--longest", "1"],
        ["--longest-prompt", "4000"],
        ["--kv-tokens", "100"],
        ["--flip-after", "0"],
        ["--slo-ttft", "0"],
        ["--slo-tpot", "0"],
        ["--systems", "3P0D"],
        ["--loads", "none"],
        ["--code", "nowhere.csv"],
        ["--conversation", "nowhere.csv"],
        ["--scale", "0"],
        ["--repeats", "0"],
    ],
)
def test_wrong_values_are_refused_before_an_instance_starts(
    words: list[str], refuses: Callable[[list[str], str], None]
) -> None:
    refuses(["flip", "model", *words], words[0])


class FakeFleet:
    """Instances that only remember their roles, and what they were told."""

    said: list[str]
    roles: dict[str, str]
    served_name, url = "model", ""

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self).said = []

    def start(self, members: list[Member]) -> None:
        self.roles = {each.name: each.role for each in members}

    def restart_router(self, options: list[str]) -> None:
        self.said.append(" ".join(options))

    def flip(self, name: str, role: str, *, now: bool = False) -> dict[str, Any]:
        source, self.roles[name] = self.roles[name], role
        times = {"drain_s": 0.0 if now else 0.2, "commit_s": 0.001}
        return {"flip": {"source": source, "target": role, **times}}

    def instances(self) -> dict[str, dict[str, Any]]:
        return {name: {**row(role), "flip": None} for name, role in self.roles.items()}

    def at_rest(self) -> dict[str, dict[str, Any]]:
        self.said.append("".join(sorted(role[0] for role in self.roles.values())))
        return self.instances()

    def clear_counts(self) -> None:
        pass

    def counts(self) -> dict[str, Counts]:
        return {name: Counts(paced_s=1.0) for name in self.roles}

    def __enter__(self) -> FakeFleet:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run it with a fake fleet that breaks after so many sendings; returns the JSON."""
    pytest.importorskip("matplotlib")

    def run(*words: str, sendings: int = 1000) -> dict[str, Any]:
        left = iter(range(sendings))

        def send(_: str, asks: list[Arrival], *__: Any, **___: Any) -> list[Answered]:
            if next(left, None) is None:
                raise UnsupportedError("broken")
            return [Answered(each, 0.5, 1.0) for each in asks]

        monkeypatch.setattr("vllm_tetri.bench.flip.command.Fleet", FakeFleet)
        monkeypatch.setattr("vllm_tetri.bench.setting.require_vllm", lambda: None)
        monkeypatch.setattr("vllm_tetri.bench.arrivals.send", send)
        parser = argparse.ArgumentParser()
        flip.add_arguments(parser)
        own = ["--output", str(tmp_path), "--timing", "0"]
        options = parser.parse_args(["model", *own, *words])
        options.tail = []
        with contextlib.suppress(UnsupportedError):
            flip.run(options)
        found: dict[str, Any] = json.loads((tmp_path / "flip.json").read_text())
        return found["loads"]

    return run


def test_every_system_gets_the_same_requests_from_its_own_split(bench: Any) -> None:
    found = bench("--loads", "swing", "--repeats", "2", "--flip-after", "20")
    assert sorted(found["swing"]) == sorted(systems(3))
    for repeat in range(2):
        assert len({runs[repeat]["overall"]["requests"] for runs in found["swing"].values()}) == 1
        for name, runs in found["swing"].items():
            assert len(runs) == 2
            assert runs[repeat]["timeline"]["prefill"][0] == (1 if name == "1P2D" else 2)
    assert FakeFleet.said.count("--flip idle --flip-after 10.0") == 2
    assert FakeFleet.said.count("--flip balance --flip-after 10.0") == 2


def test_a_broken_off_run_keeps_what_it_had_and_goes_on(bench: Any) -> None:
    words = ("--loads", "code", "--systems", "2P1D,balance", "--repeats", "2")
    begun = bench(*words, sendings=2 + 3)  # two to warm up
    assert sorted(len(runs) for runs in begun["code"].values()) == [1, 2]
    whole = bench(*words, "--add")
    assert [len(runs) for runs in whole["code"].values()] == [2, 2]
    FakeFleet.said = []
    assert bench(*words, "--add") == whole
    assert FakeFleet.said == []


def flipping_fleet() -> Any:
    cluster = FakeFleet()
    roles = [Role.DECODE, Role.PREFILL, Role.PREFILL]
    cluster.start([Member(f"i{place}", role) for place, role in enumerate(roles)])
    return cluster


def test_flips_are_timed_as_long_as_requests_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flip_times, "_PAUSE_S", 0.001)
    times = flip_times.time_flips(flipping_fleet(), lambda: time.sleep(0.3))
    assert len(times) > 10
    assert {each.source for each in times} == {"prefill", "decode"}
    assert [each.drain_s > 0 for each in times[:4]] == [True, True, False, False]
    console = Console(width=150)
    with console.capture() as shown:
        flip_report.show(console, {**results(), "timing": [asdict(each) for each in times]})
    assert re.search(r"from decode, at once.* 1\.00 ", shown.get())


def test_a_request_that_fails_while_roles_flip_is_an_error() -> None:
    def send() -> None:
        raise UnsupportedError("HTTP 503")

    with pytest.raises(UnsupportedError, match="HTTP 503"):
        flip_times.time_flips(flipping_fleet(), send)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run(tiny_llama: Path, tmp_path: Path) -> None:
    words = ["--phase", "6", "--phases", "2", "--repeats", "1", "--scale", "0.5"]
    words += ["--systems", "1P2D,balance", "--loads", "swing", "--output", str(tmp_path)]
    words += ["--longest-prompt", "500", "--longest", "32", "--timing", "12"]
    assert cli.main(["bench", "flip", str(tiny_llama), *words]) == 0
    found = json.loads((tmp_path / "flip.json").read_text())
    counts = {runs[0]["overall"]["requests"] for runs in found["loads"]["swing"].values()}
    assert len(counts) == 1
    assert counts != {0}
    assert (tmp_path / "flip.svg").stat().st_size
    assert found["timing"]
