"""The page docs/papers.md, made from docs/papers.toml: `python -m tests.papers` writes it."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PAGE, DATA = DOCS / "papers.md", DOCS / "papers.toml"
RESULTS = "examples/benchmarks/results"

# What a state means.
STATES = {
    "default": "serves unless options say otherwise",
    "option": "serves with the option named",
    "other way": "serves its purpose, but not as in the paper",
    "vLLM": "stock vLLM's own, used as it is",
    "simulator": "in virtual time only",
    "rival": "only in the simulated systems that ours is compared with",
    "experiment": "a way to measure: a script in `examples/`",
    "left out": "measured, and not kept",
    "not built": "for the reason given",
}

INTRODUCTION = f"""\
# What became of the papers

Mechanisms of papers on serving language models, in our words, each with its place in the code, a
test and a figure. § is the paper's own section. Modules are below `vllm_tetri/` if they do not
begin with `examples`, tests below `tests/`, raw results in `{RESULTS}/`. What serves
was tested on CPUs; what has run on a GPU is in [gpu.md](gpu.md#what-has-run-where).

"""
END = """\

`python -m tests.papers` writes this page from `docs/papers.toml`; `tests/test_papers.py` checks
that all that it names exists.
"""


def read() -> list[dict[str, Any]]:
    """Return the systems, each with its mechanisms."""
    systems: list[dict[str, Any]] = tomllib.loads(DATA.read_text())["system"]
    return systems


def page(systems: list[dict[str, Any]]) -> str:
    """Return docs/papers.md."""
    counts = Counter(each["state"] for system in systems for each in system["mechanism"])
    parts = [INTRODUCTION, "| state | meaning | mechanisms |\n| --- | --- | --: |\n"]
    parts += [f"| {name} | {words} | {counts[name]} |\n" for name, words in STATES.items()]
    parts.append(f"| all | of {len(systems)} systems | {counts.total()} |\n")
    for system in systems:
        parts.append(f"\n## {system['name']}\n\n<{system['paper']}>\n\n")
        parts.append("| mechanism | § | state | code | test | figure |\n")
        parts.append("| --- | --- | --- | --- | --- | --- |\n")
        parts += [f"| {' | '.join(_cells(each))} |\n" for each in system["mechanism"]]
    return "".join([*parts, END])


def _cells(row: dict[str, str]) -> list[str]:
    state = ": ".join(row[key] for key in ("state", "note") if key in row)
    code = row.get("code", "").removeprefix("vllm_tetri.")
    test = row.get("test", "").removeprefix("tests/")
    cells = [f"`{each}`" if each else "" for each in (code, test)]
    return [row["what"], row["section"], state, *cells, _link(row.get("figure", ""))]


def _link(figure: str) -> str:
    name = figure.partition(".")[0]
    target = figure if ".md" in figure else f"../{RESULTS}/{figure}"
    return f"[{name}]({target})" if figure else ""


if __name__ == "__main__":
    PAGE.write_text(page(read()))
