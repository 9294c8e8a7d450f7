"""The engine's end of a predictor process: starts it, asks it, outlives it.

The engine thread owns the socket and never waits. One thread starts the process,
sleeps until it ends, and starts it again.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from vllm_tetri.control.curve import Curve
from vllm_tetri.errors import ProtocolError
from vllm_tetri.predictor.base import Ask, Tally
from vllm_tetri.predictor.protocol import (
    CHANNEL,
    MAX_FRAME_BYTES,
    QUEUE_PROMPTS,
    Asks,
    Prompt,
    decode_answers,
    encode,
    shortened,
)
from vllm_tetri.predictor.server import SECRET_VARIABLE
from vllm_tetri.secret import Secret
from vllm_tetri.types import Prediction

_CLOSE_S = 3.0
_RECONNECT_MS = 50
# Between two starts of a process that keeps ending: doubled each time, up to the longest.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_STEADY_S = 30.0  # a process that lived so long did start

Command = Callable[[str], Sequence[str]]
"""From an ``ipc://`` address to the command that serves there."""

_log = logging.getLogger(__name__)


class PredictorProcess:
    """A `Predictor` that is a child process. Used by one thread.

    Args:
        command: What to start.
        granularity_tokens: Width of the buckets that it names.
        num_buckets: How many there are; another one counts as a failure.
    """

    def __init__(self, command: Command, granularity_tokens: int, num_buckets: int) -> None:
        self._granularity_tokens = granularity_tokens
        self._num_buckets = num_buckets
        # No file (Linux): nothing is left behind, however anybody ends. Every user of this
        # machine can see and open that, so both ends must hold a secret of their own.
        secret = Secret.make()
        address = f"ipc://@tetri-predictor-{os.getpid()}-{secrets.token_hex(8)}"
        self.tally = Tally()
        self._numbers: dict[str, int] = {}  # asked and without an answer
        self._names: dict[int, str] = {}
        self._last = 0
        self._new: dict[int, Prompt] = {}  # not sent yet
        self._withdrawn: list[int] = []
        self._nothing: list[str] = []  # to be told that there will be no answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up while it is away
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        Curve(secret, CHANNEL).call(self._socket)
        self._socket.connect(address)
        self._keeper = _Keeper(command(address), secret)
        self._num_deaths = 0

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._keeper.pid

    def ask(self, ask: Ask) -> None:
        self.withdraw(ask.name)  # of a request that had this name before
        if len(self._numbers) >= QUEUE_PROMPTS:
            self.tally.refused += 1
            self._nothing.append(ask.name)
            return
        self._last += 1
        self._numbers[ask.name] = self._last
        self._names[self._last] = ask.name
        self._new[self._last] = Prompt(self._last, shortened(ask.token_ids))

    def withdraw(self, name: str) -> None:
        number = self._numbers.pop(name, None)
        if number is not None:
            del self._names[number]
            if self._new.pop(number, None) is None:
                self._withdrawn.append(number)

    def poll(self) -> list[tuple[str, Prediction | None]]:
        found: list[tuple[str, Prediction | None]] = []
        if self._numbers:
            self._receive(found)
            self._notice_death()
        if self._new or self._withdrawn:
            self._send()
        if self._nothing:
            found += [(name, None) for name in self._nothing]
            self._nothing = []
        return found

    def wait(self, timeout_s: float) -> None:
        self._socket.poll(max(1, round(timeout_s * 1000)))

    def _receive(self, found: list[tuple[str, Prediction | None]]) -> None:
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                answers = decode_answers(self._socket.recv(zmq.NOBLOCK))
            except (ProtocolError, zmq.Again) as error:
                _log.warning("dropped an answer of the predictor: %s", error)
                continue
            for number, bucket in answers.buckets:
                if not 0 <= bucket < self._num_buckets:
                    self._fail([number])
                elif (name := self._forget(number)) is not None:
                    self.tally.made += 1
                    prediction = Prediction(bucket, self._num_buckets, self._granularity_tokens)
                    found.append((name, prediction))
            self._fail(answers.failed)
            for number in answers.refused:
                if (name := self._forget(number)) is not None:
                    self.tally.refused += 1
                    self._nothing.append(name)

    def _notice_death(self) -> None:
        """What a process was asked died with it."""
        if self._keeper.num_deaths != self._num_deaths:
            self._num_deaths = self._keeper.num_deaths
            self._fail([number for number in self._names if number not in self._new])

    def _send(self) -> None:
        asks = Asks(list(self._new.values()), self._withdrawn)
        self._new, self._withdrawn = {}, []
        try:
            self._socket.send(encode(asks), zmq.NOBLOCK)
        except zmq.Again:  # not there, or it does not read
            self._fail([prompt.number for prompt in asks.prompts])

    def _fail(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (name := self._forget(number)) is not None:
                self.tally.failed += 1
                self._nothing.append(name)

    def _forget(self, number: int) -> str | None:
        name = self._names.pop(number, None)
        if name is not None:
            del self._numbers[name]
        return name

    def close(self) -> None:
        self._keeper.close()
        if not self._socket.closed:
            self._socket.close()
            self._context.term()


class _Keeper:
    """Runs a command again whenever it ends, until closed. Any thread may read."""

    def __init__(self, command: Sequence[str], secret: Secret) -> None:
        self._command = command
        self._secret = secret
        self._stop = threading.Event()
        self._lock = threading.Lock()  # a process is started, or all is stopped
        self._process: subprocess.Popen[bytes] | None = None
        self.num_deaths = 0
        # The kernel ends the process with the thread that started it: this one.
        self._thread = threading.Thread(target=self._run, name="tetri-predictor", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            started = time.monotonic()
            try:
                status = self._run_once()
            except OSError as error:  # no memory, say, or no process left
                ending = f"could not be started ({error})"
            else:
                ending = f"ended with status {status}"
                self.num_deaths += 1
            if self._stop.is_set():
                return
            if time.monotonic() - started > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            _log.warning("the length predictor %s; it is started again in %.1f s", ending, pause_s)
            if self._stop.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _run_once(self) -> int:
        """Its exit status; 0 without a process once it was stopped."""
        with self._lock:
            if self._stop.is_set():
                return 0
            process = self._process = subprocess.Popen(
                [*self._command, "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    SECRET_VARIABLE: self._secret.text,  # others cannot read it, as they can argv
                },
                start_new_session=True,  # Ctrl-C is for the engine, which ends it
            )
        status = process.wait()
        self._process = None
        return status

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._lock:
            self._stop.set()
            process = self._process
        if process is not None:
            process.kill()  # it holds nothing that could be lost
        self._thread.join(_CLOSE_S)


def serve_command(folder: Path, tokenizer: str, cores: Sequence[int] = ()) -> Command:
    """Starts `vllm-tetri predictor serve` for an artefact, on all cores that this
    process may use or on some of them."""

    def command(address: str) -> list[str]:
        words = [sys.executable, "-m", "vllm_tetri.cli", "predictor", "serve", str(folder)]
        words += ["--address", address, "--tokenizer", tokenizer]
        return [*words, "--cores", ",".join(map(str, cores))] if cores else words

    return command
