"""A report as one HTML page that needs nothing else: no script, font or network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from itertools import count
from pathlib import Path

from vllm_tetri.bench.report.document import (
    Block,
    Document,
    Folded,
    Heading,
    Items,
    Picture,
    Table,
)
from vllm_tetri.bench.report.svg import SvgError, inline

# Pictures are drawn on white, so they keep a white ground in the dark, too.
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --ground: #fff; --soft: #f3f3f1;
  --line: #d5d5d2; --link: #0b6e99; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e2; --ground: #181a1b;
  --soft: #24272a; --line: #43474b; --link: #6cb8da; } }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: var(--ink);
  background: var(--ground); font: 1rem/1.5 system-ui, sans-serif; }
a { color: var(--link); }
h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
code { background: var(--soft); padding: 0 .25em; border-radius: 3px; font-size: .9em;
  overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { background: var(--soft); }
.n { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1rem 0; padding: .5rem; overflow-x: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 4px; color: #333; }
figure svg { display: block; width: 100%; min-width: 34rem; height: auto; }
figcaption { font-size: .85rem; }
details summary { cursor: pointer; color: var(--link); }
"""


def html(document: Document) -> str:
    """The page; it is well-formed XML as well."""
    numbers = count(1)
    title = escape(document.title)
    body = "\n".join(part for each in document.blocks for part in _block(each, numbers))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8" />\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
    )


def _block(block: Block, numbers: Iterator[int]) -> Iterator[str]:
    match block:
        case Heading(level, text, name):
            anchor = f' id="{escape(name)}"' if name else ""
            yield f"<h{level}{anchor}>{_inline(text)}</h{level}>"
        case Items(texts):
            yield "<ul>" + "".join(f"<li>{_inline(text)}</li>" for text in texts) + "</ul>"
        case Table():
            yield _table(block)
        case Picture(path, caption):
            yield _picture(path, caption, f"p{next(numbers)}-")
        case Folded(summary, table, is_open):
            shown = ' open="open"' if is_open else ""
            head = f"<summary>{_inline(summary)}</summary>"
            yield f"<details{shown}>{head}{_table(table)}</details>"
        case _:
            yield f"<p>{_inline(block.text)}</p>"


def _table(table: Table) -> str:
    heads = "".join(_cell("th", text, place, table) for place, text in enumerate(table.heads))
    rows = (
        "<tr>"
        + "".join(_cell("td", text, place, table) for place, text in enumerate(row))
        + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(tag: str, text: str, place: int, table: Table) -> str:
    kind = ' class="n"' if place >= table.num_text else ""
    return f"<{tag}{kind}>{_inline(text)}</{tag}>"


def _picture(path: Path, caption: str, prefix: str) -> str:
    try:
        drawing = inline(path, prefix)
    except SvgError as error:
        return f"<p>Not shown: {_inline(str(error))}</p>"
    return f"<figure>{drawing}<figcaption>{_inline(caption)}</figcaption></figure>"


def _inline(text: str) -> str:
    """Escaped; code in backquotes, emphasis in asterisks, links to headings."""
    parts = enumerate(re.split(r"`([^`]+)`", escape(text)))  # every other one is code
    return "".join(f"<code>{part}</code>" if place % 2 else _marked(part) for place, part in parts)


def _marked(text: str) -> str:
    text = re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)
    return re.sub(r"\[([^\]]+)\]\((#[\w-]+)\)", r'<a href="\2">\1</a>', text)
