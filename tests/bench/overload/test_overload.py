"""What an overload makes of what it sees."""

from __future__ import annotations

import argparse
import json
import stat
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from vllm_tetri.bench.overload import command
from vllm_tetri.bench.overload.figures import (
    Row,
    back_s,
    promise_of_lives,
    promises_of_answers,
    promises_of_memory,
    row,
)
from vllm_tetri.bench.overload.report import plain, show
from vllm_tetri.bench.overload.run import Plan, Sample, Seen, arrivals, capacity_of
from vllm_tetri.bench.overload.turn import End, Played, Reply, poisson
from vllm_tetri.bench.soak.usage import Usage
from vllm_tetri.errors import ConfigError, UnsupportedError

MIB = 1 << 20


def served(at_s: float, first_s: float = 0.1, done_s: float = 1.0, whose: int = 0) -> Reply:
    return Reply(End.SERVED, at_s, 0.0, first_s, done_s, whose=whose)


def refused(at_s: float, whose: int = 0) -> Reply:
    return Reply(End.REFUSED, at_s, 0.0, 0.0, 0.01, retry_after_s=2, whose=whose)


def bad(at_s: float) -> Reply:
    return Reply(End.BAD, at_s, 0.0, 0.0, 0.01, words="500 oops")


def usage(size_mib: float, processes: int = 2) -> Usage:
    return Usage(0.0, processes, round(size_mib * MIB), 10, 10, 0)


def plan(**more: Any) -> Plan:
    return Plan(
        **{
            "times": 10.0,
            "seconds": 60.0,
            "clients": 4,
            "prompt_tokens": 5,
            "answer_tokens": 3,
            "keys": [],
            "seed": 0,
            **more,
        }
    )


# -- arrivals ----------------------------------------------------------------------


def test_poisson_arrivals_have_their_rate_and_window() -> None:
    found = poisson(50.0, 10.0, 110.0, Random(1))
    assert found == sorted(found)
    assert found[0] >= 10.0
    assert found[-1] < 110.0
    assert len(found) == pytest.approx(5000, rel=0.1)


@pytest.mark.parametrize("keys", [[], ["a", "b"]])
def test_load_falls_to_normal_at_once(keys: list[str]) -> None:
    found = arrivals(plan(keys=keys), 10.0, Random(2))
    assert found == sorted(found)
    before = sum(at_s < 60.0 for at_s, _ in found) / 60.0
    after = sum(at_s >= 60.0 for at_s, _ in found) / 20.0
    assert before == pytest.approx(100.0, rel=0.1)
    assert after == pytest.approx(5.0, rel=0.4)
    modest = [at_s for at_s, whose in found if whose == 1]
    assert len(modest) == pytest.approx(160 if keys else 0, rel=0.4)


# -- figures -----------------------------------------------------------------------


def test_a_row_counts_what_was_due_and_what_ended_within() -> None:
    replies = [
        served(-0.5, done_s=1.0),  # asked before, ends within
        served(1.0, first_s=0.2, done_s=2.0),
        served(2.0, first_s=0.4, done_s=20.0),  # ends later
        refused(3.0),
        bad(4.0),
        served(10.0),
    ]
    found = row("x", replies, 0.0, 10.0)
    assert (found.sent, found.served, found.refused, found.bad) == (4, 2, 1, 1)
    assert found.served_per_s == pytest.approx(0.2)
    assert found.first_p50_s == pytest.approx(0.3)
    assert found.done_p99_s == pytest.approx(20.0, rel=0.02)
    assert (found.refusal_p50_s, found.again_p50_s) == (0.01, 2)


def test_service_is_back_behind_the_last_request_that_was_not_served_as_usual() -> None:
    fine = [served(at_s) for at_s in (20.5, 22.0, 25.0, 30.0, 39.0)]

    def back(*others: Reply) -> float | None:
        return back_s([*others, *fine], 20.0, 40.0, normal_s=0.2)

    assert back() == 0.0
    assert back(served(10.0, first_s=9.0), refused(19.0)) == 0.0  # were the overload's
    assert back(refused(21.0), served(23.0, first_s=0.3)) == pytest.approx(3.0)
    assert back(bad(21.0)) == pytest.approx(1.0)
    assert back(refused(36.0)) is None  # what came behind it is too little to tell
    assert back_s([refused(21.0)], 20.0, 40.0, normal_s=0.2) is None


def kept(found: list[Any]) -> list[bool | None]:
    return [each.is_kept for each in found]


def overload_row(served_per_s: float) -> Row:
    return Row("overload", 60.0, 600, 60, 540, 0, served_per_s, *[0.0] * 7)


def test_promises_of_answers() -> None:
    replies = [served(1.0), refused(2.0)]
    assert (
        kept(promises_of_answers(replies, overload_row(8.0), 10.0, 5.0, num_after=9)) == [True] * 3
    )
    broken = promises_of_answers([*replies, bad(3.0)], overload_row(7.9), 10.0, 5.1, num_after=9)
    assert kept(broken) == [False] * 3
    assert broken[1].found == "7.90 a second, 0.79 of 10.00"
    late = promises_of_answers(replies, overload_row(8.0), 10.0, None, num_after=9)
    assert late[2].is_kept is False
    unseen = promises_of_answers(replies, overload_row(8.0), 10.0, 0.0, num_after=0)
    assert kept(unseen) == [True, True, None]


