"""Which blocks of a prompt a slot holds, with vLLM's own managers of KV cache groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from tests.engine.harness import BLOCK, FULL, SHAPE, WINDOW
from vllm_tetri.engine.blocks import PromptBlocks

CHUNK = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
STATE = MambaSpec(block_size=1024, shapes=((2048,),), dtypes=(torch.float32,))


def blocks_of(*specs: Any) -> PromptBlocks:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    return PromptBlocks(KVCacheManager(config, 1024, 1024, BLOCK, enable_caching=False))


@pytest.mark.parametrize(
    ("spec", "tokens", "span"),
    [
        (FULL, 100, range(7)),
        (WINDOW, 20, range(2)),  # shorter than the window
        (WINDOW, 100, range(4, 7)),  # the next token sees 69 to 100
        (CHUNK, 100, range(4, 7)),  # it is in the chunk that begins at 64
        (CHUNK, 128, range(8, 8)),  # it begins a chunk
        (STATE, 100, range(1)),
    ],
)
def test_a_slot_has_what_the_next_token_needs(spec: Any, tokens: int, span: range) -> None:
    assert blocks_of(spec).spans(tokens) == [span]


def test_groups_lie_one_after_the_other() -> None:
    blocks = blocks_of(FULL, WINDOW, STATE)
    ids = (list(range(10, 17)), [0, 0, 0, 0, 34, 35, 36], [50])
    assert blocks.count(100) == 7 + 3 + 1
    found = {first: run.tolist() for first, run in blocks.runs(100, ids)}
    assert found == {0: [10, 11, 12, 13, 14, 15, 16], 7: [34, 35, 36], 10: [50]}


def test_every_block_is_sent_once_when_it_is_complete() -> None:
    blocks = blocks_of(FULL, WINDOW, STATE)
    ids = (list(range(10, 17)), [0, 0, 0, 0, 34, 35, 36], [50])
    steps = [(0, 40), (40, 80), (80, 99), (99, None)]
    sent = [
        {first: run.tolist() for first, run in blocks.runs(100, ids, since=since, until=until)}
        for since, until in steps
    ]
    assert sent == [
        {0: [10, 11]},
        {2: [12, 13, 14], 7: [34]},
        {5: [15], 8: [35]},
        {6: [16], 9: [36], 10: [50]},
    ]


def test_what_a_slot_holds_is_enough_or_refused() -> None:
    assert blocks_of(FULL).holds(100, 99)
    assert blocks_of(FULL, WINDOW).holds(100, 99)
    assert not blocks_of(WINDOW).holds(111, 110)  # one token back begins a block earlier
    assert blocks_of(FULL, STATE).holds(100, 100)
    assert not blocks_of(FULL, STATE).holds(100, 99)  # there is no state of 99 tokens


def test_what_is_held_is_a_hit_in_whole_blocks_unless_there_is_a_state() -> None:
    assert blocks_of(FULL).hit_tokens(100, 70) == 64
    assert blocks_of(FULL).hit_tokens(64, 64) == 48  # a block is left
    assert blocks_of(FULL, STATE).hit_tokens(4096, 4096) == 0


def test_an_arena_holds_prompts_by_their_groups() -> None:
    assert blocks_of(FULL).most_tokens(10) == 10 * BLOCK
    assert blocks_of(FULL, WINDOW).most_tokens(10) == 7 * BLOCK
    assert blocks_of(WINDOW, FULL, FULL).growing == [1, 2]
    assert blocks_of(WINDOW).growing == []
