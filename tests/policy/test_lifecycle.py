from __future__ import annotations

from itertools import product

import pytest

from vllm_tetri.policy.route import ENDED, TRANSITIONS, Event, Phase, advance


def play(*events: Event) -> Phase:
    phase = Phase.ARRIVED
    for event in events:
        phase = advance(phase, event)
    return phase


def test_a_split_request_goes_through_every_phase() -> None:
    events = [Event.PREFILL_SENT, Event.PREFILLED, Event.ANSWERING, Event.FINISH]
    assert [play(*events[: index + 1]) for index in range(4)] == [
        Phase.PREFILLING,
        Phase.HANDING_OVER,
        Phase.DECODING,
        Phase.FINISHED,
    ]


def test_a_whole_request_is_served_and_finishes() -> None:
    assert play(Event.WHOLE_SENT, Event.ANSWERING) is Phase.SERVING
    assert play(Event.WHOLE_SENT, Event.ANSWERING, Event.FINISH) is Phase.FINISHED


def test_a_split_that_fails_can_be_served_whole() -> None:
    assert play(Event.PREFILL_SENT, Event.PREFILL_SENT, Event.WHOLE_SENT) is Phase.SERVING
    assert play(Event.PREFILL_SENT, Event.PREFILLED, Event.WHOLE_SENT) is Phase.SERVING


def test_an_answer_goes_on_elsewhere() -> None:
    events = [Event.PREFILL_SENT, Event.PREFILLED, Event.ANSWERING, Event.WHOLE_SENT]
    assert play(*events) is Phase.SERVING
    assert play(*events, Event.ANSWERING, Event.FINISH) is Phase.FINISHED


def test_a_first_token_that_is_the_last_ends_at_the_prefill_instance() -> None:
    assert play(Event.PREFILL_SENT, Event.ANSWERING) is Phase.SERVING
    assert play(Event.PREFILL_SENT, Event.ANSWERING, Event.FINISH) is Phase.FINISHED


@pytest.mark.parametrize(("event", "end"), [("fail", "failed"), ("cancel", "cancelled")])
def test_a_request_can_end_early_from_every_phase_that_is_not_the_end(event: str, end: str) -> None:
    for phase in set(Phase) - ENDED:
        assert advance(phase, Event(event)) == end


def test_unknown_pairs_raise() -> None:
    for pair in set(product(Phase, Event)) - set(TRANSITIONS):
        with pytest.raises(ValueError, match=pair[1]):
            advance(*pair)


def test_the_end_is_the_end_and_every_phase_can_be_reached() -> None:
    assert not {phase for phase, _ in TRANSITIONS} & ENDED
    assert {Phase.ARRIVED, *TRANSITIONS.values()} == set(Phase)
