"""What two instances must agree on before KV travels between them, and what cannot travel yet.

Weights are named by what the checkpoint holds, not by where it lies: two folders with the same
files are one checkpoint, a base and an instruct model of one architecture are two.

``python -P -m vllm_tetri.engine.identity OPTIONS`` prints for options of a `vllm serve` why its KV
could not be handed over, without loading weights (`vllm-tetri doctor MODEL`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from copy import copy
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import torch
import vllm
from huggingface_hub import snapshot_download

from vllm_tetri.engine.compat import (
    KVCacheConfig,
    KVCacheGroupSpec,
    LoRARequest,
    Request,
    current_platform,
)
from vllm_tetri.engine.roles import NAMES_KEY
from vllm_tetri.handover import digest_of
from vllm_tetri.transport.shards import Shards, head_pages

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

IDENTITY_VERSION = "1"  # of what is compared; frames have one of their own

# The formats of weights; a checkpoint is named by the first one that it has.
_FORMATS = ((".safetensors",), (".bin", ".pt", ".pth"), (".gguf",))
_PAGE_BYTES = 4096
_MOST_PAGES = 2048  # that are read of a checkpoint, and two of every file
# Kinds of vLLM's KV cache groups whose blocks are all that a later token needs of a layer.
_BY_HEAD = {  # each rank has heads of its own
    "FullAttentionSpec",
    "SinkFullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
}
_REPLICATED = {"MLAAttentionSpec", "SlidingWindowMLASpec"}  # every rank has all of it
_TRANSFERABLE = {*_BY_HEAD, *_REPLICATED, "MambaSpec"}
# How tokens are drafted: from earlier ones, or by layers whose KV travels with the model's.
_LOOKUPS = ("ngram", "ngram_gpu", "suffix")
_DRAFTERS = ("draft_model", "eagle", "eagle3", "mtp")


def identity_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    tensors: list[torch.Tensor],
    shards: Shards,
) -> dict[str, str]:
    """Return every property that changes the bytes of a block or the names of the model: two
    instances must agree on all of them before blocks are transferred. The KV layout of vLLM's CPU
    backend is packed for the instruction set, which is a property, too. Pages are those of a model
    that is not spread, where heads can be told apart; else the number of workers is a property.
    Options of LoRA are none: adapters act on tokens of their requests alone. `TETRI_REVISION` is
    for the rest; `TETRI_WEIGHTS` names weights, if the operator vouches for several checkpoints.
    """
    pages = dict.fromkeys(_page_words(each, shards) for each in tensors)
    size = {} if shards.num_heads else {"tensor_parallel": str(shards.num_ranks)}
    model, device = vllm_config.model_config, tensors[0].device.type
    vouched = os.environ.get("TETRI_WEIGHTS", "")
    full_layers = getattr(vllm_config.cache_config, "kv_cache_dtype_skip_layers", None) or []
    isa = torch.backends.cpu.get_cpu_capability() if device == "cpu" else ""
    return {
        "protocol": IDENTITY_VERSION,
        "vllm": vllm.__version__,
        "revision": os.environ.get("TETRI_REVISION", ""),
        "served_model_names": " ".join(sorted(served_names(vllm_config))),
        "model": vouched or _configuration_of(model),
        "weights": vouched or weights_of(vllm_config),
        "drafts": _drafts_of(vllm_config),
        "media": _media_of(vllm_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": str(model.max_model_len),  # an output must not end sooner elsewhere
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "kv_full_layers": " ".join(sorted(full_layers)),
        "kv_groups": "; ".join(map(_group_words, kv_cache_config.kv_cache_groups)),
        "kv_pages": "; ".join(pages),
        "attention": " ".join(sorted(_backends(vllm_config))),
        "layout": str(kv_cache_config.kv_cache_layout),
        "device": device,
        "isa": isa.replace(" ", ""),
        **size,
    }


def shards_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, tensors: list[torch.Tensor]
) -> Shards:
    """Return how the KV is spread over the workers. Heads can be told apart if all layers are alike
    attention, with as many heads as the model's configuration says."""
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group)]
    kinds = {type(spec).__name__ for spec in specs}
    if kinds <= _REPLICATED:
        return Shards(num_ranks, num_parts=1, num_heads=1)
    if kinds <= _BY_HEAD:
        num_heads = vllm_config.model_config.get_total_num_kv_heads()
        num_parts = min(num_ranks, num_heads)
        mine = num_heads // num_parts
        is_even = num_heads % num_parts == num_ranks % num_parts == 0
        is_known = is_even and set(map(_heads_of, specs)) == {mine}
        if is_known and (pages := head_pages(tensors, kv_cache_config.num_blocks, mine)):
            return Shards(num_ranks, num_parts, num_heads, pages)
    return Shards(num_ranks, num_ranks)


