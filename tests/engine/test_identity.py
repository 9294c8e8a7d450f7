"""What cannot be handed over, by name, and what two instances must agree on."""

from __future__ import annotations

from dataclasses import replace
from os import SEEK_END
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from tests.engine.harness import IDENTITY, vllm_config
from tests.engine.pair import CHUNK, Pair, prompt
from tests.transport.conftest import fails
from vllm_tetri.engine.identity import (
    checkpoint_digest,
    checkpoint_name,
    identity_of,
    weights_of,
    why_alone,
)
from vllm_tetri.engine.roles import NAMES_KEY
from vllm_tetri.transport.native import Receiver, Sender, Status
from vllm_tetri.transport.shards import Shards
from vllm_tetri.types import InstanceId, Role

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32}
FULL = FullAttentionSpec(**SHAPE, dtype=torch.float32)
SLIDING = SlidingWindowSpec(**SHAPE, dtype=torch.float32, sliding_window=64)
PARTLY = RSWASpec(**SHAPE, dtype=torch.float32, rswa_window=64)


def caches(*specs: Any, layout: str | None = None) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    made = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    made.kv_cache_layout = layout
    return made


def config(**changed: object) -> Any:
    """A configuration of vLLM, plain but for what is changed, by the path in it."""
    sizes = ["pipeline", "decode_context", "prefill_context"]
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            runner_type="generate",
            multimodal_config=None,
            **dict.fromkeys(("is_encoder_decoder", "is_diffusion"), False),
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        parallel_config=SimpleNamespace(**{f"{each}_parallel_size": 1 for each in sizes}, nnodes=1),
        speculative_config=None,
    )
    for name, value in changed.items():
        part = next((each for each in vars(made).values() if hasattr(each, name)), made)
        setattr(part, name, value)
    return made


def media(**changed: object) -> Any:
    """Such a part of a configuration, of a multimodal model."""
    return SimpleNamespace(**{"video_pruning_rate": None, "mm_processor_cache_gb": 4} | changed)


