"""`vllm-tetri top`: in a file or pipe, and in a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from typing import Any

import pytest

from tests.router.fakes import begin, both, cluster, eventually, held_back, let_go, pair
from vllm_tetri.router import live

ROWS, COLUMNS = 40, 160


async def test_one_view_shows_requests_and_instances(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.05)
    prefill, decode = pair()
    async with cluster(*held_back(prefill), decode) as made:
        asks = await begin(made, 3)
        assert await made.command("top", "--once") == 0
        let_go(prefill)
        await asyncio.gather(*asks)
        await made.order("instances/d/flip", {"role": "both", "reason": "as told"})
        await eventually(lambda: made.scheduler.metrics.happened)
        shown = capsys.readouterr().out
        later = ""
        async with asyncio.timeout(10):
            while "0 in flight" not in later:  # a snapshot may be as old as a period
                assert await made.command("top") == 0  # no terminal: once as well
                later = capsys.readouterr().out
    assert "mode split" in shown
    assert "3 in flight: prefill 3" in shown
    assert shown.count("prefilling") == 3
    assert {"p", "d"} <= {line.partition(" ")[0] for line in shown.splitlines()}
    assert "flip policy: off" in shown
    assert "flip: d decode → both" in later


async def test_a_router_that_wants_a_key_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(both(), keys=("k",)) as made:
        assert await made.command("top", "--once") == 1
        assert "needs a known key" in capsys.readouterr().err
        monkeypatch.setenv("VLLM_API_KEY", "k")
        assert await made.command("top", "--once") == 0


class Terminal:
    """The command in a terminal of its own, and what it writes there."""

    def __init__(self, url: str) -> None:
        self._fd, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        words = [sys.executable, "-m", "vllm_tetri.cli", "top", "--url", url]
        # Both names would take the place of the terminal's own size.
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.child = subprocess.Popen(
            words, stdin=end, stdout=end, stderr=end, env={**inherited, "TERM": "xterm"}
        )
        os.close(end)
        os.set_blocking(self._fd, False)
        self.text = b""

    def read(self) -> bytes:
        """All that was written so far."""
        try:
            while some := os.read(self._fd, 65536):
                self.text += some
        except OSError:  # nothing now, or nothing any more
            pass
        return self.text

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._fd)


async def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    terminal: Any = None
    async with cluster(both("name-of-it")) as made:
        try:
            terminal = Terminal(made.url)
            await eventually(lambda: b"name-of-it" in terminal.read(), 30)
            terminal.child.send_signal(signal.SIGINT)
            await asyncio.to_thread(terminal.child.wait, 10)
            assert terminal.child.returncode == 130
            text = terminal.read()
            assert text.index(b"\x1b[?1049h") < text.rindex(b"\x1b[?1049l")  # the other screen
            assert text.rindex(b"\x1b[?25l") < text.rindex(b"\x1b[?25h")  # the cursor
            assert b"Traceback" not in text
        finally:
            if terminal is not None:
                terminal.close()


async def test_it_waits_for_a_router_that_ends() -> None:
    terminal: Any = None
    try:
        async with cluster(both("name-of-it")) as made:
            terminal = Terminal(made.url)
            await eventually(lambda: b"name-of-it" in terminal.read(), 30)
        await eventually(lambda: b"no router answers" in terminal.read(), 20)
        assert terminal.child.poll() is None
    finally:
        if terminal is not None:
            terminal.close()
