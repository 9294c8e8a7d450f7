"""What the choice of a decode instance is told."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.policy.builders import instance, view
from vllm_tetri.config import TetriConfig
from vllm_tetri.control.view import Snapshot
from vllm_tetri.engine.dispatcher import Dispatcher
from vllm_tetri.handover import PrefillParams
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.types import InstanceId, Prediction, RequestId, Role, TransferId

FIRST, THIRD = Prediction(0, 4, 200), Prediction(2, 4, 200)
PERIOD_S = 0.1
SPLIT = PrefillParams(TransferId("t"), RequestId("r"))


def to(endpoint: str) -> Dispatch:
    return Dispatch(InstanceId("any"), endpoint, "")


class Scene:
    """A dispatcher whose view, predictions and clock are set by hand."""

    def __init__(self, *views: Any, **config: Any) -> None:
        self.me = instance("me", "prefill")
        self.now = 10.0
        self.sees(*views)
        self.prediction: Prediction | None = None
        self.lengths = Lengths(200, 4)
        source: Any = self  # of predictions and snapshots
        self.dispatcher = Dispatcher(
            TetriConfig(role=Role.PREFILL, report_period_s=PERIOD_S, **config),
            self.me.info,
            self.lengths,
            source,
            source,
            rng=Random(0),
            clock=lambda: self.now,
        )

    def snapshot(self) -> Snapshot:
        return self.newest

    def get(self, request_id: str, *, is_due: bool = False) -> Prediction | None:
        return self.prediction

    def sees(self, *views: Any) -> None:
        self.newest = Snapshot(view(self.me, *views), self.now)

    def choose(self, request: Request, *, may_wait: bool = False) -> str | None:
        if not may_wait:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        dispatch = self.dispatcher.choose(request, SPLIT, 10, frozenset())
        return dispatch.instance if dispatch is not None else None

    def output_tokens(self, request: Request) -> int:
        """Predicted, as the need of the request says."""
        self.choose(request)
        need = self.dispatcher.need(request, 10)
        return need.total_tokens - need.prompt_tokens


def request(num_tokens: int = 10, *, max_tokens: int = 5000, name: str = "a") -> Request:
    return Request(name, [1] * num_tokens, SamplingParams(max_tokens=max_tokens), None)


def decode(name: str = "d", **load: Any) -> Any:
    room = {"blocks_total": 1000, "arena_total_bytes": 1000}
    return instance(name, "decode", **{**room, **load})


def test_what_decode_instances_saw_goes_before_the_own_prior() -> None:
    scene = Scene(decode("a", bucket_tokens=(60, 0, 500, 0, 90)), decode("b"))
    scene.prediction = THIRD
    assert scene.output_tokens(request()) == 500
    scene.prediction = FIRST
    assert scene.output_tokens(request()) == 60
    assert not scene.dispatcher.need(request(), 10).is_heavy
    scene.prediction = None
    assert scene.output_tokens(request()) == 90


def test_the_mean_is_over_those_with_the_same_buckets() -> None:
    scene = Scene(
        decode("a", bucket_tokens=(60, 0, 500, 0, 90)),
        decode("b", bucket_tokens=(80, 0, 700, 0, 110)),
        decode("c", bucket_tokens=(1, 2, 3)),
    )
    scene.prediction = THIRD
    assert scene.output_tokens(request()) == 600


def test_without_reports_the_own_expectation_counts() -> None:
    scene = Scene(decode())
    scene.prediction = THIRD
    assert scene.output_tokens(request()) == scene.lengths.total_tokens(THIRD, 0, End.EXPECTED)
    assert scene.dispatcher.need(request(), 10).is_heavy


@pytest.mark.parametrize(("end", "tokens"), [("lower", 400), ("upper", 600)])
def test_the_end_that_is_reserved_is_an_option(end: str, tokens: int) -> None:
    scene = Scene(decode(bucket_tokens=(60, 0, 500, 0, 90)), reserve_end=End(end))
    scene.prediction = THIRD
    assert scene.output_tokens(request()) == tokens


def test_the_client_and_the_window_bound_an_output() -> None:
    scene = Scene(decode(bucket_tokens=(60, 0, 500, 0, 90)))
    scene.prediction = THIRD
    assert scene.output_tokens(request(max_tokens=40)) == 40
    assert not scene.dispatcher.need(request(max_tokens=40), 10).is_heavy
    window = scene.me.info.max_model_len
    assert scene.output_tokens(request(window - 7)) == 7
    assert scene.output_tokens(request(window)) == 0


def test_a_prompt_is_held_for_one_period_when_no_instance_has_capacity() -> None:
    scene = Scene(decode(arena_total_bytes=0))
    assert scene.choose(request(), may_wait=True) is None
    scene.now += PERIOD_S / 2
    assert scene.choose(request(), may_wait=True) is None
    assert scene.choose(request(name="b"), may_wait=False) == "d"
    scene.now += PERIOD_S / 2
    assert scene.choose(request(), may_wait=True) == "d"


def test_a_hold_ends_when_an_instance_has_capacity() -> None:
    scene = Scene(decode(arena_total_bytes=0))
    assert scene.choose(request(), may_wait=True) is None
    scene.sees(decode("free"))
    assert scene.choose(request(), may_wait=True) == "free"


def test_without_instances_there_is_nothing_to_wait_for() -> None:
    assert Scene().choose(request(), may_wait=True) is None


def test_an_unreachable_instance_is_avoided_for_a_while() -> None:
    scene = Scene(decode("a"), decode("b"))
    cut = decode("a").info.kv_endpoint
    scene.dispatcher.record_sent(to(cut), was_reached=False)
    chosen = {scene.choose(request(name=str(number))) for number in range(20)}
    assert chosen == {"b"}
    scene.now += 10
    chosen_later = [scene.choose(request(name=str(number))) for number in range(100)]
    assert chosen_later.count("a") == 1  # tries it for all of them
    scene.dispatcher.record_sent(to(cut), was_reached=True)
    assert "a" in {scene.choose(request(name=str(number))) for number in range(20)}


def test_an_unreachable_instance_is_better_than_none() -> None:
    scene = Scene(decode("a"))
    scene.dispatcher.record_sent(to(decode("a").info.kv_endpoint), was_reached=False)
    assert scene.choose(request()) == "a"
