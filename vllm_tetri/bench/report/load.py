"""What a suite's folder holds: results, conditions, pictures, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_tetri.bench.report.read import READERS
from vllm_tetri.bench.report.values import Value, Values
from vllm_tetri.bench.suite.jobs import JOBS, Job
from vllm_tetri.bench.suite.record import Record, Status, read
from vllm_tetri.errors import ConfigError

# Of an engine's facts, those that matter in a line.
_ENGINE_FACTS = ("device", "vllm", "dtype")
_OWN_LEVEL = ("model", "device", "vllm", "cores", "chunk", "requests")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything that a report is made of.

    Attributes:
        record: Of the suite; None where a folder was put together by hand.
        conditions: By job, as one line.
        problems: By job, why its results cannot be shown.
    """

    folder: Path
    record: Record | None
    values: Values
    conditions: Mapping[str, str]
    problems: Mapping[str, str]
    pictures: Mapping[str, list[Path]]

    def has(self, job: str) -> bool:
        """Whether it has results."""
        return job in self.conditions

    def state(self, job: str) -> str:
        """What became of it, in a few words."""
        done = self.record.jobs.get(job) if self.record else None
        if job in self.problems:
            return f"unreadable: {self.problems[job]}"
        if done is None:
            return "done" if self.has(job) else "not run"
        if done.status is Status.DONE:
            return f"done in {done.took_s:.0f} s, {done.finished}"
        log = self.folder / job / "output.log"
        return f"{done.status} (exit status {done.exit_status}), see `{log}`"


@dataclass(slots=True)
class _Found:
    values: list[Value] = field(default_factory=list)
    conditions: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, list[Path]] = field(default_factory=dict)


def load(folder: Path) -> Loaded:
    """Everything that is there. A result that cannot be read is a problem, not an error.

    Raises:
        ConfigError: There is no such folder, or its suite.json cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; vllm-tetri bench suite makes one")
    record = read(folder)
    found = _Found()
    for job in JOBS.values():
        own = folder / job.name
        if (own / job.result).exists():
            _load_job(job, own, found)
    values = Values(found.values)
    return Loaded(folder, record, values, found.conditions, found.problems, found.pictures)


def _load_job(job: Job, folder: Path, found: _Found) -> None:
    path = folder / job.result
    try:
        raw = json.loads(path.read_text())
        values = [each for each in READERS[job.name](folder, raw) if each is not None]
        conditions = _conditions(raw)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        found.problems[job.name] = f"{path}: {_short(error)}"
        return
    found.values += values
    found.conditions[job.name] = conditions
    patterns = [sorted(folder.glob(pattern)) for pattern in job.pictures]
    found.pictures[job.name] = [each for paths in patterns for each in paths]


def _short(error: Exception) -> str:
    """In one line; a missing key says no more than its name."""
    text = str(error).partition("\n")[0]
    return f"no {text}" if isinstance(error, KeyError) else text or type(error).__name__


def _conditions(raw: Mapping[str, Any]) -> str:
    """All that a result says about how it was made."""
    told = raw.get("conditions")
    if told is None:
        told = {name: raw[name] for name in _OWN_LEVEL if name in raw}
    parts = dict(_parts(told))
    return ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in parts.items())


def _parts(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for name, each in told.items():
        if name in ("engine", "engines"):
            facts = each.get("ours", each)
            found += [(fact, str(facts[fact])) for fact in _ENGINE_FACTS if fact in facts]
        elif isinstance(each, dict):
            inner = ", ".join(f"{key} {one}" for key, one in each.items())
            found.append((name, f"({inner})"))
        elif isinstance(each, list):
            found.append((name, " ".join(map(str, each)) or "none"))
        elif each is not None:
            found.append((name, f"{each:g}" if isinstance(each, float) else str(each)))
    return found
