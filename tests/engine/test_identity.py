"""What is refused at start, by name, and what two instances must agree on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.engine.harness import vllm_config
from vllm_tetri.engine.roles import identity_of, require_transferable
from vllm_tetri.errors import UnsupportedError
from vllm_tetri.types import Role

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32}
FULL = FullAttentionSpec(**SHAPE, dtype=torch.float32)
SLIDING = SlidingWindowSpec(**SHAPE, dtype=torch.float32, sliding_window=64)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)


def caches(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def config(*, is_multimodal: bool = False, speculative: object = None) -> Any:
    model = SimpleNamespace(model="some/model", is_multimodal_model=is_multimodal)
    return SimpleNamespace(model_config=model, speculative_config=speculative)


REFUSED = {
    "hybrid": (config(), caches(FULL, SLIDING)),
    "SlidingWindowSpec": (config(), caches(SLIDING)),
    "MLA": (config(), caches(MLA)),
    "multimodal": (config(is_multimodal=True), caches(FULL)),
    "speculative": (config(speculative=object()), caches(FULL)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name) as caught:
        require_transferable(*REFUSED[name])
    assert "some/model" in str(caught.value)
    assert "without --role" in str(caught.value)


def test_a_plain_model_is_carried() -> None:
    require_transferable(config(), caches(FULL))


def test_identity_names_every_difference(tmp_path: Path) -> None:
    real = vllm_config(tmp_path, Role.BOTH)
    tensor = torch.zeros((4, 2, 16, 64))
    one = identity_of(real, caches(FULL), [tensor])
    assert one == identity_of(real, caches(FULL), [tensor])
    other = identity_of(real, caches(FULL), [tensor.to(torch.bfloat16), tensor])
    assert {key for key in one if one[key] != other[key]} == {"kv_dtype", "num_layers"}
