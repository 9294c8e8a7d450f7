"""What a suite has done so far: `suite.json`, written before and after every job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from vllm_tetri.bench.suite.versions import Versions
from vllm_tetri.errors import ConfigError

FILE = "suite.json"
FORMAT = 1


class Status(StrEnum):
    """What became of a job; it stands as interrupted from when it begins."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Done:
    """A job that was run.

    Attributes:
        command: Behind `vllm-tetri`; the folder of the job stands as its name.
        exit_status: 0 when all went well.
        finished: Date and time, UTC.
        files: What it read, by `versions`.
    """

    command: list[str]
    status: Status
    exit_status: int
    took_s: float
    finished: str
    files: Versions = field(default_factory=dict)

    def has_read(self, files: Versions) -> bool:
        """Whether these files are as they were; so they are where nothing is known."""
        return not self.files or self.files == files


@dataclass(slots=True)
class Record:
    """All of a suite.

    Attributes:
        conditions: What results depend on besides the commands.
    """

    conditions: dict[str, Any]
    jobs: dict[str, Done] = field(default_factory=dict)

    def is_done(self, name: str, command: Sequence[str], files: Versions) -> bool:
        """Whether this very command has succeeded before, with these files."""
        found = self.jobs.get(name)
        if found is None or found.status is not Status.DONE:
            return False
        return found.command == [*command] and found.has_read(files)

    def write(self, folder: Path) -> None:
        """Replace the file."""
        content = {
            "format": FORMAT,
            "conditions": self.conditions,
            "jobs": {name: asdict(done) for name, done in self.jobs.items()},
        }
        partial = folder / f"{FILE}.partial"
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(folder / FILE)


def read(folder: Path) -> Record | None:
    """What the folder's file holds; None without one.

    Raises:
        ConfigError: It cannot be read, or is of another version.
    """
    path = folder / FILE
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise ConfigError(f"{path} has format {raw['format']}, not {FORMAT}")
        jobs = {
            name: Done(**{**done, "status": Status(done["status"])})
            for name, done in raw["jobs"].items()
        }
        return Record(dict(raw["conditions"]), jobs)
    except FileNotFoundError:
        return None
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no record of a suite ({error!r}); give another --output"
        ) from error


def continued(folder: Path, conditions: Mapping[str, Any]) -> Record:
    """The record to go on with.

    Raises:
        ConfigError: What is there was made under other conditions.
    """
    found = read(folder)
    if found is None:
        return Record(dict(conditions))
    for name in {**found.conditions, **conditions}:
        before, now = found.conditions.get(name), conditions.get(name)
        if before != now:
            raise ConfigError(
                f"{folder / FILE} was made with {name} {_text(before)}, not {_text(now)}; give "
                "another --output"
            )
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
