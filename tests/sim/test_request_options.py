"""`vllm-tetri sim`: links, arrivals and traces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_tetri import cli

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02}.5,{60 + second},4\n" for second in range(20)
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def row(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """The title, and what stands in the first row."""
    assert cli.main(["sim", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(line.strip() for line in lines if "of virtual time" in line)
    cells = next(line.strip() for line in lines if "P+1D" in line)
    return title, re.split(r"\s{2,}", cells)


def test_a_trace_says_how_many_and_when(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert row(["--trace", trace], capsys)[0] == "20 requests over 19 s of virtual time"
    quick = ["--trace", trace, "--trace-speed", "4", "--requests", "13"]
    assert row(quick, capsys)[0] == "13 requests over 3 s of virtual time"


def test_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--arrivals", "at-once", "--requests", "9", "--kind", "lpld"]

    assert row(words, capsys)[0] == "9 requests over 0 s of virtual time"


def test_a_slow_link_makes_answers_late_and_whole_requests_more_so(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = ["--trace", trace, "--chunk", "16"]
    slow = [*chunks, "--link", "0.02"]  # 46 KB a token: 18 ms

    jct = [
        int(row(words, capsys)[1][5])
        for words in (chunks, [*chunks, "--link", "nvlink"], slow, [*slow, "--send", "request"])
    ]

    assert jct[1] <= jct[0] < jct[2] < jct[3]


@pytest.mark.parametrize(
    "words",
    [
        ["--link", "fast"],
        ["--link", "0"],
        ["--arrivals", "gamma"],
        ["--arrivals", "gamma:0"],
        ["--trace", "none.csv"],
        ["--trace", "none.txt"],
        ["--trace-speed", "2"],
        ["--trace", "TRACE", "--trace-speed", "0"],
        ["--trace", "TRACE", "--requests", "0"],
        ["--trace", "TRACE", "--phases", "mixed:1:1"],
        ["--trace", "TRACE", "--arrivals", "at-once"],
        ["--phases", "mixed:1:1", "--arrivals", "at-once"],
        ["--requests", "0"],
    ],
)
def test_bad_input_is_one_line(
    words: list[str], trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sim", *(trace if word == "TRACE" else word for word in words)]) == 2

    assert capsys.readouterr().err.count("\n") == 1
