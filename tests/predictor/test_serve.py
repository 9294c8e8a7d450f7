"""The loop of a predictor process, with a model that only counts."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import zmq

from tests.mutation import COUNTS, strange_frame
from vllm_tetri.control.curve import Curve
from vllm_tetri.errors import ConfigError, ProtocolError
from vllm_tetri.predictor import protocol
from vllm_tetri.predictor.protocol import Answers, Asks, Prompt, decode_answers, encode
from vllm_tetri.predictor.server import (
    BATCH_PROMPTS,
    BATCH_TOKENS,
    CUTTING_TOKENS,
    Queued,
    Server,
    take_batch,
)
from vllm_tetri.secret import Secret

TIMEOUT_MS = 10_000


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
        assert self.may_go.wait(TIMEOUT_MS / 1000)
        self.batches.append(len(batch))
        if [666] in [list(each) for each in batch]:
            raise RuntimeError("out of memory")
        return [len(each) for each in batch]


class Client:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.socket.connect(address)

    def ask(self, prompts: dict[int, list[int]], withdrawn: Sequence[int] = ()) -> None:
        new = [Prompt(number, tokens) for number, tokens in prompts.items()]
        self.socket.send(encode(Asks(new, list(withdrawn))))

    def answers(self) -> Answers:
        return decode_answers(self.socket.recv())

    def buckets(self, count: int) -> dict[int, int]:
        found: dict[int, int] = {}
        while len(found) < count:
            found.update(self.answers().buckets)
        return found


class Served:
    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder / 'socket'}"
        self.model = Counting()
        self.server = Server(self.address, self.model)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.context = zmq.Context()
        self.clients: list[Client] = []

    def client(self) -> Client:
        self.clients.append(Client(self.context, self.address))
        return self.clients[-1]

    def close(self) -> None:
        self.model.may_go.set()
        self.server.stop()
        self.thread.join(TIMEOUT_MS / 1000)
        assert not self.thread.is_alive()
        for client in self.clients:
            client.socket.close()
        self.context.term()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


def queue_of(*lengths: int) -> deque[Queued]:
    return deque(Queued(b"", index, [1] * length) for index, length in enumerate(lengths))


def batches(*lengths: int) -> list[list[int]]:
    queue = queue_of(*lengths)
    found = []
    while queue:
        found.append([len(each.tokens) for each in take_batch(queue)])
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


def test_every_prompt_is_answered_with_its_number(served: Served) -> None:
    one, other = served.client(), served.client()
    one.ask({1: [0] * 3, 2: []})
    other.ask({1: [0] * 7})

    assert one.buckets(2) == {1: 3, 2: 0}
    assert other.buckets(1) == {1: 7}


def test_what_comes_during_a_batch_makes_the_next_one(served: Served) -> None:
    client = served.client()
    served.model.may_go.clear()
    client.ask({1: [0]})
    assert served.model.entered.wait(TIMEOUT_MS / 1000)
    for number in (2, 3, 4):
        client.ask({number: [0] * number})
    served.model.may_go.set()

    assert client.buckets(4) == {1: 1, 2: 2, 3: 3, 4: 4}
    assert served.model.batches[0] == 1


def test_withdrawn_prompts_are_not_computed(served: Served) -> None:
    client = served.client()
    served.model.may_go.clear()
    client.ask({1: [0]})
    assert served.model.entered.wait(TIMEOUT_MS / 1000)
    client.ask({2: [0] * 2, 3: [0] * 3})
    client.ask({}, withdrawn=[2])
    served.model.may_go.set()

    assert client.buckets(2) == {1: 1, 3: 3}
    assert sum(served.model.batches) == 2


def test_a_full_queue_refuses_at_once(served: Served) -> None:
    client = served.client()
    served.model.may_go.clear()
    client.ask({0: [0]})
    assert served.model.entered.wait(TIMEOUT_MS / 1000)
    client.ask({number: [0] for number in range(1, protocol.QUEUE_PROMPTS + 3)})
    served.model.may_go.set()

    assert client.answers().buckets == [(0, 1)]
    refused = client.answers().refused
    assert refused == [protocol.QUEUE_PROMPTS + 1, protocol.QUEUE_PROMPTS + 2]
    assert len(client.buckets(protocol.QUEUE_PROMPTS)) == protocol.QUEUE_PROMPTS


def test_what_cannot_be_computed_fails_alone(served: Served) -> None:
    client = served.client()
    client.ask({1: [-1]})
    assert client.answers().failed == [1]
    client.ask({2: [666]})
    assert client.answers().failed == [2]
    client.ask({3: [0]})
    assert client.buckets(1) == {3: 1}


def test_garbage_harms_nobody(served: Served) -> None:
    client = served.client()
    client.socket.send(b"hello")
    client.socket.send_multipart([b"a", b"b"])
    client.socket.send(encode(Answers()))
    client.ask({1: [0]})
    assert client.buckets(1) == {1: 1}


def test_frames_of_another_protocol_are_refused() -> None:
    frame = encode(Asks([Prompt(1, [2, 3])]))
    assert protocol.decode_asks(frame).prompts[0].token_ids == [2, 3]
    for wrong in (b"", b"TTPR", frame[:-1], b"TTRI" + frame[4:], frame[:4] + b"\x09" + frame[5:]):
        with pytest.raises(ProtocolError):
            protocol.decode_asks(wrong)


def test_only_the_ends_of_a_long_prompt_travel() -> None:
    token_ids = list(range(10_000))
    short = protocol.shortened(token_ids)
    assert len(short) < 5_000
    assert (short[0], short[-1]) == (0, 9_999)
    assert protocol.shortened([1, 2]) == [1, 2]


def test_an_address_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--address"):
        Server(f"ipc://{tmp_path / 'no' / 'socket'}", Counting())


class Guarded:
    """A predictor's port that wants a secret, and who comes to it."""

    def __init__(self) -> None:
        self.address = f"ipc://@tetri-test-{secrets.token_hex(8)}"
        self.secret = Secret.make()
        self.server = Server(self.address, Counting(), self.secret)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def dealer(self, secret: Secret | None) -> zmq.Socket[bytes]:
        made = self.context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        if secret is not None:
            Curve(secret, protocol.CHANNEL).call(made)
        made.connect(self.address)
        return made

    def bucket(self, tokens: list[int]) -> int:
        """What the rightful instance is told."""
        dealer = self.dealer(self.secret)
        dealer.send(encode(Asks([Prompt(1, tokens)])))
        assert dealer.poll(TIMEOUT_MS)
        ((_, bucket),) = decode_answers(dealer.recv()).buckets
        dealer.close()
        return bucket

    def close(self) -> None:
        self.server.stop()
        self.thread.join(TIMEOUT_MS / 1000)
        assert not self.thread.is_alive()
        self.context.destroy(linger=0)


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    made = Guarded()
    yield made
    made.close()


def test_only_the_instance_that_started_it_may_ask(guarded: Guarded) -> None:
    """The address is no file, so every user of the machine can open it."""
    strangers = [guarded.dealer(secret) for secret in (None, Secret.make())]
    for each in strangers:
        each.send(encode(Asks([Prompt(7, [1])])))
    assert guarded.bucket([1, 2, 3]) == 3
    assert not any(each.poll(200) for each in strangers)
    for each in strangers:
        each.close()


@pytest.mark.parametrize("count", COUNTS)
def test_strange_frames_harm_no_later_question(guarded: Guarded, count: int) -> None:
    rng = Random(31)
    good = encode(Asks([Prompt(1, [1, 2]), Prompt(2, [3])], [4]))
    evil = guarded.dealer(guarded.secret)
    for index in range(count):
        evil.send(strange_frame(rng, good, 5))
        while evil.poll(0):
            evil.recv()
        if index % 500 == 0:
            assert guarded.bucket([1] * 4) == 4
    evil.close()
    assert guarded.bucket([1] * 5) == 5
