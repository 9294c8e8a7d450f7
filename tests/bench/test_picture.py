"""Pictures change only when their numbers do."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tetri.bench import picture
from vllm_tetri.errors import UnsupportedError


def drawn(path: Path, top: int = 3) -> bytes:
    figure, axes = picture.new("A title", columns=2)
    assert len(axes) == 2
    axes[0].plot([1, 2], [1, top])
    picture.save(figure, path)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_equal_numbers_give_equal_files(tmp_path: Path, suffix: str) -> None:
    first = drawn(tmp_path / f"a{suffix}")
    assert drawn(tmp_path / f"b{suffix}") == first
    assert drawn(tmp_path / f"c{suffix}", top=4) != first


def test_svg_keeps_its_text_and_has_no_date(tmp_path: Path) -> None:
    text = drawn(tmp_path / "a.svg").decode()
    assert "A title" in text
    assert "dc:date" not in text


def test_rows_and_columns() -> None:
    assert len(picture.new("x", 3, rows=2)[1]) == 6


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"\.svg or \.png"):
        picture.save(picture.new("x")[0], tmp_path / "a.pdf")
