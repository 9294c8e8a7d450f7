"""What a client has received, and that a continuation makes one stream of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.scripts import PROMPT_IDS, Script, event, joined
from vllm_tetri.handover import Prefilled, PriorOutput, to_params
from vllm_tetri.router import resume as record_module
from vllm_tetri.router.first_token import FirstToken, read_first_token
from vllm_tetri.router.resume import ContinuationMismatch, NotResumable, StreamRecord
from vllm_tetri.types import InstanceId, TransferId

TRANSFER = TransferId("t1")
ALIVE = b": keep-alive\n\n"


def first_of(script: Script, *, is_final: bool = False) -> FirstToken:
    """What the prefill instance answers for an answer."""
    prefilled = Prefilled(
        TRANSFER, InstanceId("d"), 3, "d1", "", PriorOutput(script.token_ids[:1]), is_final
    )
    one = replace(script, texts=script.texts[:1])
    if not is_final:
        one = replace(one, finish_reason="length", stop_reason=None)
    body = json.dumps(one.whole(**to_params(prefilled))).encode()
    found = read_first_token(body, TRANSFER, is_chat=script.is_chat)
    assert found is not None
    return found


def new_record(script: Script, *, hides_ids: bool = True) -> StreamRecord:
    return StreamRecord(is_chat=script.is_chat, hides_ids=hides_ids)


def continuing(first: FirstToken, created: int) -> StreamRecord:
    record = StreamRecord(is_chat=first.is_chat, hides_ids=False)
    record.begin_with(first, created)
    record.begin_continuation()
    return record


def spliced(first: FirstToken, created: int, reads: list[bytes]) -> bytes:
    record = continuing(first, created)
    return b"".join(map(record.feed, reads))


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    return [data[at:end] for at, end in zip([0, *ends], ends, strict=False) if end > at]


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
    opening = first.opening(script.created, counts_each=script.counts_each)
    seen = opening + spliced(first, script.created, pieces(leg2, cuts))
    assert seen == b"".join(script.events(1, merged - 1))


@given(script=SCRIPTS)
def test_a_first_token_that_is_the_last_makes_the_stream_of_one_instance(script: Script) -> None:
    script = replace(script, texts=script.texts[:1])
    first = first_of(script, is_final=True)

    seen = first.complete_stream(wants_usage=script.has_usage, counts_each=script.counts_each)
    assert seen == b"".join(script.events())
    assert json.loads(first.complete_response()) == script.whole()


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
        with pytest.raises(ContinuationMismatch):
            spliced(shown, 5, [leg2])
    script = Script(("ab", "c"), is_chat=is_chat, has_token_ids=True)
    assert shown.prefilled.prior_output is not None
    shown.prefilled.prior_output.token_ids[0] += 1
    with pytest.raises(ContinuationMismatch, match="tokens"):
        spliced(shown, 5, [b"".join(script.events(2))])


@pytest.mark.parametrize("leg2", [b"data: {\n\n", b"data: {}\n\n", b"data: 5\n\n"])
def test_a_stream_of_something_else_is_a_mismatch(leg2: bytes) -> None:
    with pytest.raises(ContinuationMismatch):
        spliced(first_of(Script(("ab", "c"))), 5, [leg2])


def test_answers_of_other_transfers_are_not_read() -> None:
    body = json.dumps(Script(("a",)).whole()).encode()
    assert read_first_token(body, TRANSFER, is_chat=False) is None


@pytest.mark.parametrize("is_chat", [False, True])
def test_what_only_keeps_the_connection_alive_is_no_event(is_chat: bool) -> None:
    script = Script(("ab", "c"), is_chat=is_chat)
    first, leg2 = first_of(script), b"".join(script.events(2))
    assert spliced(first, 5, [ALIVE, leg2]) == spliced(first, 5, [leg2])


def test_an_event_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "_MAX_EVENT_BYTES", 1000)
    script = Script(("a", "b", "c"))
    record = continuing(first_of(script), 1)
    record.feed(b"data: " + b"x" * 900)
    with pytest.raises(ContinuationMismatch, match="more than 1000 bytes"):
        record.feed(b"x" * 200)


@given(script=SCRIPTS, hides_ids=st.booleans(), cuts=st.lists(st.integers(0, 10_000)))
def test_the_client_gets_whole_events_without_ids_that_it_did_not_want(
    script: Script, hides_ids: bool, cuts: list[int]
) -> None:
    told = replace(script, has_token_ids=True)
    record = new_record(script, hides_ids=hides_ids)
    got = [record.feed(each) for each in pieces(b"".join(told.events()), cuts)]
    wanted = replace(script, has_token_ids=not hides_ids)
    assert b"".join(got) == b"".join(wanted.events())
    assert all(each.endswith(b"\n\n") for each in got if each)
    assert record.is_complete
    record.settle()
    assert record.is_over
    assert (record.token_ids, record.prompt_token_ids) == (script.token_ids, PROMPT_IDS)


@given(script=SCRIPTS, broken=st.integers(0, 10_000), later_s=st.sampled_from([0, 9]))
def test_a_stream_that_breaks_anywhere_goes_on_as_if_it_had_not(
    script: Script, broken: int, later_s: int
) -> None:
    told = replace(script, has_token_ids=True)
    whole = b"".join([ALIVE, *told.events()])
    record = new_record(script)
    got = record.feed(whole[: broken % len(whole)]).replace(ALIVE, b"")
    record.settle()
    if record.is_over:
        return  # nothing to go on with
    later = replace(told, created=script.created + later_s)
    record.begin_continuation()
    rest = record.feed(b"".join(later.events(len(record.token_ids) + 1)))
    seen = replace(told if got else later, has_token_ids=False)
    assert joined(got + rest) == joined(b"".join(seen.events()))
    record.settle()
    assert record.token_ids == script.token_ids


def test_long_answers_are_read_while_they_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "_MAX_KEPT_BYTES", 1000)
    script = Script(tuple(f" {n}" for n in range(500)), has_token_ids=True)
    record = new_record(script)
    for each in script.events()[:-2]:
        record.feed(each)
    record.settle()
    assert record.token_ids == script.token_ids[:-1]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"data: 1\n\n", "not understood"),
        (b"data: {\n\n", "not understood"),
        (b'data: {"index": 0}\n\n', "not understood"),
        (b"".join(Script(("a", "b")).events()[:1]), "no token ids"),
        (
            event({"created": 1, "choices": [{"delta": {"tool_calls": [{}]}, "token_ids": [1]}]}),
            "more than text",
        ),
    ],
)
def test_what_is_not_understood_cannot_be_gone_on_behind(raw: bytes, why: str) -> None:
    record = StreamRecord(is_chat=False, hides_ids=True)
    assert record.feed(raw)
    with pytest.raises(NotResumable, match=why):
        record.settle()


def test_an_event_that_only_tells_an_id_is_not_for_the_client() -> None:
    chunk = {"id": "x", "created": 5, "model": "m"}
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None, "token_ids": [7]}
    silent = event({**chunk, "choices": [choice]})
    loud = event({**chunk, "choices": [{**choice, "delta": {"content": "a"}}]})
    last = event({**chunk, "choices": [{**choice, "finish_reason": "stop"}]})
    record = StreamRecord(is_chat=True, hides_ids=True)
    got = record.feed(silent + loud + silent + last)
    assert got == (loud + last).replace(b"[7]", b"null")
    record.settle()
    assert record.token_ids == [7, 7, 7, 7]
    assert StreamRecord(is_chat=True, hides_ids=False).feed(silent) == silent


def test_a_token_of_which_a_parser_holds_the_text_back_is_not_lost() -> None:
    """The client has `<`; the instance tells the next token before it knows what both mean."""
    base = {"index": 0, "logprobs": None, "finish_reason": None}
    record = StreamRecord(is_chat=True, hides_ids=False)
    record.feed(chunk({**base, "delta": {"content": "<"}, "token_ids": [27]}))
    record.begin_continuation()
    held = chunk({**base, "delta": {}, "token_ids": [27, 79]})
    told = chunk({**base, "delta": {"content": "<p>"}, "token_ids": [29]})
    got = record.feed(held) + record.feed(told)
    choices = [json.loads(each[6:])["choices"][0] for each in got.split(b"\n\n")[:-1]]
    assert [each["token_ids"] for each in choices] == [[79], [29]]
    assert [each["delta"].get("content") for each in choices] == [None, "p>"]
    record.settle()
    assert record.token_ids == [27, 79, 29]


def delta(index: int, **said: Any) -> dict[str, Any]:
    return {"index": index, "delta": said, "logprobs": None, "finish_reason": None}


def chunk(*choices: dict[str, Any], created: int = 1) -> bytes:
    return event({"id": "x", "created": created, "choices": list(choices)})


def call(index: int, name: str = "", arguments: str = "", name_id: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return {"index": index, "function": function} | ({"id": name_id} if name_id else {})


# What two choices say: text, reasoning, and calls of tools; ids differ from instance to instance.
SAID = [
    (0, {"reasoning": "so"}), (1, {"content": "one"}), (0, {"reasoning": " far"}),
    (0, {"tool_calls": [call(0, "note", "", "id-0")]}), (1, {"content": " two"}),
    (0, {"tool_calls": [call(0, "", '{"a"')]}), (0, {"tool_calls": [call(0, "", ": 1}")]}),
    (1, {"content": " three"}), (0, {"tool_calls": [call(1, "more", "{}", "id-1")]}),
]  # fmt: skip


def whole(events: bytes) -> dict[tuple[int, str], str]:
    """All that a stream says, by choice and field; of ids how many."""
    found: dict[tuple[int, str], str] = {}
    for raw in events.split(b"\n\n")[:-1]:
        for choice in json.loads(raw.removeprefix(b"data: "))["choices"]:
            said = choice["delta"]
            parts = {key: said.get(key) or "" for key in ("content", "reasoning")}
            for each in said.get("tool_calls") or ():
                parts[f"id {each['index']}"] = "1" * ("id" in each)
                for key in ("name", "arguments"):
                    parts[f"{key} {each['index']}"] = each["function"].get(key) or ""
            for key, text in parts.items():
                found[choice["index"], key] = found.get((choice["index"], key), "") + text
    return {key: text for key, text in found.items() if text}


@given(
    received=st.integers(1, len(SAID)), merged=st.integers(1, 4), cuts=st.lists(st.integers(0, 900))
)
def test_choices_reasoning_and_calls_go_on_where_the_client_is(
    received: int, merged: int, cuts: list[int]
) -> None:
    """However another instance groups what it says, nothing comes twice and nothing is lost."""
    events = [chunk(delta(index, **said)) for index, said in SAID]
    record = StreamRecord(is_chat=True, hides_ids=False, is_plain=False)
    got = record.feed(b"".join(events[:received]))
    record.begin_continuation()
    later: list[bytes] = [chunk(delta(0, role="assistant", content=""), created=2)]
    for index in (0, 1):  # each choice begins anew, in larger parts
        mine = [said for at, said in SAID if at == index]
        for start in range(0, len(mine), merged):
            later += [
                chunk(
                    delta(index, **json.loads(json.dumps(said).replace("id-", "other-"))), created=2
                )
                for said in mine[start : start + merged]
            ]
    for piece in pieces(b"".join(later), cuts):
        got += record.feed(piece)
    assert whole(got) == whole(b"".join(events))
    assert record.is_caught_up


def test_an_instance_that_calls_something_else_does_not_continue() -> None:
    record = StreamRecord(is_chat=True, hides_ids=False, is_plain=False)
    record.feed(chunk(delta(0, tool_calls=[call(0, "note", '{"a"', "id-0")])))
    record.begin_continuation()
    with pytest.raises(ContinuationMismatch, match="does not continue"):
        record.feed(chunk(delta(0, tool_calls=[call(0, "note", '{"b"', "id-9")])))
