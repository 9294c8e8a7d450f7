"""The process of a length predictor: take prompts from an instance, batch them, reply.

An instance starts it (`client`) and holds the other end of its socket pair, which no other process
can open. Prompts come as the target model's tokens; they are turned back into text here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from examples.predictor.model import load
from vllm_tetri.errors import ConfigError
from vllm_tetri.logs import configure_logging

NICE = 5
MAX_PACKET_BYTES = 64 << 10
# Paper section 3.3.2: prompts are padded to the longest of their batch; longer ones run alone.
CUTTING_TOKENS = 512
# A batch is one forward pass that cannot be interrupted, so it should not take long.
BATCH_PROMPTS = 16
BATCH_TOKENS = 2048
_END_TOKENS = 2048  # of a prompt travel: a predictor's window keeps its head and tail
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class Submitted(msgspec.Struct, frozen=True, tag=True):
    """Instance → predictor: a prompt; `number` names it in the reply."""

    number: int
    token_ids: list[int]


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """Instance → predictor: the request of this prompt has ended."""

    number: int


class Replies(msgspec.Struct, frozen=True, tag=True):
    """Predictor → instance: the bucket of each prompt, None if it failed. The first is empty and
    means that the model is loaded."""

    buckets: list[tuple[int, int | None]] = []


encode = msgspec.msgpack.Encoder().encode
decode_replies = msgspec.msgpack.Decoder(Replies).decode
_decode_queries = msgspec.msgpack.Decoder(Submitted | Withdrawn).decode


def shortened(token_ids: Sequence[int]) -> list[int]:
    """The part of a prompt that travels: all of it, or its two ends."""
    if len(token_ids) <= 2 * _END_TOKENS:
        return list(token_ids)
    return [*token_ids[:_END_TOKENS], *token_ids[-_END_TOKENS:]]


def take_batch(queue: deque[Submitted]) -> list[Submitted]:
    """Remove the next batch from the head of a queue that is not empty, of prompts that have been
    encoded."""
    batch = [queue.popleft()]
    longest = len(batch[0].token_ids)
    while longest < CUTTING_TOKENS and queue and len(batch) < BATCH_PROMPTS:
        longest = max(longest, len(queue[0].token_ids))
        if longest >= CUTTING_TOKENS or longest * (len(batch) + 1) > BATCH_TOKENS:
            break
        batch.append(queue.popleft())
    return batch


class Server:
    """Replies over one socket until its other end closes.

    `tokenize` turns the target's tokens of a prompt into the predictor's own, and `predict`
    gives the buckets of such prompts in one forward pass.
    """

    def __init__(
        self,
        channel: socket.socket,
        tokenize: Callable[[Sequence[int]], list[int]],
        predict: Callable[[Sequence[Sequence[int]]], list[int]],
    ) -> None:
        self._channel, self._tokenize, self._predict = channel, tokenize, predict
        self._queue: deque[Submitted] = deque()

    def run(self) -> None:
        """Serve; the instance bounds the number of its prompts, and so the queue."""
        with contextlib.suppress(EOFError, ConnectionError):
            self._channel.send(encode(Replies()))
            while True:
                for packet in self._packets():
                    self._take(packet)
                if self._queue:
                    self._channel.send(encode(self._classify(take_batch(self._queue))))

    def _packets(self) -> Iterator[bytes]:
        """All packets that are there; waits for one when there is nothing else to do."""
        flags = socket.MSG_DONTWAIT if self._queue else 0
        with contextlib.suppress(BlockingIOError):
            while packet := self._channel.recv(MAX_PACKET_BYTES, flags):
                yield packet
                flags = socket.MSG_DONTWAIT
            raise EOFError

    def _take(self, packet: bytes) -> None:
        try:
            query = _decode_queries(packet)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            _log.warning("dropped a packet of %d bytes: %s", len(packet), error)
            return
        if isinstance(query, Withdrawn):
            self._queue = deque(each for each in self._queue if each.number != query.number)
            return
        try:
            encoded = self._tokenize(query.token_ids)
            self._queue.append(Submitted(query.number, encoded))
        except Exception:  # whatever a tokenizer makes of strange ids
            _log.exception("a prompt of %d tokens cannot be read", len(query.token_ids))
            self._channel.send(encode(Replies([(query.number, None)])))

    def _classify(self, batch: list[Submitted]) -> Replies:
        try:
            buckets = self._predict([each.token_ids for each in batch])
        except Exception:
            _log.exception("a batch of %d prompts failed", len(batch))
            return Replies([(each.number, None) for each in batch])
        return Replies([(each.number, bucket) for each, bucket in zip(batch, buckets, strict=True)])


def _decoder_of(tokenizer: str) -> Callable[[Sequence[int]], str]:
    from transformers import AutoTokenizer

    try:
        decode = AutoTokenizer.from_pretrained(tokenizer).decode
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {tokenizer}: {str(error).splitlines()[0]}") from error
    # Special tokens stay: the artefact knows the chat template by them.
    return partial(decode, clean_up_tokenization_spaces=False)


def end_with(parent: int) -> None:
    """Let the kernel end this process with its parent; ConfigError if that has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ConfigError(f"the instance with process id {parent} has ended")


def main(words: Sequence[str] | None = None) -> int:
    """Serve a folder that the recipe in ``examples/predictor`` wrote; `client` starts this."""
    parser = argparse.ArgumentParser(prog="predictor")
    parser.add_argument("artefact", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--cores", default="")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int)
    options = parser.parse_args(words)
    try:
        configure_logging()
        if options.parent is not None:
            end_with(options.parent)
            os.nice(NICE)
        if options.cores:
            os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
        artefact, decode = load(options.artefact), _decoder_of(options.tokenizer)
    except ConfigError as error:
        _log.error("%s", error)
        return 2
    with socket.socket(fileno=options.socket) as channel:
        Server(channel, lambda ids: artefact.encode(decode(ids)), artefact.predict).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
