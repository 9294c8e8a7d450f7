"""A running output goes on at another engine, or where it was: schedulers and KV are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import CHUNKS, FULL, WINDOW, run_until, told_by
from tests.engine.pair import Pair, prompt
from vllm_tetri.handover import DecodeParams, to_params
from vllm_tetri.messages import CancelTransfer, Move, Moved, Moving
from vllm_tetri.types import RequestId, TransferId

HERE, THERE = "cmpl-x-0-1111", "cmpl-x-0-2222"  # vLLM's names of one request
TOKENS = prompt(70)
NUM_OUTPUT = 800
GONE = "it has ended, or one of its choices, or another router's has its name"
TRANSFER = TransferId("router/move")

pytestmark = pytest.mark.usefixtures("continues")


class Both:
    """Two engines that decode, and what they tell routers."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.pair = Pair(folder, num_blocks=120, arena_bytes=1 << 21, **options)
        self.here, self.there = self.pair.prefill, self.pair.decode
        self.told = told_by(self.here, self.there)
        self.request = self.here.add(HERE, TOKENS, max_tokens=NUM_OUTPUT)
        self.here.run_until(lambda: len(self.here.outputs.get(HERE, ())) > 20)

    def order(self, transfer: str = TRANSFER, **options: Any) -> None:
        endpoint = self.there.info.kv_endpoint
        order = Move(RequestId("x"), TransferId(transfer), self.there.info.id, endpoint, **options)
        self.here.endpoint.take(order)
        self.here.step()

    def answer(self) -> Moving:
        """What the engine that has the output told last."""
        return [each for each in self.told if isinstance(each, Moving)][-1]

    def open(self, max_tokens: int = NUM_OUTPUT) -> Any:
        """The decode request comes, as the router opens it."""
        answer = self.answer()
        params = DecodeParams(
            answer.transfer, answer.digest, is_early=True, kv_tokens=answer.kv_tokens
        )
        return self.there.add(THERE, TOKENS, max_tokens=max_tokens, params=to_params(params))

    def run(self, condition: Any) -> None:
        """Step both until a condition holds."""
        run_until(condition, self.here, self.there)

    def moved(self) -> Any:
        request = self.open()
        self.run(lambda: THERE in self.there.outputs)
        return request

    def stays(self) -> None:
        """The output goes on where it was to its end, and nothing is left."""
        self.run(lambda: HERE in self.here.finished)
        assert self.here.outputs[HERE] == [7] * NUM_OUTPUT
        self.there.endpoint.take(CancelTransfer(TRANSFER))  # by the router
        if THERE in self.there.scheduler.requests:
            self.there.abort(THERE)
        self.run(lambda: self.here.is_at_rest and self.there.is_at_rest)


@contextmanager
def made(folder: Path, **options: Any) -> Iterator[Both]:
    both = Both(folder, **{"transfer_timeout_s": 5.0, **options})
    yield both
    both.pair.close()


@pytest.fixture(
    params=[
        {},
        {"specs": (FULL, WINDOW)},
        {"specs": (FULL, CHUNKS)},
        {"num_ranks": (2, 1), "num_heads": 2},
    ],
    ids=["full", "window", "chunks", "ranks"],
)
def any_layout(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Both]:
    with made(tmp_path, **request.param) as both:
        yield both


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    with made(tmp_path) as both:
        yield both


def test_the_output_goes_on_with_its_kv_and_no_token_is_lost(any_layout: Both) -> None:
    both = any_layout
    both.order()
    (num_tokens,) = both.answer().kv_tokens
    request = both.moved()
    assert both.there.holds(request, num_tokens)
    assert both.there.computed[THERE] < 3  # it computed what has no KV, and decodes
    prior = num_tokens + 1 - len(TOKENS)
    assert both.here.outputs[HERE] == [7] * prior  # it stopped there
    assert both.told[-1] == Moved(TRANSFER)
    both.here.abort(HERE)
    both.run(lambda: THERE in both.there.finished)
    assert both.there.outputs[THERE] == [7] * NUM_OUTPUT
    both.run(lambda: both.here.is_at_rest and both.there.is_at_rest)


def test_a_choice_that_ends_with_its_first_token_has_moved(both: Both) -> None:
    both.order()
    (num_tokens,) = both.answer().kv_tokens
    both.open(num_tokens + 2 - len(TOKENS))
    both.run(lambda: THERE in both.there.finished)
    assert both.told.count(Moved(TRANSFER)) == 1
    both.here.abort(HERE)
    both.run(lambda: both.here.is_at_rest and both.there.is_at_rest)


def test_while_it_waits_others_go_on(both: Both) -> None:
    both.order()
    other = both.here.add("cmpl-y-0-3333", prompt(30), max_tokens=40)
    both.run(lambda: "cmpl-y-0-3333" in both.here.finished)
    assert other.num_output_tokens == 40
    assert len(both.here.outputs[HERE]) < 400
    both.here.endpoint.take(CancelTransfer(TRANSFER))
    both.stays()


@pytest.mark.parametrize("when", ["at once", "while it waits", "when the other one has it"])
def test_a_move_that_is_called_off_leaves_the_output_where_it_was(both: Both, when: str) -> None:
    both.order()
    if when == "while it waits":
        both.run(lambda: both.here.endpoint.moves.parked)
    elif when == "when the other one has it":
        both.moved()
    both.here.endpoint.take(CancelTransfer(TRANSFER))
    both.stays()
    assert not both.answer().problem  # its router knows


