"""Prompts out of the files that people have them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_tetri.errors import ConfigError
from vllm_tetri.predictor.prompts import Source, mixed, read_source

ITEMS: list[tuple[Any, str]] = [
    ("plain", "plain"),
    ({"prompt": "p"}, "p"),
    ({"instruction": "do"}, "do"),
    ({"instruction": "do", "input": "this", "output": "done"}, "do\n\nthis"),
    ({"user_query": "why", "chatgpt_response": "so"}, "why"),
    (
        {"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "first"}]},
        "first",
    ),
    (
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "parts"}]},
            ]
        },
        "parts",
    ),
]


@pytest.mark.parametrize(("item", "prompt"), ITEMS)
def test_item_gives_its_first_user_turn(tmp_path: Path, item: Any, prompt: str) -> None:
    path = tmp_path / "items.json"
    path.write_text(json.dumps([item]))

    assert read_source(path).texts == (prompt,)


@pytest.mark.parametrize("name", ["items.jsonl", "items.json"])
def test_lines_of_items_are_read_under_either_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"prompt": "one\\u2028more"}\n\n{"prompt": "two\u2028parts"}\n')

    assert read_source(path).texts == ("one\u2028more", "two\u2028parts")


def test_text_file_holds_a_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\r\n")

    assert read_source(path).texts == ("one", "two")


def test_folder_is_one_source_and_other_items_in_it_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"prompt": "one"}')
    (tmp_path / "b.json").write_text('{"progress": 7}')
    (tmp_path / "c.jsonl").write_text('{"prompt": " "}\n{"prompt": "two"}\n')

    source = read_source(tmp_path)

    assert (source.texts, source.num_empty) == (("one", "two"), 2)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing.json", None, "No such file"),
        ("latin.txt", b"caf\xe9\n", "not UTF-8 at byte 3"),
        ("broken.json", b'[{"prompt": ', "not JSON"),
        ("broken.jsonl", b'{"prompt": "one"}\n{"prompt"\n', "line 2: not JSON"),
        ("deep.json", b"[" * 100_000, "not JSON"),
        ("other.json", b'[{"answer": "42"}]', "known fields: conversations"),
        ("empty.txt", b"\n \n", "no prompt in it"),
    ],
)
def test_unusable_file_is_named_with_the_reason(
    tmp_path: Path, name: str, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=complaint) as caught:
        read_source(path)

    assert name in str(caught.value)


@pytest.mark.parametrize("num", [1000, 20_000])
def test_any_beginning_of_the_mix_has_prompts_of_every_source(num: int) -> None:
    sources = [
        Source("few", tuple(f"few {index}" for index in range(1000)), 0),
        Source("many", tuple(f"many {index}" for index in range(num)), 0),
    ]

    first = mixed(sources, per_source=1000, seed=0)[:200]

    assert 70 < sum(prompt.source == "few" for prompt in first) < 130


def test_order_stays_when_a_source_grows() -> None:
    few = mixed([Source("a", ("1", "2", "3"), 0)], per_source=None, seed=0)

    more = mixed([Source("a", ("9", "1", "2", "3", "7"), 0)], per_source=None, seed=0)

    assert [prompt for prompt in more if prompt.text in "123"] == few


def test_equal_prompts_are_asked_once_and_sources_are_limited() -> None:
    texts = tuple(str(index % 10) for index in range(100))

    prompts = mixed([Source("a", texts, 0), Source("b", texts, 0)], per_source=None, seed=0)

    assert len(prompts) == 10
    assert len(mixed([Source("a", texts, 0)], per_source=4, seed=0)) == 4
