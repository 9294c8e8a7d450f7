"""What `up` shows: progress until ready, then the lines that matter."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")
_LEVEL = re.compile(r"(?:\([^)]*\)\s*)*(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_TROUBLE = re.compile(r"(?:\([^)]*\)\s*)*(Traceback \(most recent|\S*(?:Error|Exception)\b:?)")
_SEVERITY = {"DEBUG": 0, "INFO": 1, "WARNING": 2, "ERROR": 3, "CRITICAL": 3}

# What vLLM says, and the phase that begins with it.
PHASES = (
    (re.compile(r"Starting to load model|Loading model from"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "preparing KV cache"),
    (re.compile(r"KV cache size"), "warming up"),
    (re.compile(r"Application startup complete"), "answering"),
)


class Display:
    """Owned by the event loop. `close` gives the terminal back; idempotent.

    On a terminal the progress is a table that redraws itself, elsewhere one
    line per change of phase. Lines of children are shown from `WARNING` up
    (before the cluster is ready from `ERROR` up: a start-up of vLLM warns a
    lot), or all of them when ``verbose``.
    """

    def __init__(
        self, names: Sequence[str], *, verbose: bool, console: Console | None = None
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._verbose = verbose
        self._started = time.monotonic()
        self._width = max(map(len, names), default=0)
        self._colour = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._phase = dict.fromkeys(names, ("waiting", self._started))
        self._level = dict.fromkeys(names, 1)
        self._threshold = 3
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self._table,
                console=self.console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()

    @property
    def elapsed_s(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._started

    def phase(self, name: str, phase: str) -> None:
        """A child entered a phase of its life."""
        if self._phase[name][0] == phase:
            return
        self._phase[name] = (phase, time.monotonic())
        if self._live is None:
            self._print(name, f"{phase} ({self.elapsed_s:.0f} s)")

    def line(self, name: str, line: str) -> None:
        """A child printed a line."""
        if self._phase[name][0] != "ready":
            for pattern, phase in PHASES:
                if pattern.search(line):
                    self.phase(name, phase)
        self._level[name] = _severity(line, self._level[name])
        if self._verbose or self._level[name] >= self._threshold:
            self._print(name, line)

    def note(self, name: str, text: str) -> None:
        """Something about a child that must be seen."""
        self._print(name, text, style="bold")

    def ready(self, text: str) -> None:
        """All are ready: stop the progress, show ``text``, and warnings from now on."""
        self.close()
        self._threshold = 2
        self.say(text)

    def stopping(self) -> None:
        """Show no more lines: vLLM complains at length while it is being ended."""
        self.close()
        self._threshold = max(_SEVERITY.values()) + 1

    def say(self, text: str) -> None:
        """Plain text."""
        self.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _print(self, name: str, text: str, style: str = "") -> None:
        prefix = Text(f"{name:<{self._width}} ", style=self._colour[name])
        self.console.print(prefix + Text(text, style=style), soft_wrap=True)

    def _table(self) -> Table:
        now = time.monotonic()
        table = Table.grid(padding=(0, 2))
        for name, (phase, since) in self._phase.items():
            done = phase == "ready"
            seconds = (since if done else now) - self._started
            table.add_row(
                Text(name, style=self._colour[name]),
                Text(phase, style="bold green" if done else ""),
                f"{seconds:.0f} s",
            )
        return table


def _severity(line: str, before: int) -> int:
    """A line without a level (of a traceback, say) has that of the line before it."""
    found = _LEVEL.match(line)
    if found:
        return _SEVERITY[found.group(1)]
    return 3 if _TROUBLE.match(line) else before
