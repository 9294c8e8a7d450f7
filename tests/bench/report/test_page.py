"""The page: what is on it, and what is said of what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench.report.builders import PACES, cells
from vllm_tetri import cli
from vllm_tetri.bench.report.load import load
from vllm_tetri.bench.suite.experiments import EXPERIMENTS
from vllm_tetri.errors import ConfigError


def page(folder: Path) -> tuple[str, str]:
    assert cli.main(["bench", "report", str(folder)]) == 0
    return (folder / "report.html").read_text(), (folder / "report.md").read_text()


def test_the_page_is_whole_and_needs_nothing_else(folder: Path) -> None:
    text, _ = page(folder)
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    tags = [each.tag.rpartition("}")[2] for each in root.iter()]
    assert not {"script", "link", "img", "iframe", "object"} & set(tags)
    for each in root.iter():
        for name, held in each.attrib.items():
            if name.rpartition("}")[2] in ("href", "src"):
                assert held.startswith("#")
    assert not re.search(r"url\((?!#)|@import|<b>", text)
    names = [each.attrib["id"] for each in root.iter() if "id" in each.attrib]
    assert len(set(names)) == len(names)
    used = {held[1:] for e in root.iter() for n, held in e.attrib.items() if n.endswith("href")}
    assert used <= set(names)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_every_experiment_is_there_and_what_is_missing_says_how_to_run_it(folder: Path) -> None:
    for text in page(folder):
        for each in EXPERIMENTS.values():
            assert each.title in text
            assert each.figures in text or each.figures.capitalize() in text
        assert f"vllm-tetri bench suite MODEL --output {folder} --only e3 --predictor ..." in text
        assert "not run" in text
        assert "Where disaggregation loses" in text
        assert "roce: -40 %" in text


def test_what_cannot_be_read_is_said_and_stops_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, plain = page(folder)
    shown = capsys.readouterr().out
    for job in ("dispatch", "admission"):
        assert f"{job} is left out" in shown
        assert f"{job}: unreadable" in plain
    assert "no 'systems'" in plain
    assert "saturation.svg" in text  # why it is not shown


def test_a_rival_that_was_not_run_is_named(folder: Path) -> None:
    for text in page(folder):
        assert text.count("vllm-router (") == 1
        assert "Without the rival, vllm-router." in text
    cells(folder, paces={**PACES, "replicas": (0.1, 30_000)})
    for text in page(folder):
        assert "vllm-router" not in text


def test_markdown_names_pictures_where_they_are(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "elsewhere" / "page.html"
    assert cli.main(["bench", "report", str(folder), "--output", str(output)]) == 0
    text = (output.parent / "page.md").read_text()
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert "../suite/order/order.svg" in pictures
    assert "page-e2.svg" in pictures
    assert all((output.parent / each).exists() for each in pictures)


def test_equal_results_make_equal_pages(folder: Path) -> None:
    assert page(folder) == page(folder)


def test_an_empty_folder_is_all_not_run(tmp_path: Path) -> None:
    _, text = page(tmp_path)
    assert "Nothing to compare was run." in text
    assert text.count("not run. Run it with") >= len(EXPERIMENTS)


def test_a_missing_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "bench suite" in error
    assert error.count("\n") == 1


def test_a_failed_job_says_where_its_words_are(folder: Path) -> None:
    job = {"command": [], "status": "failed", "exit_status": 3, "took_s": 1.0, "finished": "now"}
    record = {"format": 1, "conditions": {"variant": "quick", "model": "m"}, "jobs": {"flip": job}}
    (folder / "suite.json").write_text(json.dumps(record))
    _, text = page(folder)
    assert f"failed (exit status 3), see `{folder}/flip/output.log`" in text
    assert f"vllm-tetri bench suite m --quick --output {folder} --only e9" in text
    (folder / "suite.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"suite\.json"):
        load(folder)
