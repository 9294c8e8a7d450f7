"""What `up` shows: progress until ready, then the lines that matter.

On a terminal the progress is a table that redraws itself. Elsewhere every message is a log
line, in the format that vLLM's logging variables ask for.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Sequence
from logging.handlers import WatchedFileHandler
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")
_LEVEL = re.compile(
    r'(?:(?:\([^)]*\)\s*)*|\{.*"level(?:name)?": *")(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b'
)
_TROUBLE = re.compile(r"(?:\([^)]*\)\s*)*(Traceback \(most recent|\S*(?:Error|Exception)\b:?)")

# A line of vLLM, and the phase that begins with it.
PHASES = (
    (re.compile(r"Starting to load model|Loading model from|Loading .* shards"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "preparing KV cache"),
    (re.compile(r"Starting torch\.compile|Warming up model for the compilation"), "compiling"),
    (re.compile(r"KV cache size"), "warming up"),
    (re.compile(r"Capturing CUDA graphs"), "capturing CUDA graphs"),
    (re.compile(r"init engine|Application startup complete"), "starting server"),
)
_BAR = re.compile(r" (\d+/\d+) \[")  # of tqdm: so many of so many

_LOG_AGAIN_S = 60.0

_log = logging.getLogger(__name__)


class Display:
    """Owned by the event loop. `show_from` gives the terminal back.

    Lines of children are shown from `WARNING` up (before the cluster is ready from `ERROR` up:
    a start of vLLM warns a lot), or all of them when ``verbose``. All are appended to files in
    `log_dir`, if there is one, while these can be written, and anew if they are renamed.
    """

    def __init__(self, names: Sequence[str], *, verbose: bool, log_dir: Path | None = None) -> None:
        self._log_dir, self._logs = log_dir, dict[str, WatchedFileHandler]()
        self._log_again_s = 0.0  # after files could not be written
        self._console = Console(stderr=True, highlight=False)
        self._verbose = verbose
        self._started = time.monotonic()
        self._width = max(map(len, names), default=0)
        self._colour = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._phase = dict.fromkeys(names, ("waiting", self._started))
        self._count = dict.fromkeys(names, "")  # how far a phase is, where vLLM says it
        self._level = dict.fromkeys(names, logging.INFO)
        self._threshold = logging.ERROR
        self._live = Live(get_renderable=self._table, console=self._console, transient=True)
        if self._console.is_terminal:
            self._live.start()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the display was made."""
        return time.monotonic() - self._started

    def phase(self, name: str, phase: str) -> None:
        """A child entered a phase of its life."""
        if self._phase[name][0] != phase:
            self._phase[name] = (phase, time.monotonic())
            self._count[name] = ""
            if not self._live.is_started:
                self.event(name, f"{phase} ({self.elapsed_s:.0f} s)", logging.INFO)

    def line(self, name: str, line: str) -> None:
        """A child printed a line."""
        if self._phase[name][0] != "ready":
            for pattern, phase in PHASES:
                if pattern.search(line):
                    self.phase(name, phase)
                    if bar := _BAR.search(line):
                        self._count[name] = f" {bar[1]}"
        if found := _LEVEL.match(line):
            self._level[name] = logging.getLevelNamesMapping()[found.group(1)]
        elif _TROUBLE.match(line):  # other lines have the level of the line before
            self._level[name] = logging.ERROR
        if self._verbose or self._level[name] >= self._threshold:
            self._print(name, line)
        path = self.log_file(name)
        if path is None or time.monotonic() < self._log_again_s:
            return
        try:
            if (log := self._logs.get(name)) is None:
                log = self._logs[name] = WatchedFileHandler(path, errors="replace")
            log.reopenIfNeeded()  # another program may have renamed it
            assert log.stream is not None
            log.stream.write(line + "\n")
            log.stream.flush()
        except OSError as error:  # as of a full disk
            self._close_logs()
            self._log_again_s = time.monotonic() + _LOG_AGAIN_S
            words = f"lines are lost that belong into --log-dir, for {_LOG_AGAIN_S:g} s"
            self.say(f"{words}: {error}", logging.ERROR)

    def end(self, text: str) -> None:
        """Show the last message, and write to no file any more."""
        self.say(text)
        self._close_logs()
        self._log_dir = None

    def _close_logs(self) -> None:
        while self._logs:
            with contextlib.suppress(OSError):
                self._logs.popitem()[1].close()

    def log_file(self, name: str) -> Path | None:
        """Return the file to which lines of a child are appended, if there is one."""
        return self._log_dir / f"{name}.log" if self._log_dir else None

    def event(self, name: str, text: str, level: int = logging.WARNING) -> None:
        """Show an event of a child at any threshold."""
        if self._console.is_terminal:
            self._print(name, text, style="bold")
        else:
            _log.log(level, "%s: %s", name, text)

    def show_from(self, level: int) -> None:
        """Stop redrawing, and show lines of children from this level up. Idempotent."""
        with contextlib.suppress(OSError, SystemExit):  # of a terminal that is gone
            self._live.stop()
        self._threshold = level

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Show a message of `up` itself."""
        if self._console.is_terminal:
            self._show(Text(text))
        else:
            _log.log(level, "%s", text)

    def _print(self, name: str, text: str, style: str = "") -> None:
        # A line of JSON is for machines, which could not read it with a name in front.
        is_json = text.startswith("{") and not self._console.is_terminal
        prefix = Text("" if is_json else f"{name:<{self._width}} ", style=self._colour[name])
        self._show(prefix + Text(text, style=style))

    def _show(self, text: Text) -> None:
        """Write to stderr what can be written: its disk may be full, or its reader gone."""
        try:
            self._console.print(text, soft_wrap=True)
        except SystemExit:  # with which rich ends without a reader; it is quiet from now on
            pass
        except OSError:  # rich keeps what it could not write, unless it is quiet
            self._console.quiet = True
            self._console.print()
            self._console.quiet = False

    def _table(self) -> Table:
        now = time.monotonic()
        table = Table.grid(padding=(0, 2))
        for name, (phase, since) in self._phase.items():
            if phase == "waiting":
                continue  # it may never start
            is_ready = phase == "ready"
            seconds = (since if is_ready else now) - self._started
            style = "bold green" if is_ready else ""
            colour = self._colour[name]
            what = Text(phase + self._count[name], style=style)
            table.add_row(Text(name, style=colour), what, f"{seconds:.0f} s")
        return table
