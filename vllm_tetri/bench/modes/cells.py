"""Raw results of `vllm-tetri bench modes`: two files of one folder.

`modes.json` has what a run was made under and what was measured first; `cells.jsonl` gets
a line for each cell as soon as it is done, so that an interrupted run can be continued.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_tetri.bench.arrivals import Arrival
from vllm_tetri.bench.modes.client import Reply
from vllm_tetri.bench.modes.load import Load
from vllm_tetri.errors import ConfigError

_REFUSED = tuple(f"HTTP/1.1 {status}" for status in (429, 503))
Key = tuple[str, str, str, int]  # system, class, rate, repeat


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a cell: when it was due, what it asked for, what became of it."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    reply: Reply

    @property
    def is_refused(self) -> bool:
        """Whether the server said that it will not take it now."""
        return self.reply.error.startswith(_REFUSED)


@dataclass(frozen=True, slots=True)
class Cell:
    """All requests of one class at one rate to one system in one repeat.

    Attributes:
        name: Of the class.
        rate_per_s: At which requests were due.
        took_s: From the start until the last answer.
        busy: Share of the cores' time that the system and the client used.
        foreign: The same of everybody else, the hypervisor included.
    """

    system: str
    name: str
    rate: str
    repeat: int
    rate_per_s: float
    took_s: float
    busy: float
    foreign: float
    requests: Sequence[Request]

    @property
    def key(self) -> Key:
        return self.system, self.name, self.rate, self.repeat

    @property
    def load(self) -> Load:
        return self.name, self.rate

    @property
    def answered(self) -> list[Request]:
        return [each for each in self.requests if not each.reply.error]


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast the cores were beside a system's block of cells.

    Attributes:
        when: `before` or `after` it.
        gflops: GFLOP/s of each core.
    """

    system: str
    repeat: int
    when: str
    gflops: Sequence[float]


@dataclass(slots=True)
class Raw:
    """Everything that was measured so far.

    Attributes:
        head: What `modes.json` holds.
    """

    head: dict[str, Any]
    cells: dict[Key, Cell] = field(default_factory=dict)
    speeds: list[Speed] = field(default_factory=list)

    def load(self, path: Path) -> None:
        """Read `cells.jsonl`. A last line that was cut off is removed from the file.

        Raises:
            ConfigError: Something else is in it.
        """
        if not path.exists():
            return
        text = path.read_text()
        whole, _, rest = text.rpartition("\n")
        if rest:
            path.write_text(whole + "\n" if whole else "")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(f"{path}, line {number}: {error!r}") from error

    def add_cell(self, path: Path, cell: Cell) -> None:
        """Keep it, on disk too."""
        self.cells[cell.key] = cell
        _append(path, {"cell": asdict(cell)})

    def add_speed(self, path: Path, speed: Speed) -> None:
        """The same."""
        self.speeds.append(speed)
        _append(path, {"speed": asdict(speed)})

    def _take(self, line: Mapping[str, Any]) -> None:
        if "speed" in line:
            self.speeds.append(Speed(**line["speed"]))
            return
        raw = line["cell"]
        requests = [
            Request(**{**each, "reply": Reply(**each["reply"])}) for each in raw["requests"]
        ]
        cell = Cell(**{**raw, "requests": requests})
        self.cells[cell.key] = cell


def requests_of(schedule: Sequence[Arrival], replies: Sequence[Reply]) -> list[Request]:
    """One per arrival, times to ten microseconds."""
    return [
        Request(
            round(due.at_s, 5),
            due.length.prompt_tokens,
            due.length.output_tokens,
            Reply(round(reply.ttft_s, 5), round(reply.jct_s, 5), reply.gaps_us, reply.error),
        )
        for due, reply in zip(schedule, replies, strict=True)
    ]


def _request(raw: Mapping[str, Any]) -> Request:
    return Request(**{**raw, "reply": Reply(**raw["reply"])})


def _append(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(content, separators=(",", ":")) + "\n")
