"""Requests out of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tetri.errors import ConfigError
from vllm_tetri.sim.workload import draw, read_lengths, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-17 00:15:50.9951690,879,55
"""
MOONCAKE = """{"timestamp": 500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 500, "input_length": 7322, "output_length": 490, "hash_ids": []}

{"timestamp": 3536, "input_length": 22, "output_length": 1}
"""


def written(tmp_path: Path, text: str, suffix: str = ".csv") -> Path:
    path = tmp_path / f"trace{suffix}"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_azure_trace_has_dates(tmp_path: Path) -> None:
    first, second, third = read_trace(written(tmp_path, AZURE))

    assert first == (0.0, 374, 44)
    assert second[0] == pytest.approx(4.314579, abs=2e-6)
    assert third[0] == pytest.approx(second[0] + 6 * 3600, abs=2e-6)
    assert third[1:] == (879, 55)


@pytest.mark.parametrize(
    "times", [("7.5", "9"), ("2024-05-10T00:00:00+00:00", "2024-05-10 00:00:01.5Z")]
)
def test_times_may_be_seconds_or_have_a_zone(tmp_path: Path, times: tuple[str, str]) -> None:
    text = "GeneratedTokens,TIMESTAMP,ContextTokens,x\n" + "".join(f"3,{at},4,y\n" for at in times)

    assert read_trace(written(tmp_path, text)) == [(0.0, 4, 3), (1.5, 4, 3)]


def test_a_mooncake_trace_has_milliseconds(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, MOONCAKE, ".jsonl"))

    assert found == [(0.0, 6758, 500), (0.0, 7322, 490), (pytest.approx(3.036), 22, 1)]


CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ("", ".csv", "holds no requests"),
        ("TIMESTAMP,ContextTokens\n1,5\n", ".csv", "row 1: .*GeneratedTokens"),
        ("ContextTokens,GeneratedTokens\n1,5\n", ".csv", "row 1: .*TIMESTAMP"),
        (CSV + "1,5,0\n", ".csv", "row 1: .*begin at 1"),
        (CSV + "1,5,5\n2,-3,5\n", ".csv", "row 2: .*begin at 1"),
        (CSV + "1,5,2.5\n", ".csv", "row 1: .*2.5"),
        (CSV + f"1,5,{'9' * 5000}\n", ".csv", "row 1: "),
        (CSV + "1,5\n", ".csv", "row 1: wrong time or lengths"),
        (CSV + "monday,5,5\n", ".csv", "row 1: .*'monday'"),
        (CSV + "2,5,5\n3,5,5\n2.5,5,5\n", ".csv", "row 3: .*it is earlier"),
        ("", ".jsonl", "holds no requests"),
        ("[1]\n", ".jsonl", "row 1: wrong time or lengths"),
        ('{"timestamp": 1, "input_length": 3}\n', ".jsonl", "row 1: .*output_length"),
        ("{\n", ".jsonl", "row 1: .*Expecting"),
        (
            '{"timestamp": null, "input_length": 3, "output_length": 1}',
            ".jsonl",
            "row 1: wrong time or lengths",
        ),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', ".jsonl", "row 1: .*begin at"),
    ],
)
def test_a_wrong_trace_is_one_line_that_says_where(
    tmp_path: Path, text: str, suffix: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_trace(written(tmp_path, text, suffix))
    assert "\n" not in str(error.value)


def test_a_trace_that_is_not_there_or_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="utf-8"):
        read_trace(path)


# -- only lengths ------------------------------------------------------------------------


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, CSV + "x,70,8\ny,900,33\n")

    known = read_lengths(path)
    specs = draw("mixed", 100, 1.0, seed=0, known=known)

    assert known == [(70, 8), (900, 33)]
    assert {(each.prompt_tokens, each.output_tokens) for each in specs} == set(known)
