"""The engine's end of a predictor process: starts it, asks it, outlives it.

The engine thread owns the sockets and never waits. One thread starts the process, sleeps until it
ends, and starts it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from examples.predictor import server
from examples.predictor.model import read_about, require_whole
from vllm_tetri.predictor.base import Query, Tally
from vllm_tetri.types import Prediction

# Prompts that may wait for a predictor; the next one is refused at once. At the rate of a small
# encoder on one core, more could not be predicted before their first chunk is done.
QUEUE_PROMPTS = 256
_CLOSE_S = 3.0
_ROOT = Path(__file__).parents[2]  # `examples` is not installed
# Between two starts of a process that keeps ending: doubled each time, up to the longest.
FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_STEADY_S = 30.0  # a process that lived for this time did start

_log = logging.getLogger(__name__)


class PredictorProcess:
    """A `Predictor` that is a child process (`server`), started by `command`. Used by one thread.

    A bucket outside of `num_buckets` counts as a failure. A process that ends is started again
    after half a second, then after twice the time, up to a minute.
    """

    def __init__(self, command: Sequence[str], granularity_tokens: int, num_buckets: int) -> None:
        self._granularity_tokens, self._num_buckets = granularity_tokens, num_buckets
        self.tally = Tally()
        self._names: dict[int, str] = {}  # of the prompts that were asked, without a reply
        self._last = 0
        self._new: dict[int, Query] = {}  # not sent yet
        self._withdrawn: list[int] = []
        self._found: list[tuple[str, Prediction | None]] = []
        self._channel: socket.socket | None = None
        self._is_serving = False  # its model is loaded, and it lives
        self._command = command
        self._stop = threading.Event()
        self._lock = threading.Lock()  # a process is started, or all is stopped
        self.process: subprocess.Popen[bytes] | None = None
        self._new_channels: deque[socket.socket] = deque()  # to the newest process
        # The kernel ends the process with the thread that started it: this one.
        self._keeper = threading.Thread(target=self._keep, name="tetri-predictor", daemon=True)
        self._keeper.start()

    def ask(self, query: Query) -> None:
        self.withdraw(query.name)  # a former request may have had this name
        if len(self._names) >= QUEUE_PROMPTS:
            self.tally.refused += 1
            self._found.append((query.name, None))
            return
        self._last += 1
        self._names[self._last] = query.name
        self._new[self._last] = query

    def withdraw(self, name: str) -> None:
        for number in [number for number, asked in self._names.items() if asked == name]:
            del self._names[number]
            if self._new.pop(number, None) is None:
                self._withdrawn.append(number)

    def poll(self) -> list[tuple[str, Prediction | None]]:
        self._take_channel()
        if self._names or self._withdrawn:
            self._receive()
            self._send()
        found, self._found = self._found, []
        return found

    def wait(self, timeout_s: float) -> None:
        if self._channel is None or not self._is_serving:
            time.sleep(min(timeout_s, 0.05))
            return
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.poll(max(1, round(timeout_s * 1000)))

    def _take_channel(self) -> None:
        while self._new_channels:
            if self._channel is not None:
                self._channel.close()
            self._channel = self._new_channels.popleft()
            self._lose_process()

    def _receive(self) -> None:
        while self._channel is not None:
            try:
                replies = server.decode_replies(self._channel.recv(server.MAX_PACKET_BYTES))
            except BlockingIOError:
                return
            except (ConnectionError, msgspec.DecodeError):  # it ended, so the packet is empty
                self._lose_process()
                return
            self._is_serving = True
            for number, bucket in replies.buckets:
                if bucket is None or not 0 <= bucket < self._num_buckets:
                    self._fail([number])
                elif (name := self._forget(number)) is not None:
                    self.tally.made += 1
                    prediction = Prediction.of_bucket(bucket, self._granularity_tokens)
                    self._found.append((name, prediction))

    def _send(self) -> None:
        if not self._is_serving or self._channel is None:
            self._fail(list(self._new))
            self._withdrawn.clear()
            return
        try:
            while self._withdrawn:
                self._channel.send(server.encode(server.Withdrawn(self._withdrawn[-1])))
                self._withdrawn.pop()
            for number, query in list(self._new.items()):
                prompt = server.Submitted(number, server.shortened(query.token_ids))
                self._channel.send(server.encode(prompt))
                del self._new[number]
        except BlockingIOError:  # it computes a batch; the rest follows with the next poll
            pass
        except ConnectionError:
            self._lose_process()

    def _lose_process(self) -> None:
        """Fail the prompts that were sent: they died with the process."""
        self._is_serving = False
        self._withdrawn.clear()
        self._fail([number for number in self._names if number not in self._new])

    def _fail(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (name := self._forget(number)) is not None:
                self.tally.failed += 1
                self._found.append((name, None))

    def _forget(self, number: int) -> str | None:
        self._new.pop(number, None)
        return self._names.pop(number, None)

    def close(self) -> None:
        with self._lock:
            self._stop.set()
            process = self.process
        if process is not None:
            process.kill()  # it holds nothing that could be lost
        self._keeper.join(_CLOSE_S)
        self._take_channel()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # The keeper's thread.

    def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            started = time.monotonic()
            try:
                ending = f"ended with status {self._run_once()}"
            except OSError as error:  # no memory, say, or no process left
                ending = f"could not be started ({error})"
            if self._stop.is_set():
                return
            if time.monotonic() - started > _STEADY_S:
                pause_s = FIRST_PAUSE_S
            _log.warning("the length predictor %s; it starts again in %.1f s", ending, pause_s)
            if self._stop.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _run_once(self) -> int:
        """Return the exit status; 0 without a process once it was stopped."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock, theirs, contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            if self._stop.is_set():
                return 0
            words = ["--socket", str(theirs.fileno()), "--parent", str(os.getpid())]
            process = self.process = subprocess.Popen(
                [*self._command, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the engine, which ends it
            )
            stack.pop_all()
        ours.setblocking(False)
        with contextlib.suppress(IndexError):  # the engine thread may take it meanwhile
            self._new_channels.pop().close()
        self._new_channels.append(ours)
        status = process.wait()
        self.process = None
        return status


def check(folder: Path) -> str:
    """Return the name of an artefact's weights; ConfigError if it is damaged."""
    return require_whole(folder).weights_digest


def make(folder: Path, tokenizer: str, cores: Sequence[int]) -> PredictorProcess:
    """Start the process that serves an artefact."""
    about = read_about(folder)  # `check` has looked at the weights
    command = serve_command(folder, tokenizer, cores)
    return PredictorProcess(command, about.granularity_tokens, about.num_buckets)


def serve_command(folder: Path, tokenizer: str, cores: Sequence[int] = ()) -> list[str]:
    """Serve an artefact, on all cores that this process may use or on some of them."""
    words = [sys.executable, "-P", "-m", "examples.predictor.server", str(folder)]
    words += ["--tokenizer", tokenizer]
    return [*words, "--cores", ",".join(map(str, cores))] if cores else words
