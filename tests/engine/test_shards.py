"""What vLLM's tensors say about heads, and which instances can read each other's KV."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.engine.harness import vllm_config
from vllm_tetri.engine.identity import identity_of, shards_of
from vllm_tetri.transport.shards import Shards
from vllm_tetri.types import Role

BLOCKS, TOKENS, HEADS, SIZE = 4, 16, 8, 32
AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()


def attention(ranks: int, kind: type = FullAttentionSpec, **more: Any) -> Any:
    """What vLLM knows of a layer of a rank."""
    heads = max(1, HEADS // ranks)
    shape = {"block_size": TOKENS, "num_kv_heads": heads, "head_size": SIZE}
    return kind(**shape, dtype=torch.float32, **more)


def latents() -> Any:
    shape = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": SIZE}
    return MLAAttentionSpec(**shape, dtype=torch.float32)


def state() -> Any:
    return MambaSpec(block_size=TOKENS, shapes=((4, 4),), dtypes=(torch.float32,))


def tensor(heads: int, *, is_outermost: bool = True) -> torch.Tensor:
    """A rank's layer as vLLM shapes it: [block, head, token, content]."""
    if is_outermost:
        return torch.zeros((BLOCKS, heads, TOKENS, 2 * SIZE))
    return torch.zeros((BLOCKS, TOKENS, heads, 2 * SIZE)).transpose(1, 2)


def spread(folder: Path, ranks: int, specs: list[Any], tensors: list[torch.Tensor]) -> Any:
    """The shards and the identity of an instance of the size."""
    config = vllm_config(folder, Role.BOTH)
    config.parallel_config.tensor_parallel_size = ranks
    config.model_config.model_arch_config.total_num_kv_heads = HEADS
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    shards = shards_of(config, caches, tensors)
    return shards, identity_of(config, caches, tensors, shards)


@pytest.mark.parametrize("is_outermost", [True, False])
def test_instances_whose_heads_are_known_are_alike_whatever_their_sizes(
    tmp_path: Path, is_outermost: bool
) -> None:
    found, parts = [], []
    for ranks in (1, 2, 4, 8, 16):
        specs = [attention(ranks), attention(ranks, SlidingWindowSpec, sliding_window=64)]
        layer = tensor(specs[0].num_kv_heads, is_outermost=is_outermost)
        shards, identity = spread(tmp_path, ranks, specs, [layer, layer])
        found.append(identity)
        parts.append(shards.num_parts)
        assert [page.repeats for page in shards.pages] == [1 if is_outermost else TOKENS]
    assert parts == [1, 2, 4, 8, 8]
    assert all(identity == found[0] for identity in found)
    assert "8x16x64" in found[0]["kv_pages"]


def test_tokens_or_heads_outermost_is_a_difference(tmp_path: Path) -> None:
    for ranks in (1, 8):
        layers = [tensor(HEADS // ranks, is_outermost=each) for each in (True, False)]
        one, other = (spread(tmp_path, ranks, [attention(ranks)], [each])[1] for each in layers)
        assert {key for key in one if one[key] != other[key]} == {"kv_pages"}


def test_latents_are_sent_by_one_rank_of_any_number(tmp_path: Path) -> None:
    layer = torch.zeros((BLOCKS, 1, TOKENS, SIZE))
    found = [spread(tmp_path, ranks, [latents()], [layer]) for ranks in (1, 2, 8)]
    assert [shards for shards, _ in found] == [Shards(ranks, 1, 1) for ranks in (1, 2, 8)]
    assert all(identity == found[0][1] for _, identity in found)


UNKNOWN: dict[str, Any] = {
    "a state": lambda ranks: ([attention(ranks), state()], [tensor(HEADS // ranks)]),
    "states alone": lambda ranks: ([state()], [torch.zeros((BLOCKS, 64))]),
    "latents beside heads": lambda ranks: ([attention(ranks), latents()], [tensor(HEADS // ranks)]),
    "other heads than the model's": lambda ranks: ([attention(2 * ranks)], [tensor(4 // ranks)]),
    "another shape": lambda ranks: ([attention(ranks)], [tensor(HEADS // ranks).flatten(2)]),
    "contents of its own": lambda ranks: (
        [attention(ranks, state_content_bytes=8 * SIZE)],
        [tensor(HEADS // ranks)],
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_heads_are_not_known_the_size_has_to_be_equal(tmp_path: Path, name: str) -> None:
    one, two = (spread(tmp_path, ranks, *UNKNOWN[name](ranks)) for ranks in (1, 2))
    assert (one[0], two[0]) == (Shards(1, 1), Shards(2, 2))
    assert (one[1]["tensor_parallel"], two[1]["tensor_parallel"]) == ("1", "2")
    assert not one[0].can_read(2)
    assert not two[0].can_read(1)


def test_heads_that_do_not_divide_are_not_cut(tmp_path: Path) -> None:
    specs = [attention(1, num_head_slots=None)]
    shards, identity = spread(tmp_path, 3, specs, [tensor(HEADS)])
    assert (shards, identity["tensor_parallel"]) == (Shards(3, 3), "3")


@pytest.mark.parametrize(
    "isa", ["vec", "vec16", pytest.param("amx", marks=pytest.mark.skipif(not AMX, reason="no AMX"))]
)
def test_a_head_has_the_same_bytes_alone_and_beside_others(isa: str) -> None:
    """However vLLM's CPU backend packs the tokens of a block."""
    dtype = torch.bfloat16 if isa == "amx" else torch.float32
    dice = torch.Generator().manual_seed(5)
    key, value = (torch.randn(70, 4, 64, generator=dice).to(dtype) for _ in range(2))
    slots = torch.randperm(4 * 32, generator=dice)[:70]

    def written(first: int, last: int) -> torch.Tensor:
        cache = torch.zeros((4, last - first, 32, 2 * 64), dtype=dtype)
        heads, impl = (
            slice(first, last),
            SimpleNamespace(attn_type="decoder", kv_cache_dtype="auto"),
        )
        layer: Any = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
        CPUAttentionBackendImpl.do_kv_cache_update(
            impl, layer, key[:, heads], value[:, heads], cache, slots
        )
        return cache

    whole = written(0, 4)
    assert whole.any()
    assert torch.equal(whole, torch.cat([written(0, 1), written(1, 2), written(2, 4)], dim=1))
