"""The site, the man pages, and what says how to cite the project."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from tests.installing import ROOT, run
from tests.needed import lacking, needed, require_command
from vllm_tetri import cli

NAMES = ["vllm-tetri", *(f"vllm-tetri-{each.name.replace(' ', '-')}" for each in cli.COMMANDS)]


def build(sources: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a copy of the sources below a folder."""
    needed("mkdocs")
    words = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder / "site"),
    ]
    return subprocess.run(
        words, cwd=sources, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(built: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"index", "CHANGELOG"}
    found = {path.stem: path.read_text() for path in (built / "site").glob("*.html")}
    assert pages <= set(found)
    loads = r"<(?:script|link|img|iframe)[^>]* (?:src|href)=[\"']?(?:https?:)?//[^>]*>"
    assert [name for name, text in found.items() if re.search(loads, text)] == []


def test_every_command_has_its_reference_and_man_page(built: Path) -> None:
    reference = (built / "site" / "commands.html").read_text()
    assert sorted(path.stem for path in (built / "man").glob("*.1")) == sorted(NAMES)
    for name, command in zip(NAMES[1:], cli.COMMANDS, strict=True):
        page = (built / "man" / f"{name}.1").read_text()
        assert command.summary.replace("-", r"\-") in page
        assert f'id="vllm-tetri-{name.removeprefix("vllm-tetri-")}"' in reference
    options = (built / "man" / "vllm-tetri-up.1").read_text()
    assert r"\-\-ready\-file" in options
    assert "--tetri-chunk-size" in reference


def test_groff_accepts_the_man_pages(built: Path) -> None:
    require_command("groff", "groff-base")
    for page in (built / "man").glob("*.1"):
        words = ["groff", "-man", "-ww", "-z", "-Tutf8", str(page)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stderr == ""


def test_a_link_to_a_missing_anchor_fails(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    names = ("docs", ".ci", "mkdocs.yml", "README.md", "CHANGELOG.md", "vllm_tetri")
    sources.mkdir()
    run("cp", "-r", *(str(ROOT / name) for name in names), str(sources))
    with (sources / "docs" / "modes.md").open("a") as page:
        page.write("\n[nothing](overview.md#nothing)\n")
    done = build(sources, tmp_path)
    assert done.returncode != 0
    assert "'#nothing'" in done.stderr


def test_the_citation_follows_its_schema() -> None:
    try:
        checker = metadata.distribution("cffconvert")
    except metadata.PackageNotFoundError:
        lacking("the Python package cffconvert", "run .ci/install")
    schema = checker.locate_file("cffconvert/schemas/1.2.0/schema.json")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    needed("jsonschema").validate(citation, json.loads(Path(str(schema)).read_text()))
    (paper,) = citation["references"]
    assert paper["url"] in (ROOT / "README.md").read_text()
