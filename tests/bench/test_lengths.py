"""Lengths of prompts, from files and drawn."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from vllm_tetri.bench.lengths import LONGEST_TOKENS, drawn_lengths, read_lengths, sample
from vllm_tetri.errors import ConfigError


def test_one_number_per_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("3\n\n15\n8\n")
    assert read_lengths(path) == [3, 15, 8]


@pytest.mark.parametrize("name", ["num_prefill_tokens", "ContextTokens", "input_length"])
def test_the_column_of_prompt_lengths_is_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(f"when,{name},out\n0.5,74,918\n0.7,290,905\n")
    assert read_lengths(path) == [74, 290]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no lengths"),
        ("num_prefill_tokens\n", "no lengths"),
        ("5\n-3\n", "line 2: '-3'"),
        ("5\n0\n", "line 2: '0'"),
        ("5\n7.5\n", "line 2: '7.5'"),
        ("num_prefill_tokens,x\n5,1\n,2\n", "line 3: ''"),
        ("num_prefill_tokens\n5\nnan\n", "line 3: 'nan'"),
        ("words,more\n1,2\n", "no column of prompt lengths among words, more"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_lengths(path)
    assert str(error.value).startswith(f"--lengths {path}")
    assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_what_cannot_be_read_is_one_clear_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "lengths.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_lengths(path)
    assert "\n" not in str(error.value)


def test_samples_are_scaled_and_fit_the_window() -> None:
    found = sample([10, 100, 1000], 3, Random(0), scale=0.5, longest=300)
    assert sorted(found) == [5, 50, 300]


def test_a_short_file_is_drawn_from_again() -> None:
    assert sample([7], 4, Random(0), scale=0.01, longest=300) == [1, 1, 1, 1]


def test_drawn_lengths_are_many_short_and_few_long_ones() -> None:
    found = sorted(drawn_lengths(2000, Random(0)))
    assert found[0] >= 1
    assert found[-1] == LONGEST_TOKENS
    assert 180 < found[1000] < 220
    assert drawn_lengths(5, Random(1)) == drawn_lengths(5, Random(1))
