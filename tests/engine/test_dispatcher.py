"""What the choice of a decode instance is told, and what follows for requests that any instance
may decode."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.policy.builders import instance, serving, view
from vllm_tetri.config import TetriConfig
from vllm_tetri.control.view import Snapshot
from vllm_tetri.engine.dispatcher import Dispatcher
from vllm_tetri.handover import PrefillParams
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.lengths import End, Lengths
from vllm_tetri.types import InstanceId, InstanceView, Prediction, RequestId, Role, TransferId

FIRST, THIRD, LAST = (Prediction.of_bucket(bucket, 200) for bucket in (0, 2, 3))
PERIOD_S = 0.1


class Scene:
    """A dispatcher of an instance `me` whose view, predictions and clock are set by hand."""

    def __init__(
        self, me: InstanceView, *others: InstanceView, is_anywhere: bool = False, **config: Any
    ) -> None:
        self.me = me
        self.now = 10.0
        self.prediction: Prediction | None = None
        self.lengths = Lengths()
        self.params = PrefillParams(TransferId("t"), RequestId("r"), anywhere=is_anywhere)
        self.sees(me, *others)
        source: Any = self  # of predictions and snapshots
        self.dispatcher = Dispatcher(
            TetriConfig(role=me.info.role, report_period_s=PERIOD_S, **config),
            me.info,
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

    def sees(self, *views: InstanceView) -> None:
        self.newest = Snapshot(view(*views), self.now)

    def dispatch(
        self, *refused: str, request: Request | None = None, may_wait: bool = False
    ) -> Dispatch | None:
        request = request or some_request(100, max_tokens=300)
        if not may_wait:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        them = frozenset(map(InstanceId, refused))
        return self.dispatcher.choose(request, self.params, 10, them)

    def chosen(self, *refused: str, **options: Any) -> str | None:
        found = self.dispatch(*refused, **options)
        return None if found is None else found.instance

    def found(self, *refused: str) -> tuple[str, str, bool]:
        """The instance, its endpoint, and whether it has capacity."""
        found = self.dispatch(*refused)
        assert found is not None
        assert found.reason.startswith("adaptive: ")
        return found.instance, found.kv_endpoint, found.has_capacity

    def record(self, endpoint: str, *, was_reached: bool) -> None:
        dispatch = Dispatch(InstanceId("any"), endpoint, "")
        self.dispatcher.policy.record_transfer(dispatch, self.now, was_reached=was_reached)

    def choose(self, request: Request, *, may_wait: bool = False) -> str | None:
        return self.chosen(request=request, may_wait=may_wait)

    def output_tokens(self, request: Request) -> int:
        """Predicted, as the need of the request says."""
        self.choose(request)
        need = self.dispatcher.need(request, 10)
        return need.total_tokens - need.prompt_tokens


def split(*others: InstanceView, **config: Any) -> Scene:
    return Scene(instance("me", "prefill"), *others, **config)


def anywhere(*others: InstanceView, role: str = "both", **load: Any) -> Scene:
    return Scene(one("me", role, **load), *others, is_anywhere=True)


def some_request(num_tokens: int = 10, *, max_tokens: int = 5000, name: str = "a") -> Request:
    return Request(name, [1] * num_tokens, SamplingParams(max_tokens=max_tokens), None)


def decode(name: str = "d", **load: Any) -> Any:
    room = {"blocks_total": 1000, "arena_total_bytes": 1000}
    return instance(name, "decode", **{**room, **load})


def test_what_decode_instances_saw_goes_before_the_own_prior() -> None:
    scene = split(decode("a", usual_tokens=90), decode("b", usual_tokens=110), decode("c"))
    for scene.prediction, tokens in ((THIRD, 500), (FIRST, 100), (None, 100)):
        assert scene.output_tokens(some_request()) == tokens
    assert scene.dispatcher.need(some_request(), 10).heavy_part == 0


def test_how_likely_a_long_output_is_follows_from_the_prediction() -> None:
    scene = split(decode())
    for scene.prediction, heavy in ((THIRD, 1.0), (FIRST, 0.4), (LAST, 1.0)):
        assert scene.dispatcher.need(some_request(), 10).heavy_part == pytest.approx(heavy)
    scene.prediction = None
    assert 0.4 < scene.dispatcher.need(some_request(), 10).heavy_part < 0.6


@pytest.mark.parametrize(("end", "tokens"), [("lower", 400), ("upper", 600)])
def test_the_end_that_is_reserved_is_an_option(end: str, tokens: int) -> None:
    scene = split(decode(usual_tokens=90), reserve_end=End(end))
    scene.prediction = THIRD
    assert scene.output_tokens(some_request()) == tokens


def test_the_client_and_the_window_bound_an_output() -> None:
    scene = split(decode(usual_tokens=90))
    scene.prediction = THIRD
    assert scene.output_tokens(some_request(max_tokens=40)) == 40
    assert not scene.dispatcher.need(some_request(max_tokens=40), 10).heavy_part
    window = scene.me.info.max_model_len
    assert scene.output_tokens(some_request(window - 7)) == 7
    assert scene.output_tokens(some_request(window)) == 0


def test_a_prompt_is_held_for_one_period_when_no_instance_has_capacity() -> None:
    scene = split(decode(arena_total_bytes=0))
    assert scene.choose(some_request(), may_wait=True) is None
    scene.now += PERIOD_S / 2
    assert scene.choose(some_request(), may_wait=True) is None
    assert scene.choose(some_request(name="b"), may_wait=False) == "d"
    scene.now += PERIOD_S / 2
    assert scene.choose(some_request(), may_wait=True) == "d"


def test_a_hold_ends_when_an_instance_has_capacity() -> None:
    scene = split(decode(arena_total_bytes=0))
    assert scene.choose(some_request(), may_wait=True) is None
    scene.sees(scene.me, decode("free"))
    assert scene.choose(some_request(), may_wait=True) == "free"


def test_without_instances_there_is_nothing_to_wait_for() -> None:
    assert split().choose(some_request(), may_wait=True) is None


def test_an_unreachable_instance_is_avoided_for_a_while() -> None:
    scene = split(decode("a"), decode("b"))
    cut = decode("a").info.kv_endpoint
    scene.record(cut, was_reached=False)
    chosen = {scene.choose(some_request(name=str(number))) for number in range(20)}
    assert chosen == {"b"}
    scene.now += 10
    chosen_later = [scene.choose(some_request(name=str(number))) for number in range(100)]
    assert chosen_later.count("a") == 1  # tries it for all of them
    scene.record(cut, was_reached=True)
    assert "a" in {scene.choose(some_request(name=str(number))) for number in range(20)}


def test_an_arena_that_can_never_hold_a_prompt_is_passed_over() -> None:
    small, large = decode("small"), decode("large")
    small = replace(small, info=replace(small.info, arena_tokens=99))
    scene = split(small, large)
    assert {scene.choose(some_request(100, name=str(number))) for number in range(20)} == {"large"}
    assert scene.choose(some_request(99)) == "small"  # which has fewer decodes by now
    scene.sees(scene.me, small)
    assert scene.choose(some_request(100), may_wait=True) is None
    assert scene.choose(some_request(100)) is None  # not even when its prompt is done


def test_an_output_stays_only_where_the_arena_holds_it() -> None:
    me = one("me")
    me = replace(me, info=replace(me.info, arena_tokens=99))
    assert Scene(me, is_anywhere=True).dispatch(request=some_request(100)) is None
    assert Scene(me, is_anywhere=True).chosen(request=some_request(99)) == "me"


def test_an_unreachable_instance_is_better_than_none() -> None:
    scene = split(decode("a"))
    scene.record(decode("a").info.kv_endpoint, was_reached=False)
    assert scene.choose(some_request()) == "a"


# -- requests that any instance may decode --------------------------------------------------


def one(name: str, role: str = "both", **load: Any) -> InstanceView:
    return serving(name, role, **{"left_tokens": 300, **load})


def test_a_decode_instance_may_keep_a_prompt_it_computed() -> None:
    assert anywhere(one("other", "decode"), role="decode").chosen() == "me"
    assert anywhere(role="decode").chosen() == "me"


def test_a_prefill_instance_hands_over_unless_it_is_alone() -> None:
    scene = anywhere(one("d", "decode", decodes=90), one("q", "prefill"), role="prefill")
    assert scene.chosen() == "d"
    assert anywhere(role="prefill").chosen() == "me"
    assert anywhere(one("q", "prefill"), role="prefill").chosen() == "me"


def test_the_predicted_length_decides() -> None:
    for prediction, chosen in ((FIRST, "me"), (LAST, "other")):
        scene = anywhere(one("other"), decodes=5, handover_token_s=0.015)
        scene.prediction = prediction
        assert scene.chosen() == chosen


def test_one_that_refused_is_not_asked_again() -> None:
    scene = anywhere(one("a"), one("b", decodes=3), decodes=30)
    assert scene.chosen() == "a"
    assert scene.chosen("a") == "b"
    assert scene.chosen("a", "b") == "me"
    assert anywhere(one("a"), one("b", decodes=3)).chosen("me") == "a"
    assert anywhere(one("a"), role="decode").chosen("me") == "a"


def test_those_without_room_are_passed_over() -> None:
    blocks, arena = one("blocks", blocks_total=3), one("arena", arena_total_bytes=5)
    scene = anywhere(blocks, arena, one("roomy", decodes=5), decodes=30)
    assert scene.chosen() == "roomy"
    assert anywhere(one("a"), arena_total_bytes=5).chosen() == "a"
    assert anywhere(one("a", "decode"), role="decode", blocks_total=3).chosen() == "a"


def test_the_only_one_with_room_is_found_among_many() -> None:
    full = [one(f"full{n}", "decode", arena_total_bytes=5) for n in range(40)]
    scene = anywhere(*full[:23], one("roomy", "decode", decodes=60), *full[23:], role="prefill")
    assert [scene.chosen() for _ in range(20)] == ["roomy"] * 20


@pytest.mark.parametrize("role", list(Role))
def test_without_capacity_elsewhere_it_stays_in_the_end(role: Role) -> None:
    small, large = one("small", arena_total_bytes=5), one("large", arena_total_bytes=9)
    scene = anywhere(small, large, role=role, arena_total_bytes=5)
    assert scene.found() == ("me", "me:1", False)
    dispatch = scene.dispatch("me")
    assert dispatch is not None
    assert (dispatch.instance, dispatch.has_capacity) == ("large", False)


def test_without_capacity_a_prompt_that_is_not_done_waits_for_one_report() -> None:
    scene = anywhere(one("other", arena_total_bytes=9), arena_total_bytes=5)
    assert scene.dispatch(may_wait=True) is None
    scene.now += 0.05
    assert scene.dispatch(may_wait=True) is None
    scene.now += 0.05
    assert scene.chosen(may_wait=True) == "other"
    scene.sees(one("me"), one("other"))
    assert scene.chosen(may_wait=True) == "me"


def test_an_instance_without_a_view_keeps_what_it_computed() -> None:
    scene = anywhere(role="decode")
    scene.sees()
    assert scene.dispatch(may_wait=True) is None  # a view may come
    assert scene.found() == ("me", "me:1", False)


def test_without_instances_there_is_no_choice() -> None:
    scene = anywhere(one("a", state="silent"), one("b", layout="other"), role="decode")
    assert scene.chosen("me") is None


def test_what_was_sent_counts_before_the_next_report() -> None:
    decodes = [one(name, "decode", arena_total_bytes=25) for name in "abcd"]
    scene = anywhere(*decodes, role="prefill")
    chosen = [scene.chosen() for _ in range(8)]
    assert sorted(map(str, chosen)) == ["a", "a", "b", "b", "c", "c", "d", "d"]
    dispatch = scene.dispatch()  # room that was promised to one is not promised again
    assert dispatch is not None
    assert not dispatch.has_capacity
    scene.now += 5
    scene.sees(one("me", "prefill"), *decodes)
    assert len({scene.chosen() for _ in range(4)}) == 4


def test_another_role_counts_from_the_next_choice_on() -> None:
    scene = anywhere(one("d", "decode"), role="both")
    assert scene.chosen() == "me"
    scene.now += 5
    me = one("me", "prefill")
    scene.sees(me, one("d", "decode"))
    scene.dispatcher.policy.me = me.info
    assert scene.chosen() == "d"


def test_an_output_does_not_move_to_an_unreachable_instance() -> None:
    scene = anywhere(one("a"), one("b"), decodes=30)
    scene.record("a:1", was_reached=False)
    assert scene.chosen() == "b"
