"""The choice of a decode instance for requests that any may decode."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.policy.builders import serving, view
from vllm_tetri.config import TetriConfig
from vllm_tetri.control.view import Snapshot
from vllm_tetri.engine.dispatcher import Dispatcher
from vllm_tetri.handover import PrefillParams
from vllm_tetri.policy.dispatch import Dispatch
from vllm_tetri.policy.lengths import Lengths
from vllm_tetri.types import InstanceId, InstanceView, Prediction, RequestId, Role, TransferId

ANYWHERE = PrefillParams(TransferId("t"), RequestId("r"), anywhere=True)
SHORT, LONG = Prediction(0, 5, 200), Prediction(4, 5, 200)


class Scene:
    """A dispatcher of an instance `me` whose view, predictions and clock are set by hand."""

    def __init__(self, *others: InstanceView, role: str = "both", **load: Any) -> None:
        self.now = 10.0
        self.prediction: Prediction | None = None
        me = one("me", role, **load)
        self.sees(me, *others)
        source: Any = self  # of predictions and snapshots
        self.dispatcher = Dispatcher(
            TetriConfig(role=Role(role), report_period_s=0.1),
            me.info,
            Lengths(200, 5),
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

    def dispatch(self, *refused: str, may_wait: bool = False) -> Dispatch | None:
        them = frozenset(map(InstanceId, refused))
        request = Request("a", [1] * 100, SamplingParams(max_tokens=300), None)
        if not may_wait:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return self.dispatcher.choose(request, ANYWHERE, 10, them)

    def chosen(self, *refused: str, **options: Any) -> str | None:
        found = self.dispatch(*refused, **options)
        return None if found is None else found.instance


def one(name: str, role: str = "both", **load: Any) -> InstanceView:
    return serving(name, role, **{"left_tokens": 300, **load})


def test_an_output_stays_here_if_elsewhere_is_not_better() -> None:
    scene = Scene(one("other"))
    found = scene.dispatch()
    assert found is not None
    assert (found.instance, found.kv_endpoint, found.has_capacity) == ("me", "me:1", True)
    assert found.reason.startswith("adaptive: stays")


def test_a_decode_instance_may_keep_a_prompt_it_computed() -> None:
    assert Scene(one("other", "decode"), role="decode").chosen() == "me"
    assert Scene(role="decode").chosen() == "me"


def test_an_output_moves_to_where_fewer_decode() -> None:
    scene = Scene(one("a", decodes=30), one("b"), decodes=30)
    found = scene.dispatch()
    assert found is not None
    assert (found.instance, found.kv_endpoint) == ("b", "b:1")


def test_a_prefill_instance_hands_over_unless_it_is_alone() -> None:
    scene = Scene(one("d", "decode", decodes=90), one("q", "prefill"), role="prefill")
    assert scene.chosen() == "d"
    assert Scene(role="prefill").chosen() == "me"
    assert Scene(one("q", "prefill"), role="prefill").chosen() == "me"


def test_the_predicted_length_decides() -> None:
    for prediction, chosen in ((SHORT, "me"), (LONG, "other")):
        scene = Scene(one("other"), decodes=5, handover_token_s=0.015)
        scene.prediction = prediction
        assert scene.chosen() == chosen


def test_one_that_refused_is_not_asked_again() -> None:
    scene = Scene(one("a"), one("b", decodes=3), decodes=30)
    assert scene.chosen() == "a"
    assert scene.chosen("a") == "b"
    assert scene.chosen("a", "b") == "me"
    assert Scene(one("a"), one("b", decodes=3)).chosen("me") == "a"
    assert Scene(one("a"), role="decode").chosen("me") == "a"


def test_those_without_room_are_passed_over() -> None:
    blocks, arena = one("blocks", blocks_total=3), one("arena", arena_total_bytes=5)
    scene = Scene(blocks, arena, one("roomy", decodes=5), decodes=30)
    assert scene.chosen() == "roomy"
    assert Scene(one("a"), arena_total_bytes=5).chosen() == "a"
    assert Scene(one("a", "decode"), role="decode", blocks_total=3).chosen() == "a"


def test_the_only_one_with_room_is_found_among_many() -> None:
    full = [one(f"full{n}", "decode", arena_total_bytes=5) for n in range(40)]
    scene = Scene(*full[:23], one("roomy", "decode", decodes=60), *full[23:], role="prefill")
    assert [scene.chosen() for _ in range(20)] == ["roomy"] * 20


@pytest.mark.parametrize("role", list(Role))
def test_without_capacity_elsewhere_it_stays_in_the_end(role: Role) -> None:
    small, large = one("small", arena_total_bytes=5), one("large", arena_total_bytes=9)
    scene = Scene(small, large, role=role, arena_total_bytes=5)
    found = scene.dispatch()
    assert found is not None
    assert (found.instance, found.has_capacity) == ("me", False)
    found = scene.dispatch("me")
    assert found is not None
    assert (found.instance, found.has_capacity) == ("large", False)


def test_without_capacity_a_prompt_that_is_not_done_waits_for_one_report() -> None:
    scene = Scene(one("other", arena_total_bytes=9), arena_total_bytes=5)
    assert scene.dispatch(may_wait=True) is None
    scene.now += 0.05
    assert scene.dispatch(may_wait=True) is None
    scene.now += 0.05
    assert scene.chosen(may_wait=True) == "other"
    scene.sees(one("me"), one("other"))
    assert scene.chosen(may_wait=True) == "me"


def test_an_instance_without_a_view_keeps_what_it_computed() -> None:
    scene = Scene(role="decode")
    scene.sees()
    assert scene.dispatch(may_wait=True) is None  # a view may come
    found = scene.dispatch()
    assert found is not None
    assert (found.instance, found.kv_endpoint) == ("me", "me:1")


def test_without_instances_there_is_no_choice() -> None:
    scene = Scene(one("a", state="silent"), one("b", layout="other"), role="decode")
    assert scene.chosen("me") is None


def test_what_was_sent_counts_before_the_next_report() -> None:
    scene = Scene(*(one(name, "decode") for name in "abcd"), role="prefill")
    chosen = [scene.chosen() for _ in range(8)]
    assert sorted(map(str, chosen)) == ["a", "a", "b", "b", "c", "c", "d", "d"]
    scene.now += 5
    scene.sees(one("me", "prefill"), *(one(name, "decode") for name in "abcd"))
    assert len({scene.chosen() for _ in range(4)}) == 4


def test_room_that_was_promised_to_one_is_not_promised_again() -> None:
    tight = {"arena_total_bytes": 25}
    scene = Scene(*(one(name, "decode", **tight) for name in "ab"), role="prefill")
    assert sorted(str(scene.chosen()) for _ in range(4)) == ["a", "a", "b", "b"]
    found = scene.dispatch()
    assert found is not None
    assert not found.has_capacity


def test_another_role_counts_from_the_next_choice_on() -> None:
    scene = Scene(one("d", "decode"), role="both")
    assert scene.chosen() == "me"
    scene.now += 5
    me = one("me", "prefill")
    scene.sees(me, one("d", "decode"))
    scene.dispatcher.set_info(me.info)
    assert scene.chosen() == "d"


def test_an_output_does_not_move_to_an_unreachable_instance() -> None:
    scene = Scene(one("a"), one("b"), decodes=30)
    scene.dispatcher.record_sent(Dispatch(InstanceId("a"), "a:1", ""), was_reached=False)
    chosen = scene.chosen()
    assert chosen == "b"
