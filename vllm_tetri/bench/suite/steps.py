"""What a suite still has to do, beside what it has done before."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from vllm_tetri.bench.suite.jobs import OUTPUT, RIVAL, Job
from vllm_tetri.bench.suite.record import Done, Record
from vllm_tetri.bench.suite.versions import Versions, versions


@dataclass(frozen=True, slots=True)
class Step:
    """A job that is to be run now.

    Attributes:
        command: Behind `vllm-tetri`.
        shown: The same wherever the output folder is.
        files: That it reads.
        seconds: How long it should take.
        is_anew: Whether an earlier result is of something else, and has to go.
    """

    job: Job
    command: list[str]
    shown: list[str]
    files: Versions
    seconds: float
    is_anew: bool = False


def about_rival(is_quick: bool, known: Mapping[str, str], jobs: Sequence[Job]) -> str:
    """A line where there is none for those that take one, or one for nobody."""
    takers = [job.name for job in jobs if RIVAL in job.variant(is_quick).words]
    if RIVAL in known and not takers:
        return "--rival has no effect with --quick" if is_quick else "--rival has no effect here"
    if RIVAL not in known and takers:
        return f"{', '.join(takers)}: without --rival, vllm-router is not among its systems"
    return ""


def missing(
    options: argparse.Namespace,
    known: Mapping[str, str],
    record: Record,
    jobs: Sequence[Job],
    console: Console,
) -> list[Step]:
    """What is to be run now; a line about everything else."""
    found = []
    for job in jobs:
        unknown = job.missing(options.quick, known)
        if unknown:
            needs = " and ".join("--" + name.strip("{}") for name in unknown)
            console.print(f"{job.name}: left out, it needs {needs}")
            continue
        folder = options.output / job.name
        shown = job.line(options.quick, {**known, OUTPUT: job.name}, options.tail)
        files = versions(job, options.quick, known)
        if record.is_done(job.name, shown, files) and (folder / job.result).exists():
            console.print(f"{job.name}: done before")
            continue
        earlier = record.jobs.get(job.name)
        change = _change(earlier, shown, files)
        if change:
            console.print(f"{job.name}: {change} changed, so it runs again")
        command = job.line(options.quick, {**known, OUTPUT: str(folder)}, options.tail)
        seconds = 60 * job.variant(options.quick).minutes
        is_anew = change != "" and not _is_extended(earlier, shown, files)
        found.append(Step(job, command, shown, files, seconds, is_anew))
    return found


def _change(earlier: Done | None, shown: Sequence[str], files: Versions) -> str:
    """What is not as it was."""
    if earlier is None:
        return ""
    if earlier.command != [*shown]:
        return "its command has"
    return "" if earlier.has_read(files) else "a file that it reads has"


def _is_extended(earlier: Done | None, shown: Sequence[str], files: Versions) -> bool:
    """Whether only the rival is new or gone: then what was measured stays of use."""
    if earlier is None or not earlier.has_read(files):
        return False
    return _without_rival(earlier.command) == _without_rival(shown)


def _without_rival(words: Sequence[str]) -> list[str]:
    if "--rival" not in words:
        return [*words]
    place = words.index("--rival")
    return [*words[:place], *words[place + 2 :]]
