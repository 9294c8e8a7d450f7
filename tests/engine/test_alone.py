"""Instances whose KV cannot be handed over: they serve every request whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import Cell, Engine
from tests.engine.pair import CHUNK, Pair, prompt
from vllm_tetri.engine import endpoint
from vllm_tetri.engine.pacing import work_of
from vllm_tetri.handover import DecodeParams, PrefillParams, to_params
from vllm_tetri.types import RequestId, Role, TransferId

STAGES = {"runner": "pooling"}
DRAFTS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path, Role.PREFILL, args=STAGES)
    yield engine
    engine.close()


@pytest.fixture
def speculating(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(
        tmp_path, Role.PREFILL, num_blocks=256, chunk_size=32, args={"speculative_config": NGRAM}
    )
    yield engine
    engine.close()


def test_it_says_so_in_one_line_and_takes_no_memory_for_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(endpoint.logger, "warning", lambda text, *args: lines.append(text % args))
    engine = Engine(tmp_path, Role.DECODE, args=STAGES)
    engine.close()
    (line,) = lines
    assert "since it generates no text" in line
    assert engine.info.alone == "it generates no text"
    assert engine.info.arena_tokens == 0


def test_a_request_is_whole_whatever_its_parameters_say(cell: Cell, alone: Engine) -> None:
    if cell.is_async:
        pytest.skip("vLLM expects no tokens of a pooling model, whose place these requests take")
    alone.sees(alone)
    asked = {
        "prefill": PrefillParams(TransferId("r0"), RequestId("r0"), anywhere=True),
        "decode": DecodeParams(TransferId("r1"), ""),
    }
    for name, params in asked.items():
        alone.add(name, list(range(1, 80)), max_tokens=3, params=to_params(params))
    alone.run_until(lambda: len(alone.finished) == len(asked))
    assert alone.finished == dict.fromkeys(asked)
    assert alone.outputs == {name: [7, 7, 7] for name in asked}
    alone.run_until(lambda: alone.is_at_rest)


def test_a_model_without_kv_is_served(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Role.BOTH, specs=(), args={"enable_prefix_caching": False})
    assert engine.info.alone == "it has no KV cache"
    engine.add("a", list(range(80)))
    engine.run_until(lambda: "a" in engine.finished)
    assert len(engine.outputs["a"]) == 4
    engine.close()


def test_drafts_leave_a_prompt_its_chunk(speculating: Engine) -> None:
    decodes = [speculating.add(f"d{i}", [1, 2, 3], max_tokens=50) for i in range(4)]
    speculating.run_until(lambda: all(each.num_output_tokens > 1 for each in decodes))
    prompt = speculating.add("p", list(range(1, 200)), max_tokens=1)
    for each in decodes:
        each.spec_token_ids = [7] * DRAFTS
    output = speculating.scheduler.schedule()
    assert output.num_scheduled_tokens == {
        **{each.request_id: 1 + DRAFTS for each in decodes},
        prompt.request_id: 32,
    }
    assert work_of(output, 0.0).num_decodes == len(decodes)


def test_a_request_whose_kv_came_enters_without_drafts(cell: Cell, tmp_path: Path) -> None:
    """vLLM would pad it by drafts that are none."""
    if cell.runner == "v2":
        pytest.skip("the V1 runner alone needs it: `pad_no_drafts`")
    pair = Pair(tmp_path, args={"speculative_config": NGRAM})
    tokens = prompt(3 * CHUNK + 1)
    pair.sent("a", tokens)
    request = pair.receive("a", tokens, max_tokens=9)
    while not (output := pair.decode.step()).total_num_scheduled_tokens:
        assert not request.num_output_tokens
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.scheduled_spec_decode_tokens == {}
    assert pair.decode.holds(request, len(tokens))
    pair.end("a")
    pair.close()
