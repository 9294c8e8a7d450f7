"""Text and pictures on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.report.builders import SVG
from vllm_tetri.bench.report.document import Document, Folded, Heading, Items, Table, Text
from vllm_tetri.bench.report.html import html
from vllm_tetri.bench.report.markdown import markdown
from vllm_tetri.bench.report.svg import SvgError, inline


def test_pictures_lose_what_belongs_to_files(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    path.write_text(SVG)
    found = inline(path, "p7-")
    assert found.startswith("<svg")
    assert "metadata" not in found
    assert 'id="p7-m1"' in found
    assert 'href="#p7-m1"' in found
    assert "url(#p7-c1)" in found
    assert 'width="' not in found
    assert 'viewBox="0 0 10 5"' in found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<svg",
        "<html></html>",
        '<svg><image href="http://x/y.png"/></svg>',
        "<svg><script>1</script></svg>",
        '<svg><path style="fill: url(http://x)"/></svg>',
        '<svg><path onclick="f()"/></svg>',
        "<svg onload = 'f()'></svg>",
        '<svg><style>@import "x.css";</style></svg>',
        '<svg><a target="javascript:f()"/></svg>',
    ],
)
def test_other_pictures_are_not_taken(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.svg"
    path.write_text(text)
    with pytest.raises(SvgError, match=r"a\.svg"):
        inline(path, "p")


def test_text_is_escaped_and_marked_up() -> None:
    made = Document(
        "a < b",
        [
            Heading(2, "h", "h"), Text("`x<y>` and *this*, [there](#h)"), Items(["1", "2"]),
            Table(["a|b", "n"], [["x|y", "1"]]), Folded("long", Table(["c"], [["d"]])),
        ],
    )  # fmt: skip
    text = html(made)
    assert "<title>a &lt; b</title>" in text
    assert '<code>x&lt;y&gt;</code> and <em>this</em>, <a href="#h">there</a>' in text
    assert '<td class="n">1</td>' in text
    assert "<details><summary>long</summary>" in text
    stars = html(Document("t", [Text("`a*b` and `c*d`, *so*")]))
    assert "<p><code>a*b</code> and <code>c*d</code>, <em>so</em></p>" in stars
    plain = markdown(made, Path())
    assert "| a\\|b | n |\n| --- | --: |\n| x\\|y | 1 |" in plain
    assert "- 1\n- 2" in plain