@pytest.mark.parametrize(
    ("sizes", "is_kept"),
    [
        ([110, 200, 210, 205], True),
        ([110, 200, 229, 205], False),  # too much
        ([110, 150, 190, 160], False),  # more, the longer it lasts
    ],
)
def test_memory_is_bounded_by_a_limit_and_does_not_grow(sizes: list[int], is_kept: bool) -> None:
    during = [{"router": usage(size)} for size in sizes]
    (found,) = promises_of_memory({"router": usage(100)}, during)
    assert (found.text, found.is_kept) == ("memory of router is bounded", is_kept)
    assert kept(promises_of_memory({"router": usage(100)}, during[:1])) == [None]


def test_a_large_process_may_take_half_more() -> None:
    during = [{"decode-0": usage(1490)}] * 4
    assert kept(promises_of_memory({"decode-0": usage(1000)}, during)) == [True]


def test_who_has_fewer_processes_than_before_has_died() -> None:
    before = {"router": usage(1), "decode-0": usage(1)}
    assert promise_of_lives(before, [before, before]).is_kept
    assert promise_of_lives(before, []).is_kept is None
    for during in ({"router": usage(1)}, {**before, "decode-0": usage(1, processes=1)}):
        found = promise_of_lives(before, [before, during])
        assert (found.is_kept, found.found) == (False, "decode-0")


def played(*replies: Reply) -> Played:
    return Played(list(replies), 1000.0, 100.0, 5.0)


def test_capacity_is_what_ended_behind_the_ramp() -> None:
    found = played(*(served(at_s / 2) for at_s in range(40)))
    assert capacity_of(found) == pytest.approx(2.0)
    with pytest.raises(UnsupportedError, match="no request ended"):
        capacity_of(played(served(1.0, done_s=100.0)))
    with pytest.raises(UnsupportedError, match="1 requests were not served: 500 oops"):
        capacity_of(played(served(6.0), bad(7.0)))


# -- what is shown -----------------------------------------------------------------


def seen(**more: Any) -> Seen:
    rest = Sample(990.0, {"router": usage(100)}, {})
    samples = [Sample(1000.0 + at_s, {"router": usage(101)}, {}) for at_s in range(80)]
    overloaded = [refused(at_s / 10) for at_s in range(600)]
    overloaded += [served(at_s / 2, whose=at_s % 2) for at_s in range(160)]
    return Seen(
        **{
            "capacity": 2.0,
            "closed": played(*(served(at_s / 2) for at_s in range(40))),
            "normal": played(*(served(float(at_s)) for at_s in range(20))),
            "overload": played(*sorted(overloaded, key=lambda each: each.at_s)),
            "rest": rest,
            "samples": samples,
            **more,
        }
    )


@pytest.mark.parametrize("keys", [[], ["a", "b"]])
def test_tables_and_json_say_the_same(keys: list[str]) -> None:
    console = Console(width=200, record=True, quiet=False, file=None)
    with console.capture() as captured:
        assert show(console, plan(keys=keys), seen())
    text = captured.get()
    assert "BROKEN" not in text
    assert ("modest client" in text) == bool(keys)
    found = json.loads(json.dumps(plain(plan(keys=keys), seen(), {"model": "m"})))
    assert [each["is_kept"] for each in found["promises"]] == [True] * len(found["promises"])
    assert [each["name"] for each in found["rows"]][-1] == "after it"
    assert len(found["samples"]) == 80
    assert found["client"] == {"cores": 0.05, "longest_late_s": 0.0}


@pytest.mark.parametrize(
    "more",
    [
        {"unrested": ["decode-0: running 1"]},
        {"unended": ["process 1"]},
        {"overload": played(refused(0.0), served(1.0), refused(62.0), refused(79.0))},
        {"overload": played(bad(0.0), *(served(at_s / 2) for at_s in range(160)))},
    ],
)
def test_one_broken_promise_is_enough(more: dict[str, Any]) -> None:
    assert not show(Console(quiet=True), plan(), seen(**more))


# -- the command -------------------------------------------------------------------


def options(tmp_path: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    found = parser.parse_args(["m", "--output", str(tmp_path / "out"), *words])
    found.tail = ["--max-model-len", "2048"]
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("--times", "0.5"), ("--minutes", "0"), ("--answer", "1"), ("--decode", "0"),
        ("--max-in-flight", "0"), ("--ttft-slo", "-1"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_clear_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        command.run(options(tmp_path, *words))


def test_what_up_is_told(tmp_path: Path) -> None:
    given = options(tmp_path, "--ttft-slo", "2", "--max-in-flight", "9", "--keys")
    given.output.mkdir()
    words = command._words(given, command._write_keys(given.output, ["a", "b"]))
    text = " ".join(words)
    for part in (
        "--flip off", "--prefill 1 --decode 1", "--max-in-flight 9", "--ttft-slo 2.0 --refuse-late",
        "-- --max-model-len 2048",
    ):  # fmt: skip
        assert part in text
    path = Path(words[words.index("--api-key-file") + 1])
    assert path.read_text() == "a\nb\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
