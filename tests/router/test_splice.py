"""The opening made from leg 1 plus the spliced leg 2 is what one instance streams."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.answers import Script
from vllm_tetri.handover import Given, Prefilled, to_params
from vllm_tetri.router.first_token import FirstToken, read_first_token
from vllm_tetri.router.splice import Splice, SpliceMismatch, SpliceRefused
from vllm_tetri.types import InstanceId, TransferId

TRANSFER = TransferId("t1")


def first_of(script: Script, *, is_final: bool = False) -> FirstToken:
    """What the prefill instance answers for an answer."""
    prefilled = Prefilled(
        TRANSFER, InstanceId("d"), 3, "d1", 1, 100, "", Given(script.token_ids[:1]), is_final
    )
    one = replace(script, texts=script.texts[:1])
    if not is_final:
        one = replace(one, finish_reason="length", stop_reason=None)
    body = json.dumps(one.whole(**to_params(prefilled))).encode()
    found = read_first_token(body, TRANSFER, is_chat=script.is_chat)
    assert found is not None
    return found


def spliced(first: FirstToken, created: int, reads: list[bytes]) -> bytes:
    splice = Splice(first.shown(created))
    return b"".join([*(splice.feed(read) for read in reads), splice.finish()])


TEXTS = st.text(st.sampled_from('a é日🦙\n"\\{}:,\u2028'), max_size=6)
SCRIPTS = st.builds(
    Script,
    texts=st.builds(
        lambda first, rest: (first, *rest),
        TEXTS.filter(bool),
        st.lists(TEXTS | st.just('data: {"created":1700000000,'), min_size=1, max_size=6),
    ),
    is_chat=st.booleans(),
    finish_reason=st.sampled_from(["length", "stop"]),
    stop_reason=st.sampled_from([None, 17]),
    has_logprobs=st.booleans(),
    has_token_ids=st.booleans(),
    has_usage=st.booleans(),
    counts_each=st.booleans(),
).filter(lambda script: script.has_usage or not script.counts_each)


@given(
    script=SCRIPTS,
    merged=st.integers(2, 8),
    later_s=st.sampled_from([0, 1, 77]),
    cuts=st.lists(st.integers(0, 10_000)),
)
def test_however_the_bytes_are_cut_the_stream_is_that_of_one_instance(
    script: Script, merged: int, later_s: int, cuts: list[int]
) -> None:
    first = first_of(script)
    leg2 = b"".join(replace(script, created=script.created + later_s).events(merged))
    ends = sorted({min(cut, len(leg2)) for cut in cuts} | {len(leg2)})
    reads = [leg2[at:end] for at, end in zip([0, *ends], ends, strict=False) if end > at]

    seen = first.opening(script.created, counts_each=script.counts_each) + spliced(
        first, script.created, reads
    )

    assert seen == b"".join(script.events(1, merged - 1))


@given(script=SCRIPTS)
def test_a_first_token_that_is_the_last_makes_the_stream_of_one_instance(script: Script) -> None:
    script = replace(script, texts=script.texts[:1])
    first = first_of(script, is_final=True)

    seen = first.whole_stream(wants_usage=script.has_usage, counts_each=script.counts_each)
    assert seen == b"".join(script.events())
    assert json.loads(first.whole()) == script.whole()


@pytest.mark.parametrize("is_chat", [False, True])
def test_without_text_nothing_stands_alone(is_chat: bool) -> None:
    for text, is_whole in ((" a", True), ("", False), ("\ufffd", False), ("日", True)):
        first = first_of(Script((text, "x"), is_chat=is_chat))
        assert first.is_whole_text is is_whole


@pytest.mark.parametrize("part", ["reasoning", "tool_calls"])
def test_a_message_that_is_more_than_text_has_no_text(part: str) -> None:
    first = first_of(Script(("a", "b"), is_chat=True))
    first.choice["message"][part] = ["something"]
    assert first.text is None


@pytest.mark.parametrize("is_chat", [False, True])
def test_another_text_or_token_is_a_mismatch(is_chat: bool) -> None:
    shown = first_of(Script(("ab", "c"), is_chat=is_chat))
    for other in (("ax", "c"), ("x", "abc"), ("a",)):
        leg2 = b"".join(Script(other, is_chat=is_chat).events(2))
        with pytest.raises(SpliceMismatch):
            spliced(shown, 5, [leg2])
    script = Script(("ab", "c"), is_chat=is_chat, has_token_ids=True)
    assert shown.prefilled.given is not None
    shown.prefilled.given.token_ids[0] += 1
    with pytest.raises(SpliceMismatch, match="tokens"):
        spliced(shown, 5, [b"".join(script.events(2))])


@pytest.mark.parametrize(
    "leg2", [b"", b"data: [DONE]\n\n", b"data: {\n\n", b"data: {}\n\n", b"data: 5\n\n", b": hi\n\n"]
)
def test_a_stream_of_something_else_is_a_mismatch(leg2: bytes) -> None:
    with pytest.raises(SpliceMismatch):
        spliced(first_of(Script(("ab", "c"))), 5, [leg2] if leg2 else [])


def test_an_error_as_the_first_event_can_be_tried_elsewhere() -> None:
    with pytest.raises(SpliceRefused, match="engine died"):
        spliced(
            first_of(Script(("ab", "c"))), 5, [b'data: {"error":{"message":"engine died"}}\n\n']
        )


def test_answers_of_other_transfers_are_not_read() -> None:
    body = json.dumps(Script(("a",)).whole()).encode()
    assert read_first_token(body, TRANSFER, is_chat=False) is None


@pytest.mark.parametrize("is_chat", [False, True])
def test_what_only_keeps_the_connection_alive_is_no_event(is_chat: bool) -> None:
    script = Script(("ab", "c"), is_chat=is_chat)
    first, leg2 = first_of(script), b"".join(script.events(2))
    alive = b": keep-alive\n\n"
    assert spliced(first, 5, [alive, leg2]) == spliced(first, 5, [leg2])


def test_an_event_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tetri.router.splice._MOST_EVENT_BYTES", 1000)
    script = Script(("a", "b", "c"))
    splice = Splice(first_of(script).shown(1))
    splice.feed(b"data: " + b"x" * 900)
    with pytest.raises(SpliceMismatch, match="more than 1000 bytes"):
        splice.feed(b"x" * 200)
    splice = Splice(first_of(script).shown(1))
    splice.feed(b"".join(script.events()[:2]))
    with pytest.raises(SpliceMismatch, match="more than 1000 bytes"):
        splice.feed(b"data: " + b"x" * 1000)
