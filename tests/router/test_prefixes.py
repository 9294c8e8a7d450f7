"""Which blocks a prompt has, before an instance has seen it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from vllm_tetri.policy.residency import Chain
from vllm_tetri.router import prefixes
from vllm_tetri.router.prefixes import PrefixIndex, Start, starts_of
from vllm_tetri.types import InstanceId

P, D = InstanceId("p"), InstanceId("d")
SYSTEM = {"role": "system", "content": "Be brief. " * 200}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat(*messages: dict[str, str], **more: Any) -> list[Start]:
    return starts_of({"model": "m", "messages": list(messages), **more}, is_chat=True)


def chain(num_blocks: int, first: int = 0) -> Chain:
    return Chain(array("Q", range(first, first + num_blocks)), 16)


def learn(index: PrefixIndex, starts: list[Start], blocks: Chain, tokens: int, at: str = P) -> None:
    index.expect("r1", starts)
    index.learn(InstanceId(at), "chatcmpl-r1-0-1a2b3c4d", blocks, tokens)


def test_the_next_turn_finds_prompt_and_output_of_the_last() -> None:
    index, first = PrefixIndex(), chat(SYSTEM, user("What is a tree?"))
    assert index.find(first) is None
    learn(index, first, chain(50), 640)  # 40 blocks of prompt, 10 of output
    known = index.find(first)
    assert known is not None
    assert (known.common_tokens, known.prompt_tokens, known.holders) == (640, 640, (P,))
    ratio = first[-1].num_bytes / 640
    text = "A plant. " * round(160 * ratio / 9)
    known = index.find(chat(SYSTEM, user("What is a tree?"), answer(text), user("And a bush?")))
    assert known is not None
    assert known.chain.names == chain(50).names
    assert 780 <= known.common_tokens <= 800
    assert known.common_tokens < known.prompt_tokens < 850


def test_tools_are_a_part_of_the_prompt() -> None:
    index, tools = PrefixIndex(), [{"type": "function", "description": "It finds. " * 2000}]
    learn(index, chat(user("Hi"), tools=tools), chain(320), 5060)
    result = user("result " * 600)  # a thousand tokens
    known = index.find(chat(user("Hi"), answer("Yes."), result, tools=tools))
    assert known is not None
    assert 5060 < known.prompt_tokens < 8000
    known = index.find(chat(user("Another"), tools=tools))
    assert known is None  # no message is the same


def test_another_question_behind_the_same_system_prompt_shares_that() -> None:
    index = PrefixIndex()
    learn(index, chat(SYSTEM, user("What is a tree?")), chain(50), 640)
    known = index.find(chat(SYSTEM, user("How high is the Eiffel tower? " * 20)))
    assert known is not None
    assert 600 <= known.common_tokens <= 640 < known.prompt_tokens
    assert index.find(chat({**SYSTEM, "content": "Be long."}, user("What is a tree?"))) is None


def picture(url: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": "What is this?"}]
    return {"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": url}}]}


def test_images_count_as_some_text_however_many_bytes_they_have() -> None:
    image = "data:image/png;base64," + "A" * (1 << 20)
    index, asked = PrefixIndex(), chat(SYSTEM, picture(image))
    learn(index, chat(SYSTEM, user("What is a tree?")), chain(31), 500)
    known = index.find(asked)
    assert known is not None
    assert 400 < known.common_tokens <= 500 < known.prompt_tokens < 3000
    index = PrefixIndex()
    learn(index, asked, chain(130), 2100)
    known = index.find(asked)
    assert known is not None
    assert known.prompt_tokens == known.common_tokens + 20 == 2100  # 130 blocks
    other = index.find(chat(SYSTEM, picture(image + "B")))
    assert other is not None
    assert other.common_tokens < 1200  # another image has nothing to do with it
    text = index.find(chat(SYSTEM, user("How high is the Eiffel tower? " * 20)))
    assert text is not None
    assert 300 < text.common_tokens < text.prompt_tokens < 1500
    assert len(asked) < 10


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "tenant"}, {"tools": [{"type": "function"}]}, {"model": "m2"},
     {"chat_template_kwargs": {"thinking": True}}],
)  # fmt: skip
def test_what_changes_tokens_or_parts_tenants_changes_every_start(other: dict[str, Any]) -> None:
    index = PrefixIndex()
    learn(index, chat(SYSTEM, user("Hello")), chain(50), 640)
    assert index.find(chat(SYSTEM, user("Hello"), **other)) is None


def test_later_turns_keep_what_earlier_ones_taught() -> None:
    index = PrefixIndex()
    first = [SYSTEM, user("a")]
    second = [*first, answer("b" * 400), user("c")]
    learn(index, chat(*first), chain(50), 640)
    learn(index, chat(*second), chain(70), 820, at="d")
    for messages, blocks in ((first, 70), (second, 70)):
        known = index.find(chat(*messages))
        assert known is not None
        assert len(known.chain.names) == blocks
        assert known.holders == (("d", "p") if messages is first else ("d",))
    known = index.find(chat(*second, answer("d" * 100), user("e")))
    assert known is not None
    assert known.common_tokens >= 820


def test_token_ids_and_texts_are_cut_alike() -> None:
    index = PrefixIndex()
    ids = list(range(1000))
    learn(index, starts_of({"prompt": ids}, is_chat=False), chain(62), 1000)
    known = index.find(starts_of({"prompt": [*ids, 7, 8]}, is_chat=False))
    assert known is not None
    assert 896 <= known.common_tokens <= 1000  # whole pieces of 128 tokens
    assert known.prompt_tokens == 1002
    for strange in ([1 << 70], ["a", "b"], [[1], [2]], None, 3, {}):
        assert starts_of({"prompt": strange}, is_chat=False) == []
        starts_of({"messages": strange}, is_chat=True)


def test_reports_of_unknown_requests_teach_nothing() -> None:
    index, starts = PrefixIndex(), chat(user("Hello"))
    index.expect("r1", starts)
    for name in ("", "-", "chatcmpl-r2-1a2b", "r1"):
        index.learn(P, name, chain(4), 64)
    assert index.find(starts) is None
    index.learn(P, "chatcmpl-r1", Chain(array("Q"), 16), 64)
    known = index.find(starts)
    assert known is not None
    assert known.common_tokens == 0


def test_what_was_used_least_recently_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_MAX_NAMES", 200)
    index, asked = PrefixIndex(), [chat(user(text)) for text in "abcd"]
    for starts in asked[:2]:
        learn(index, starts, chain(50), 640)
    assert index.find(asked[0]) is not None
    learn(index, asked[2], chain(50), 640)
    assert [index.find(each) is None for each in asked] == [False, True, False, True]


def test_requests_that_do_not_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    index, asked = PrefixIndex(), [chat(user(text)) for text in "abcd"]
    index.expect("r2", asked[0])
    index.expect("r3", asked[1])
    now_s = 901.0
    index.expect("r4", asked[2])
    index.learn(P, "chatcmpl-r3", chain(50), 640)
    assert index.find(asked[1]) is not None
    now_s = 1802.0
    index.expect("r5", asked[3])
    index.learn(P, "chatcmpl-r2", chain(50), 640)
    assert index.find(asked[0]) is None
