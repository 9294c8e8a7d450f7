"""Which version of the files that a job reads its result is of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_tetri.bench.suite.jobs import ANSWERS, MODEL, PREDICTOR, Job

Versions = dict[str, list[int]]
"""Size in bytes and time of the last change in ns, by path."""


def versions(job: Job, is_quick: bool, known: Mapping[str, str]) -> Versions:
    """Of all that its words name: a predictor's files, answers, a model's config.json.

    Nothing is known of a model that is no folder.
    """
    found = {}
    for placeholder in (MODEL, PREDICTOR, ANSWERS):
        if placeholder in job.variant(is_quick).words and placeholder in known:
            for path in _files(placeholder, Path(known[placeholder])):
                about = path.stat()
                found[str(path)] = [about.st_size, about.st_mtime_ns]
    return found


def _files(placeholder: str, path: Path) -> Iterator[Path]:
    if placeholder == MODEL:
        path /= "config.json"
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    yield from (each for each in inside if each.is_file())
