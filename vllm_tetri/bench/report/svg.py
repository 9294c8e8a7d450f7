"""Pictures inside a page: SVG files without what belongs to files only."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

_OUTSIDE = re.compile(
    r"""(?:href|src)\s*=\s*["'](?!#)|url\((?!["']?#)|@import"""
    r"""|<script|<foreignObject|javascript:|\son\w+\s*=\s*["']""",
    re.I,
)


class SvgError(ValueError):
    """A file is no picture that can be put into a page."""


def inline(path: Path, prefix: str) -> str:
    """The file's `<svg>`, as wide as the page lets it be.

    Args:
        prefix: Put before its ids, since several pictures share a page.

    Raises:
        SvgError: It is missing, no SVG, refers to something outside, or has a script.
    """
    try:
        text = path.read_text()
        ElementTree.fromstring(text)
    except (OSError, UnicodeDecodeError, ElementTree.ParseError) as error:
        raise SvgError(f"{path}: {error}") from error
    start = text.find("<svg")
    if start < 0:
        raise SvgError(f"{path}: there is no <svg> in it")
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[start:], flags=re.S)
    if _OUTSIDE.search(text):
        raise SvgError(f"{path}: it refers to something outside, or has a script")
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'href="#', f'href="#{prefix}', text)
    text = re.sub(r"url\(#", f"url(#{prefix}", text)
    head, end, rest = text.partition(">")
    return re.sub(r'\s(?:width|height)="[^"]*"', "", head) + end + rest.rstrip()