def _heads_of(spec: Any) -> int:
    """Return how many heads a rank has in a page; 0 if its backend packs them in its own way."""
    packed = getattr(spec, "num_head_slots", None), getattr(spec, "state_content_bytes", None)
    return int(spec.num_kv_heads) if packed == (None, None) else 0


def _configuration_of(model: ModelConfig) -> str:
    differing = ('"_name_or_path"', '"transformers_version"')  # between equal models
    lines = model.hf_config.to_json_string(use_diff=False).splitlines()
    alike = [line for line in lines if not line.strip().startswith(differing)]
    alike.append(f"{model.quantization} {model.quantization_config}")
    return hashlib.sha256("\n".join(alike).encode()).hexdigest()[:16]


def _drafts_of(vllm_config: VllmConfig) -> str:
    """Return what names the KV of drafts: their method, the draft model's configuration and its
    weights; empty if they have none."""
    config = vllm_config.speculative_config
    if config is None or config.method in _LOOKUPS:
        return ""
    drafter = copy(vllm_config)
    drafter.model_config = config.draft_model_config
    drafter.load_config = config.draft_load_config or vllm_config.load_config
    return f"{config.method} {_configuration_of(drafter.model_config)} {weights_of(drafter)}"


def _group_words(group: KVCacheGroupSpec) -> str:
    kinds = dict.fromkeys(
        f"{type(spec).__name__} {window}".strip()
        for spec in specs_of(group)
        for window in [getattr(spec, "sliding_window", getattr(spec, "attention_chunk_size", ""))]
    )
    return f"{len(group.layer_names)} x {group.kv_cache_spec.block_size} {', '.join(kinds)}"


def _page_words(tensor: torch.Tensor, shards: Shards) -> str:
    sizes, steps = [*tensor.shape[1:]], [*tensor.stride()[1:]]
    if shards.pages:
        sizes[0] = shards.num_heads
        steps[1:] = [each * shards.num_parts if each >= steps[0] else each for each in steps[1:]]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {'x'.join(map(str, sizes))} by {'x'.join(map(str, steps))}"


def _backends(vllm_config: VllmConfig) -> set[str]:
    """Return the attention backends: what a page means is theirs to say."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    found = [layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")]
    return {each.get_name() for each in found}


def specs_of(group: KVCacheGroupSpec) -> list[Any]:
    """Return what vLLM knows of a group's layers; one for all if they are alike."""
    spec = group.kv_cache_spec
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def _media_of(vllm_config: VllmConfig) -> str:
    """Return what changes the names or the processing of a multimodal model's media. vLLM makes
    the model's address a part of those names; empty for models of text."""
    model, media = vllm_config.model_config, vllm_config.model_config.multimodal_config
    if media is None:
        return ""
    hasher = os.environ.get("VLLM_MM_HASHER_ALGORITHM")
    named = repr((model.model, media.mm_processor_kwargs, media.media_io_kwargs, hasher))
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def prompt_digest(request: Request) -> str:
    """Return the name of a request's prompt: its tokens, which media stand where in it, and the
    LoRA adapter."""
    places = ((each.identifier, each.mm_position) for each in request.mm_features)
    media = [(name, place.offset, place.length) for name, place in places]
    lora = request.lora_request
    adapter = None if lora is None else (lora.lora_name, adapter_digest(lora))
    return digest_of(request.prompt_token_ids or (), media, adapter)