def test_it_goes_on_where_it_was_if_the_other_one_has_no_room(tmp_path: Path) -> None:
    with made(tmp_path, decode={"arena_bytes": 4096}) as both:
        both.order()
        both.open()
        both.run(lambda: both.answer().problem)
        assert "its KV cannot be sent" in both.answer().problem
        both.stays()


def test_it_goes_on_where_it_was_if_the_other_one_is_gone(tmp_path: Path) -> None:
    with made(tmp_path, transfer_timeout_s=0.5) as both:
        both.there.endpoint.receiver.close()
        both.order()
        both.here.run_until(lambda: both.answer().problem)
        both.here.run_until(lambda: HERE in both.here.finished)
        assert both.here.outputs[HERE] == [7] * NUM_OUTPUT


def test_it_goes_on_where_it_was_if_the_other_one_does_not_in_time(tmp_path: Path) -> None:
    with made(tmp_path, transfer_timeout_s=0.3) as both:
        both.order()
        both.here.run_until(lambda: both.answer().problem)
        assert both.answer().problem == "it did not go on elsewhere in 0.3 s"
        both.stays()


def test_an_output_that_is_preempted_stays(both: Both) -> None:
    both.order()
    others = [both.here.add(f"cmpl-{name}-0-1", prompt(200), max_tokens=300) for name in "abcdefgh"]
    both.run(lambda: both.request.num_preemptions or both.answer().problem)
    assert both.answer().problem
    for each in others:
        both.here.abort(each.request_id)
    both.stays()


def test_an_output_that_does_not_move_here_ends_here(both: Both) -> None:
    both.order()
    both.open()
    both.here.abort(HERE)
    both.run(lambda: THERE in both.there.finished)
    assert both.there.computed[THERE] == 0
    both.run(lambda: both.here.is_at_rest and both.there.is_at_rest)


@pytest.mark.parametrize(
    ("name", "options", "problem"), [("x", {"num_choices": 2}, GONE), ("unknown", {}, GONE)]
)
def test_what_is_not_here_does_not_move(both: Both, name: str, options: Any, problem: str) -> None:
    endpoint, there = both.there.info.kv_endpoint, both.there.info.id
    both.here.endpoint.take(Move(RequestId(name), TRANSFER, there, endpoint, **options))
    both.here.step()
    assert both.answer().problem == problem
    both.stays()


def test_an_output_moves_once_at_a_time_and_not_at_its_end(both: Both) -> None:
    both.order()
    both.order("router/again")
    assert both.answer() == Moving(
        RequestId("x"), TransferId("router/again"), problem="it moves already"
    )
    both.here.endpoint.take(CancelTransfer(TRANSFER))
    both.here.run_until(lambda: len(both.here.outputs[HERE]) > NUM_OUTPUT - 4)
    both.order("router/late")
    assert both.answer().problem == "it is about to end"
    both.stays()


def test_an_instance_whose_kv_may_change_moves_nothing(both: Both) -> None:
    both.order()
    both.here.scheduler.connector.reset_cache()
    assert both.answer().problem == "its KV may become invalid"
    both.order("router/again")
    assert both.answer().problem == "its KV may become invalid"
    both.stays()


def test_a_request_whose_name_only_looks_alike_does_not_move(tmp_path: Path) -> None:
    """Names are those of clients; vLLM puts its own behind them."""
    with made(tmp_path) as both:
        both.here.add("cmpl-x-0-0-3333", prompt(40, seed=5), max_tokens=NUM_OUTPUT)
        both.here.run_until(lambda: "cmpl-x-0-0-3333" in both.here.outputs)
        both.order()
        assert len(both.answer().kv_tokens) == 1
        both.stays()
        both.here.abort("cmpl-x-0-0-3333")


def test_two_requests_of_one_name_do_not_move(tmp_path: Path) -> None:
    """Each of two routers has one: which of them is meant is unknown."""
    with made(tmp_path) as both:
        both.here.add("cmpl-x-0-3333", prompt(40, seed=5), max_tokens=NUM_OUTPUT)
        both.here.run_until(lambda: "cmpl-x-0-3333" in both.here.outputs)
        both.order()
        assert both.answer().problem == GONE
        both.run(lambda: both.here.finished.keys() >= {HERE, "cmpl-x-0-3333"})
        assert both.here.outputs["cmpl-x-0-3333"] == [7] * NUM_OUTPUT


def test_an_output_that_comes_and_goes_is_counted_where_it_ends(tmp_path: Path) -> None:
    """Here it is aborted before it went on, though its prior output had come."""
    with made(tmp_path) as both:
        both.here.scheduler.requests[HERE].sampling_params.stop = ["."]
        both.order()
        request = both.open()
        request.sampling_params.stop = ["."]
        request.append_output_token_ids([7] * 50)  # as when the prior output has come
        both.there.abort(THERE)
        both.stays()
        ends = (each.load().decodes_done for each in (both.here, both.there))
        assert [*ends] == [1, 0]
        assert both.there.load().usual_tokens == 0


def test_a_stop_string_that_vllms_server_finds_ends_an_output_whose_length_is_learnt(
    tmp_path: Path,
) -> None:
    with made(tmp_path) as both:
        both.request.sampling_params.stop = ["."]
        both.here.abort(HERE)
        assert both.here.load().usual_tokens > 0
