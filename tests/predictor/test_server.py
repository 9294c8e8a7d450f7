"""The loop of a predictor process, with a classifier that only counts."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from examples.predictor.server import (
    BATCH_PROMPTS,
    BATCH_TOKENS,
    CUTTING_TOKENS,
    MAX_PACKET_BYTES,
    Server,
    Submitted,
    Withdrawn,
    decode_replies,
    encode,
    main,
    shortened,
    take_batch,
)
from tests.mutation import COUNTS, strange_frame
from tests.predictor.tiny_artefact import make

TIMEOUT_S = 10.0


class Counting:
    """A prompt's bucket is its number of tokens; it can be held up and made to fail."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.entered = threading.Event()

    def encode(self, token_ids: Sequence[int]) -> list[int]:
        if -1 in token_ids:
            raise OverflowError("no such token")
        return list(token_ids)

    def classify(self, batch: Sequence[Sequence[int]]) -> list[int]:
        self.entered.set()
        assert self.may_go.wait(TIMEOUT_S)
        self.batches.append(len(batch))
        if [666] in [list(each) for each in batch]:
            raise RuntimeError("out of memory")
        return [len(each) for each in batch]


class Served:
    """A server in a thread, and the instance's end of its socket."""

    def __init__(self) -> None:
        self.channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(TIMEOUT_S)
        self.model = Counting()
        self.thread = threading.Thread(
            target=Server(self._theirs, self.model.encode, self.model.classify).run
        )
        self.thread.start()
        assert self.replies() == []  # the model is loaded

    def ask(self, *prompts: tuple[int, list[int]]) -> None:
        for number, tokens in prompts:
            self.channel.send(encode(Submitted(number, tokens)))

    def replies(self) -> list[tuple[int, int | None]]:
        return decode_replies(self.channel.recv(MAX_PACKET_BYTES)).buckets

    def buckets(self, count: int) -> dict[int, int | None]:
        found: dict[int, int | None] = {}
        while len(found) < count:
            found.update(self.replies())
        return found

    def close(self) -> None:
        self.model.may_go.set()
        self.channel.close()
        self.thread.join(TIMEOUT_S)
        self._theirs.close()
        assert not self.thread.is_alive()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def batches(*lengths: int) -> list[list[int]]:
    queue = deque(Submitted(index, [1] * length) for index, length in enumerate(lengths))
    found = []
    while queue:
        found.append([len(each.token_ids) for each in take_batch(queue)])
    return found


def test_batches_are_by_arrival_and_long_prompts_run_alone() -> None:
    long = CUTTING_TOKENS
    assert batches(5, 300, 7) == [[5, 300, 7]]
    assert batches(5, long, 7, 8) == [[5], [long], [7, 8]]
    assert batches(long, long) == [[long], [long]]
    assert [len(batch) for batch in batches(*[1] * (BATCH_PROMPTS + 1))] == [BATCH_PROMPTS, 1]


def test_a_padded_batch_has_a_bound() -> None:
    for batch in batches(*[10, 500, 3, 400, 500, 20, 9, 8] * 4):
        assert max(batch) * len(batch) <= BATCH_TOKENS


def test_what_comes_during_a_batch_makes_the_next_one(served: Served) -> None:
    served.model.may_go.clear()
    served.ask((1, [0]))
    assert served.model.entered.wait(TIMEOUT_S)
    served.ask(*((number, [0] * number) for number in (2, 3, 4)))
    served.model.may_go.set()
    assert served.buckets(4) == {1: 1, 2: 2, 3: 3, 4: 4}
    assert served.model.batches == [1, 3]


def test_withdrawn_prompts_are_not_computed(served: Served) -> None:
    served.model.may_go.clear()
    served.ask((1, [0]))
    assert served.model.entered.wait(TIMEOUT_S)
    served.ask((2, [0] * 2), (3, [0] * 3))
    served.channel.send(encode(Withdrawn(2)))
    served.model.may_go.set()
    assert served.buckets(2) == {1: 1, 3: 3}
    assert sum(served.model.batches) == 2


def test_what_cannot_be_computed_fails_alone(served: Served) -> None:
    for bad in ([-1], [666]):
        served.ask((1, bad))
        assert served.replies() == [(1, None)]
    served.ask((3, [0]))
    assert served.buckets(1) == {3: 1}


@pytest.mark.parametrize("count", COUNTS)
def test_strange_packets_harm_no_later_prompt(served: Served, count: int) -> None:
    rng, good = Random(31), encode(Submitted(1, [1, 2]))
    for number in range(count):
        if packet := strange_frame(rng, good, 0):
            served.channel.send(packet)
        if number % 50 == 0:
            served.ask((10**9 + number, [1] * 4))
            while (10**9 + number, 4) not in served.replies():
                pass


def test_only_the_ends_of_a_long_prompt_travel() -> None:
    token_ids = list(range(10_000))
    short = shortened(token_ids)
    assert len(short) < 5_000
    assert (short[0], short[-1]) == (0, 9_999)
    assert shortened([1, 2]) == [1, 2]
    assert len(encode(Submitted(1 << 60, shortened([1 << 30] * 10_000)))) < MAX_PACKET_BYTES


def test_what_cannot_be_served_is_named_in_a_line(
    tmp_path: Path, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, damaged = make(tmp_path / "whole"), make(tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for folder, tokenizer, problem in (
        (tmp_path, tiny_llama, "no predictor"),
        (whole, tmp_path, "tokenizer"),
        (damaged, tiny_llama, "damaged"),
    ):
        caplog.clear()
        words = [str(folder), "--tokenizer", str(tokenizer), "--socket", "0"]
        assert main(words) == 2
        assert problem in caplog.text