def adapter_digest(lora: LoRARequest) -> str:
    """Return a digest of a LoRA adapter as it was when this process was asked for it first.

    vLLM reads files again when it needs room for others, so an adapter whose files have changed
    since, which may be either one, gets a digest that no other process has. So does one without
    files here.
    """
    digest, files, unlike = _first_seen(lora.lora_int_id, lora.lora_path, lora.load_inplace)
    now = _files_at(lora.lora_path)
    is_known = bool(digest) and (not now or now == files)  # what is gone is not read again
    return f"{digest}{'-3d' * lora.is_3d_lora_weight}" if is_known else unlike


@cache
def _first_seen(_number: int, path: str, _is_reloaded: bool) -> tuple[str, tuple[object, ...], str]:
    """Return the digest of a loaded adapter, its files, and a random digest."""
    files, folder = _files_at(path), _local(path)
    try:
        digest = checkpoint_digest(folder) if files and folder is not None else ""
    except OSError:  # they are being replaced
        digest = ""
    return digest, files, token_hex(8)


def _files_at(path: str) -> tuple[object, ...]:
    """Return names, sizes and times of an adapter's files; empty if there are none."""
    folder = _local(path)
    try:
        found = [(each.name, each.stat()) for each in os.scandir(folder)] if folder else []
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


