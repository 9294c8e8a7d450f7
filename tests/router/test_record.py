"""What is remembered of a stream is what its client got, however the bytes were cut."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.answers import PROMPT_IDS, Script, event
from tests.router.test_splice import SCRIPTS, first_of
from vllm_tetri.router import record as record_module
from vllm_tetri.router.record import Record, Unprovable
from vllm_tetri.router.splice import Splice


def new_record(script: Script, *, hides_ids: bool = True) -> Record:
    return Record(is_chat=script.is_chat, hides_ids=hides_ids)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    return [data[at:end] for at, end in zip([0, *ends], ends, strict=False) if end > at]


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
    assert record.is_whole
    shown = record.shown()
    assert shown.text == "".join(script.texts)
    assert list(shown.token_ids) == script.token_ids
    assert (shown.created, shown.is_over) == (script.created, True)
    assert record.prompt_token_ids == PROMPT_IDS


@given(script=SCRIPTS, broken=st.integers(0, 10_000), later_s=st.sampled_from([0, 9]))
def test_a_stream_that_breaks_anywhere_goes_on_as_if_it_had_not(
    script: Script, broken: int, later_s: int
) -> None:
    told = replace(script, has_token_ids=True)
    whole = b"".join(told.events())
    record = new_record(script)
    got = record.feed(whole[: broken % len(whole)])
    if not got or record.shown().is_over:
        return  # nothing to go on behind, or nothing to go on with
    shown = record.shown()
    later = replace(told, created=script.created + later_s)
    splice = Splice(shown)
    record.begin_leg()
    rest = record.feed(splice.feed(b"".join(later.events(len(shown.token_ids) + 1))))
    rest += record.feed(splice.finish())
    assert joined(got + rest) == joined(b"".join(replace(script, has_token_ids=False).events()))
    assert list(record.shown().token_ids) == script.token_ids


def joined(stream: bytes) -> list[object]:
    """A stream without its cuts into events."""
    assert stream.endswith(b"data: [DONE]\n\n")
    events = [json.loads(each[6:]) for each in stream.split(b"\n\n")[:-2]]
    text, logprobs, rest = "", dict[str, list[object]](), list[object]()
    for each in events:
        usage = each.pop("usage", None)
        for choice in each["choices"]:
            holder = choice.get("delta", choice)
            text += holder.pop("content", holder.pop("text", "")) or ""
            for key, values in (choice.pop("logprobs", None) or {}).items():
                logprobs.setdefault(key, []).extend(values)
        is_end = not each["choices"] or each["choices"][0]["finish_reason"] is not None
        if is_end or each["choices"][0].get("delta", {}).get("role"):
            rest.append((each, usage))
    return [text, logprobs, rest]


@given(script=SCRIPTS)
def test_a_token_that_was_shown_before_is_a_part_of_it(script: Script) -> None:
    told = replace(script, has_token_ids=True)
    first, record = first_of(told), new_record(script)
    record.show(first, script.created)
    assert record.shown() == first.shown(script.created)
    splice = Splice(record.shown())
    record.feed(splice.feed(b"".join(told.events(2))))
    record.feed(splice.finish())
    assert list(record.shown().token_ids) == script.token_ids
    assert record.shown().text == "".join(script.texts)


def test_long_answers_are_read_while_they_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "_MOST_KEPT_BYTES", 1000)
    script = Script(tuple(f" {n}" for n in range(500)), has_token_ids=True)
    record = new_record(script)
    for each in script.events()[:-2]:
        record.feed(each)
        assert record._num_kept_bytes <= 1000
    assert list(record.shown().token_ids) == script.token_ids[:-1]


def test_an_error_is_kept_back_with_what_follows_it() -> None:
    script = Script(("a", "b", "c"), has_token_ids=True)
    record = new_record(script)
    error = event({"error": {"message": "EngineCore died"}}) + b"data: [DONE]\n\n"
    got = record.feed(b"".join(script.events()[:2]) + error)
    assert got == b"".join(replace(script, has_token_ids=False).events()[:2])
    assert (record.trouble, record.is_given_up, record.is_whole) == (error, False, False)
    assert record.shown().text == "ab"


@pytest.mark.parametrize("is_chat", [False, True])
def test_an_engine_that_gives_up_has_not_ended_the_answer(is_chat: bool) -> None:
    script = Script(("a", "b", "c"), is_chat=is_chat, has_token_ids=True)
    record = new_record(script)
    given_up = replace(script, texts=("a", "b", ""), finish_reason="abort")
    record.feed(b"".join(given_up.events()))
    assert (record.is_given_up, record.is_whole) == (True, False)
    assert (record.shown().text, record.shown().is_over) == ("ab", False)


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
    record = Record(is_chat=False, hides_ids=True)
    assert record.feed(raw)
    with pytest.raises(Unprovable, match=why):
        record.shown()


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("num_missing", [1, 2])
@pytest.mark.parametrize("wants_usage", [False, True])
def test_an_answer_that_is_over_gets_the_end_that_is_missing(
    is_chat: bool, num_missing: int, wants_usage: bool
) -> None:
    script = Script(("a", "b"), is_chat=is_chat, has_token_ids=True, has_usage=wants_usage)
    events = script.events()
    record = new_record(script)
    got = record.feed(b"".join(events[:-num_missing]))
    if num_missing == 2 and not wants_usage:
        assert not record.shown().is_over
        return
    assert record.shown().is_over
    end = got + record.ending(len(PROMPT_IDS), wants_usage=wants_usage)
    whole = replace(script, has_token_ids=False)
    fingerprint = b',"system_fingerprint":"f1"'
    assert end.replace(fingerprint, b"") == b"".join(whole.events()).replace(fingerprint, b"")


def test_an_event_that_only_tells_an_id_is_not_for_the_client() -> None:
    chunk = {"id": "x", "created": 5, "model": "m"}
    choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None, "token_ids": [7]}
    silent = event({**chunk, "choices": [choice]})
    loud = event({**chunk, "choices": [{**choice, "delta": {"content": "a"}}]})
    last = event({**chunk, "choices": [{**choice, "finish_reason": "stop"}]})
    record = Record(is_chat=True, hides_ids=True)
    got = record.feed(silent + loud + silent + last)
    assert got == (loud + last).replace(b"[7]", b"null")
    assert record.shown().token_ids == (7, 7, 7, 7)
    assert Record(is_chat=True, hides_ids=False).feed(silent) == silent
