"""The loop of a predictor process: take prompts, batch them, answer."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from vllm_tetri.control.curve import Curve, Gatekeeper
from vllm_tetri.errors import ConfigError, ProtocolError
from vllm_tetri.predictor.protocol import (
    CHANNEL,
    MAX_FRAME_BYTES,
    QUEUE_PROMPTS,
    Answers,
    Asks,
    Prompt,
    decode_asks,
    encode,
)
from vllm_tetri.secret import Secret

SECRET_VARIABLE = "TETRI_PREDICTOR_SECRET"
# Paper section 3.3.2: prompts are padded to the longest of their batch, and those
# beyond this run alone.
CUTTING_TOKENS = 512
# A batch is one forward pass that nobody interrupts, so it should not take long.
BATCH_PROMPTS = 16
BATCH_TOKENS = 2048

_log = logging.getLogger(__name__)


def given_secret() -> Secret | None:
    """What the instance that started this process wants to be asked for; taken out of the
    environment.

    Raises:
        ConfigError: It is none.
    """
    text = os.environ.pop(SECRET_VARIABLE, "")
    try:
        return Secret.from_text(text) if text else None
    except ValueError as error:
        raise ConfigError(f"{SECRET_VARIABLE}: {error}") from error


class Model(Protocol):
    """What is served; prompts go in as the target's tokens, buckets come out."""

    def encode(self, token_ids: Sequence[int]) -> list[int]:
        """A prompt in the model's own tokens, no more than its window."""

    def classify(self, batch: Sequence[Sequence[int]]) -> list[int]:
        """One bucket per encoded prompt, in one forward pass."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A prompt that waits for its batch."""

    client: bytes
    number: int
    tokens: list[int]


def take_batch(queue: deque[Queued]) -> list[Queued]:
    """Remove the next batch from the head of a queue that is not empty."""
    batch = [queue.popleft()]
    longest = len(batch[0].tokens)
    while longest < CUTTING_TOKENS and queue and len(batch) < BATCH_PROMPTS:
        longest = max(longest, len(queue[0].tokens))
        if longest >= CUTTING_TOKENS or longest * (len(batch) + 1) > BATCH_TOKENS:
            break
        batch.append(queue.popleft())
    return batch


class Server:
    """Answers over one socket until stopped.

    Args:
        address: ``ipc://PATH``, or ``ipc://@NAME`` for a name that is no file.
        model: What to ask.
        secret: Nobody without it may ask. None: whoever may open the address.

    Raises:
        ConfigError: The address cannot be used.
    """

    def __init__(self, address: str, model: Model, secret: Secret | None = None) -> None:
        self._model = model
        self._queue: deque[Queued] = deque()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._gatekeeper: Gatekeeper | None = None
        if secret is not None:
            curve = Curve(secret, CHANNEL)
            self._gatekeeper = Gatekeeper(self._context, curve)
            curve.listen(self._socket)
        self._wake, self._wake_end = os.pipe()
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._close()
            raise ConfigError(f"--address {address}: {error}") from error

    def stop(self) -> None:
        """Let `run` return, after the batch that is being computed (any thread)."""
        os.write(self._wake_end, b"\0")

    def run(self) -> None:
        """Answer until `stop`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        if self._gatekeeper is not None:
            poller.register(self._gatekeeper.socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(0 if self._queue else None))
                if self._wake in ready:
                    return
                if self._gatekeeper is not None:
                    self._gatekeeper.answer()
                if self._socket in ready:
                    self._drain()
                if self._queue:
                    self._answer(take_batch(self._queue))
        finally:
            self._close()

    def _drain(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                client, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
                try:
                    if len(parts) != 1:
                        raise ProtocolError(f"{len(parts)} parts instead of one")
                    self._take(client, decode_asks(parts[0]))
                except ProtocolError as error:
                    _log.warning("dropped a frame: %s", error)

    def _take(self, client: bytes, asks: Asks) -> None:
        if asks.withdrawn:
            gone = set(asks.withdrawn)
            kept = [
                each for each in self._queue if each.client != client or each.number not in gone
            ]
            self._queue = deque(kept)
        refused: list[int] = []
        failed: list[int] = []
        for prompt in asks.prompts:
            if len(self._queue) >= QUEUE_PROMPTS:
                refused.append(prompt.number)
            elif (queued := self._encoded(client, prompt)) is not None:
                self._queue.append(queued)
            else:
                failed.append(prompt.number)
        if refused or failed:
            self._send(client, Answers(refused=refused, failed=failed))

    def _encoded(self, client: bytes, prompt: Prompt) -> Queued | None:
        try:
            return Queued(client, prompt.number, self._model.encode(prompt.token_ids))
        except Exception:  # whatever a tokenizer makes of strange ids, others must not suffer
            _log.exception("a prompt of %d tokens cannot be read", len(prompt.token_ids))
            return None

    def _answer(self, batch: list[Queued]) -> None:
        try:
            buckets = self._model.classify([each.tokens for each in batch])
        except Exception:
            _log.exception("a batch of %d prompts failed", len(batch))
            buckets = None
        for client in dict.fromkeys(each.client for each in batch):
            mine = [index for index, each in enumerate(batch) if each.client == client]
            numbers = [batch[index].number for index in mine]
            if buckets is None:
                self._send(client, Answers(failed=numbers))
            else:
                found = [(batch[index].number, buckets[index]) for index in mine]
                self._send(client, Answers(buckets=found))

    def _send(self, client: bytes, answers: Answers) -> None:
        with contextlib.suppress(zmq.Again):  # it is gone, or does not read
            self._socket.send_multipart([client, encode(answers)], zmq.NOBLOCK)

    def _close(self) -> None:
        self._socket.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()
        os.close(self._wake)
        os.close(self._wake_end)