def served_names(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Return the names that the API server serves the model by, the canonical one first."""
    return tuple(vllm_config.kv_transfer_config.kv_connector_extra_config[NAMES_KEY])


def weights_of(vllm_config: VllmConfig) -> str:
    """Return what names the weights: a digest of the checkpoint's files, or its address and
    revision where no file is on this machine (object stores)."""
    if vllm_config.load_config.load_format == "dummy":
        return "dummy"  # vLLM makes them by a fixed seed
    folder = _folder_of(vllm_config)
    return (checkpoint_digest(folder) if folder else "") or checkpoint_name(vllm_config)


def checkpoint_name(vllm_config: VllmConfig) -> str:
    """Return the address of the checkpoint, for people: ``org/name@revision`` of the hub, else its
    folder or URL."""
    model = vllm_config.model_config
    folder = _folder_of(vllm_config)
    if folder is not None and folder.parent.name == "snapshots":
        repository = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        return f"{repository}@{folder.name[:12]}"
    address = model.model_weights or model.model
    return f"{address}@{model.revision}" if model.revision else str(address)


def _folder_of(vllm_config: VllmConfig) -> Path | None:
    """Return the checkpoint's folder or file on this machine, if there is one."""
    model = vllm_config.model_config
    address, cache_dir = model.model_weights or model.model, vllm_config.load_config.download_dir
    return _local(address, revision=model.revision, cache_dir=cache_dir)


def _local(
    address: str, *, revision: str | None = None, cache_dir: str | None = None
) -> Path | None:
    """Return the folder or file of a path or of a name of the hub, if it is on this machine."""
    if (path := Path(address).expanduser()).exists():
        return path
    try:
        found = snapshot_download(
            address, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except (OSError, ValueError):  # it is not in the cache, or no name of the hub
        return None
    return Path(found)


def checkpoint_digest(checkpoint: Path) -> str:
    """Return a digest of the weights in a folder or file; empty if there are none.

    It covers names and sizes of the files, whole indices, an adapter's configuration, and pages
    that are spread evenly over all bytes: files of two models of one architecture differ in
    nothing else. The work is bounded by `_MOST_PAGES`, whatever the size; a change between two
    pages is not seen.
    """
    files = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    found = ([each for each in files if each.suffix in suffixes] for suffixes in _FORMATS)
    weights: Sequence[Path] = next(filter(None, found), ())
    if not weights:
        return ""
    sizes = [each.stat().st_size for each in weights]
    step = max(_PAGE_BYTES, sum(sizes) // _MOST_PAGES)
    digest = hashlib.sha256()
    for path in files:
        if path.name.endswith((".index.json", "adapter_config.json")):
            digest.update(path.read_bytes())
    for path, size in zip(weights, sizes, strict=True):
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb", buffering=0) as file:
            for offset in (*range(0, size, step), max(0, size - _PAGE_BYTES)):
                digest.update(os.pread(file.fileno(), _PAGE_BYTES, offset))
    return digest.hexdigest()[:16]


def why_alone(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return why KV of this instance cannot be handed over yet, so that it serves every request
    alone; empty if it can."""
    groups = kv_cache_config.kv_cache_groups
    kinds = {type(spec).__name__ for group in groups for spec in specs_of(group)}
    unknown = ", ".join(sorted(kinds - _TRANSFERABLE))
    is_partial = len(kv_cache_config.transfer_group_ids) < len(groups)
    found = {
        **reasons_alone(vllm_config),
        "it has no KV cache": not groups,
        f"a part of its KV cache is of the kind {unknown}": bool(unknown),
        "a part of its KV cache is not to be transferred": is_partial,
    }
    return next((reason for reason, applies in found.items() if applies), "")


def reasons_alone(vllm_config: VllmConfig) -> dict[str, bool]:
    """Return the reasons that the configuration alone tells, and whether they apply."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    media, drafts = model.multimodal_config, vllm_config.speculative_config
    device = current_platform.device_name
    is_known = current_platform.is_cpu() or current_platform.is_cuda()
    return {
        f"it runs on {device}, and only KV of CPUs and CUDA GPUs travels": not is_known,
        "it generates no text": model.runner_type == "pooling",
        "it has an encoder and a decoder": model.is_encoder_decoder,
        "it prunes videos, of which only it knows the positions": media is not None
        and bool(media.video_pruning_rate),
        "its media have no names without caches of them and of prefixes": media is not None
        and not (media.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching),
        "it generates by diffusion": model.is_diffusion,
        "it returns routed experts, of which KV tells nothing": getattr(
            getattr(vllm_config, "aux_output_config", None), "enabled", False
        ),
        "its drafts come from an unknown method": drafts is not None
        and drafts.method not in (*_LOOKUPS, *_DRAFTERS),
        "its layers are spread (pipeline parallelism)": parallel.pipeline_parallel_size > 1,
        "its KV is spread (context parallelism)": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "its workers are on several hosts": parallel.nnodes > 1,
    }


def main(words: list[str]) -> None:
    """Print `why_alone` as JSON, null where it shows only when the model is loaded."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    given = parser.parse_args(["--role", "both", *words])
    config = AsyncEngineArgs.from_cli_args(given).create_engine_config()
    why = next((reason for reason, applies in reasons_alone(config).items() if applies), None)
    if why is None:
        try:
            why = why_alone(config, _caches_of(config))
        except Exception as error:  # whatever a model's layers want that is not here
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    print(f"\n{json.dumps(why)}")


def _caches_of(config: VllmConfig) -> KVCacheConfig:
    """Return the groups of KV caches that vLLM would make for a model, built without memory."""
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    config.parallel_config.tensor_parallel_size = 1
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as meeting, dtype:
        init_distributed_environment(1, 0, f"file://{meeting.name}", 0, "gloo")
        initialize_model_parallel()
        with torch.device("meta"):
            initialize_model(config)
        specs = {}
        for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
            if not getattr(layer, "kv_sharing_target_layer_name", None):
                specs[name] = layer.get_kv_cache_spec(config)
        groups = get_kv_cache_groups(config, {name: spec for name, spec in specs.items() if spec})
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


if __name__ == "__main__":
    main(sys.argv[1:])