ALONE = {
    "RSWASpec": (config(), caches(FULL, PARTLY)),
    "no KV cache": (config(), caches()),
    "generates no text": (config(runner_type="pooling"), caches(FULL)),
    "encoder": (config(is_encoder_decoder=True, multimodal_config=media()), caches(FULL)),
    "prunes videos": (config(multimodal_config=media(video_pruning_rate=0.5)), caches(FULL)),
    "no names": (config(multimodal_config=media(mm_processor_cache_gb=0)), caches(FULL)),
    "diffusion": (config(is_diffusion=True), caches(FULL)),
    "routed experts": (config(aux_output_config=SimpleNamespace(enabled=True)), caches(FULL)),
    "drafts": (config(speculative_config=SimpleNamespace(method="medusa")), caches(FULL)),
    "pipeline": (config(pipeline_parallel_size=2), caches(FULL)),
    "context parallelism": (config(decode_context_parallel_size=2), caches(FULL)),
    "several hosts": (config(nnodes=2), caches(FULL)),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_handed_over_has_a_reason(name: str) -> None:
    assert name in why_alone(*ALONE[name])


@pytest.mark.parametrize("layout", [None, "LBHNC", "BLNHC"])
@pytest.mark.parametrize("multimodal", [None, media()])
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle", "mtp"])
def test_a_plain_model_is_handed_over(layout: str | None, multimodal: Any, method: str) -> None:
    drafts = SimpleNamespace(method=method)
    for each in (None, drafts):
        plain = config(multimodal_config=multimodal, speculative_config=each)
        assert why_alone(plain, caches(FULL, layout=layout)) == ""


def test_identity_names_every_difference(tmp_path: Path) -> None:
    real = vllm_config(tmp_path, Role.BOTH)
    tensor = torch.zeros((4, 2, 16, 64))
    one = identity_of(real, caches(FULL), [tensor], Shards())
    assert one == identity_of(real, caches(FULL), [tensor], Shards())
    other = identity_of(real, caches(FULL), [tensor.to(torch.bfloat16), tensor], Shards())
    assert {key for key in one if one[key] != other[key]} == {"kv_pages"}
    overridden = vllm_config(tmp_path, Role.BOTH, args={"hf_overrides": {"rms_norm_eps": 0.5}})
    other = identity_of(overridden, caches(FULL), [tensor], Shards())
    assert {key for key in one if one[key] != other[key]} == {"model"}
    kinds = set()
    for layers in (["0", "1"], ["0", "2"]):  # the pages are the same, and not those of one layer
        real.cache_config.kv_cache_dtype_skip_layers = layers
        tensors = [tensor.to(torch.bfloat16), tensor.to(torch.bfloat16), tensor, tensor]
        kinds.add(identity_of(real, caches(FULL), tensors, Shards())["kv_full_layers"])
    assert len(kinds) == 2
    names = {one["media"]}
    for size in (None, 100):
        real.model_config.multimodal_config = media(mm_processor_kwargs=size, media_io_kwargs={})
        names.add(identity_of(real, caches(FULL), [tensor], Shards())["media"])
    assert len(names) == 3
    real.model_config.multimodal_config = None
    extra = real.kv_transfer_config.kv_connector_extra_config
    assert one["served_model_names"] == "harness"
    extra[NAMES_KEY] = ["b", "a"]
    assert identity_of(real, caches(FULL), [tensor], Shards())["served_model_names"] == "a b"


def described(folder: Path, **changed: Any) -> dict[str, str]:
    """The identity of an instance, plain but for what is changed."""
    seed, groups, sizes = (changed.pop(each, None) for each in ("seed", "caches", "parallel"))
    path = checkpoint(folder, 100, seed=seed or 0)
    draft = changed.get("speculative_config")
    if draft is not None:
        (path / "draft").mkdir()
        vllm_config(path / "draft", Role.BOTH)
        changed["speculative_config"] = {**draft, "model": str(path / "draft")}
    made = vllm_config(path, Role.BOTH, args=changed)
    made.parallel_config.tensor_parallel_size = sizes or 1
    shards = Shards(sizes or 1, sizes or 1)
    return identity_of(made, groups or caches(FULL), [torch.zeros((4, 2, 16, 64))], shards)


def test_a_revision_keeps_instances_apart_that_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = described(tmp_path / "a")
    monkeypatch.setenv("TETRI_REVISION", "2")
    assert described(tmp_path / "b") == {**mine, "revision": "2"}
    assert mine["revision"] == ""


def test_checkpoints_of_one_model_are_alike_where_an_operator_vouches_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETRI_WEIGHTS", "tiny")
    mine = described(tmp_path / "a")
    quantized = {**OTHERS["model by quantization"], **OTHERS["weights"]}
    assert described(tmp_path / "b", **quantized) == mine
    assert mine["weights"] == "tiny"
    assert described(tmp_path / "c", dtype="float32") != mine


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"hf_overrides": {"rms_norm_eps": 0.5}},
    "model by quantization": {"hf_overrides": {"quantization_config": {
        "quant_method": "compressed-tensors", "config_groups": {}}}},
    "weights": {"seed": 1},
    "drafts": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
    "dtype": {"dtype": "float32"},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
    "layout": {"caches": caches(FULL, layout="BLNHC")},
    "kv_groups": {"caches": caches(FULL, SLIDING)},
    "tensor_parallel": {"parallel": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_peer_that_differs_is_refused_with_both_values(name: str, tmp_path: Path) -> None:
    key = name.partition(" ")[0]
    mine, theirs = described(tmp_path / "a"), described(tmp_path / "b", **OTHERS[name])
    assert {each for each in mine if mine[each] != theirs[each]} == {key}
    receiver, sender = Receiver(arena_bytes=1 << 20, identity=theirs), Sender(identity=mine)
    try:
        words = f"KV identity differs: {key}: here {mine[key]}, there {theirs[key]}"
        fails(sender.open(receiver.endpoint, "t", 1, 512), Status.REFUSED, words)
        assert receiver.stats().refused_identity == 1
    finally:
        sender.close()
        receiver.close()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_prompt_that_a_differing_peer_has_computed_is_computed_again(
    is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the prefill instance knows only what its peer was before."""
    theirs = {"identity": IDENTITY | {"kv_cache_dtype": "fp8"}}
    pair = Pair(tmp_path, decode=theirs, arena_bytes=1 << 20, transfer_timeout_s=1.0)
    if not is_told:
        pair.decode.endpoint.info = replace(pair.decode.info, identity=pair.prefill.info.identity)
        pair.prefill.sees(pair.prefill, pair.decode)
    tokens = prompt(3 * CHUNK)
    pair.send("a", tokens)
    response = pair.prefilled("a")
    pair.decoding("a", tokens, response.transfer)
    pair.end("a")
    assert pair.decode.endpoint.receives.loaded_bytes == 0
    assert (pair.decode.endpoint.receiver.stats().refused_identity == 0) == is_told
    if is_told:
        assert response.decode == InstanceId("")
    else:
        assert "KV identity differs: kv_cache_dtype: here absent, there fp8" in caplog.text
    pair.close()


def checkpoint(folder: Path, *sizes: int, seed: int = 0, index: str = "{}") -> Path:
    """Files of weights with random contents."""
    folder.mkdir(parents=True)
    rng = Random(seed)
    for number, size in enumerate(sizes):
        (folder / f"model-{number}.safetensors").write_bytes(rng.randbytes(size))
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def test_equal_files_are_one_checkpoint_wherever_they_lie(tmp_path: Path) -> None:
    one, other = (checkpoint(tmp_path / name, 100, 70_000) for name in ("a", "b"))
    (other / "README.md").write_text("not weights")
    (other / "pytorch_model.bin").write_text("the same in another format")
    assert checkpoint_digest(one) == checkpoint_digest(other) != ""


def test_names_sizes_contents_and_index_tell_checkpoints_apart(tmp_path: Path) -> None:
    sizes = (20_000_001, 5)  # so large that not every page is read
    folders = [
        checkpoint(tmp_path / "one", *sizes),
        checkpoint(tmp_path / "instruct", *sizes, seed=1),
        checkpoint(tmp_path / "longer", sizes[0], 6),
        checkpoint(tmp_path / "indexed", *sizes, index='{"weight_map": {}}'),
        checkpoint(tmp_path / "renamed", *sizes),
        checkpoint(tmp_path / "tail", *sizes),
    ]
    (folders[4] / "model-1.safetensors").rename(folders[4] / "model-2.safetensors")
    with (folders[5] / "model-0.safetensors").open("r+b") as file:
        file.seek(-1, SEEK_END)
        file.write(b"!")
    assert len({*map(checkpoint_digest, folders)}) == len(folders)


def test_one_file_is_a_checkpoint_and_a_folder_without_weights_is_none(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", 10)
    assert checkpoint_digest(folder / "model-0.safetensors")
    assert checkpoint_digest(tmp_path) == ""


def loading(model: str, load_format: str = "auto", **options: str | None) -> Any:
    named = {"model": model, "model_weights": "", "revision": None, **options}
    load = SimpleNamespace(load_format=load_format, download_dir=None)
    return SimpleNamespace(model_config=SimpleNamespace(**named), load_config=load)


def test_weights_are_named_by_files_else_by_address_and_revision(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name-7b" / "snapshots" / ("0123456789ab" + 28 * "f")
    config = loading(str(checkpoint(folder, 10)))
    assert weights_of(config) == checkpoint_digest(folder)
    assert checkpoint_name(config) == "org/name-7b@0123456789ab"
    assert weights_of(loading(str(folder), "dummy")) == "dummy"
    remote = loading(str(tmp_path), model_weights="s3://bucket/model")
    assert weights_of(remote) == checkpoint_name(remote) == "s3://bucket/model"
    assert weights_of(loading("org/absent", revision="abc")) == "org/absent@abc"
