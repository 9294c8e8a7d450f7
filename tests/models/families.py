"""Tiny checkpoints with random weights, one per model family.

Each has the family's real architecture and attention, with few, narrow layers; text is nonsense.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.tiny_model import CHAT_TEMPLATE, SEED, VOCAB, make_adapter, make_tokenizer

_FOLDER = Path(__file__).parents[2] / ".cache" / "models"
ADAPTER = "adapter"
_ADAPTED = ["q_proj", "o_proj", "qkv_proj"]
WINDOW = 128  # tokens that a sliding window sees: fewer than most prompts have

_SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "float32",
    **_SPECIAL,
}
_MOE = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = {**_MOE, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
_DEEPSEEK = {**_SHARED, **_MLA, "topk_group": 1, "num_key_value_heads": 4}
_V3 = {**_DEEPSEEK, "q_lora_rank": 64, "n_group": 2, "topk_method": "noaux_tc"}
_GDN = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "layer_types": [*3 * ["linear_attention"], "full_attention"],
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
_S, _F = "sliding_attention", "full_attention"
_WINDOWS = {"sliding_window": WINDOW, "layer_types": [_S, _S, _S, _F]}
_GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
# What vLLM's CPU kernels need: GDN computes in bfloat16 alone, and Mamba gives no states for later.
_BF16, _UNCACHED = ("--dtype", "bfloat16"), ("--no-enable-prefix-caching",)
# vLLM's CPU kernel for rotary embeddings takes heads for tokens where both are dimensions, so that
# what stock says depends on the batch; torch's operations instead.
_ROTARY = ("--compilation-config", '{"custom_ops":["-rotary_embedding"]}')
# Where there is AMX, MLA computes in bfloat16 alone.
_F32_MLA = ("--attention-backend", "CPU_MLA", *_ROTARY)
_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else 'IMAGE' }}"
    "{% endfor %}{% endif %}"
)


@dataclass(frozen=True)
class Sight:
    """What lets a model see: its vision tower, its processors, and tokens after the vocabulary."""

    vision: dict[str, Any]
    files: dict[str, dict[str, Any]]  # by name
    tokens: dict[str, str]  # by what the configuration calls their ids
    image: str  # in a prompt
    named: dict[str, str] = field(default_factory=dict)  # tokens, as the tokenizer calls them
    more: dict[str, Any] = field(default_factory=dict)  # of the configuration


_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_GEMMA_TOKENS = {
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}  # fmt: skip
_TOWER = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "patch_size": 14,
}  # fmt: skip


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    settings = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, **more}
    return {"rope_parameters": settings}


def _qwen_sight(**vision: Any) -> Sight:
    image = {
        "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 65536},
    }  # fmt: skip
    tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, **vision}
    return Sight(
        {**tower, "out_hidden_size": 128, "patch_size": 16, "num_position_embeddings": 64},
        {"preprocessor_config": image,
         "video_preprocessor_config": {"video_processor_type": "Qwen3VLVideoProcessor"}},
        _QWEN_TOKENS,
        "<|vision_start|><|image_pad|><|vision_end|>",
    )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family as people know it, and what its configuration has beyond the small sizes."""

    name: str
    kind: str  # transformers' model_type
    more: dict[str, Any] = field(default_factory=dict)
    pool_mib: int = 6  # of KV cache, so little that ten requests preempt each other
    serve: tuple[str, ...] = ()
    sight: Sight | None = None

    def make(self) -> Path:
        """The checkpoint's folder, made when it is not there yet."""
        folder = _FOLDER / f"tiny-{self.name.lower()}"
        mark = folder / f"complete-{crc32(repr((self, _SMALL)).encode()):08x}"
        if not mark.exists():
            if not (sight := self.sight):
                make_tokenizer(folder)
            else:
                parts = _PARTS.replace("IMAGE", sight.image)
                template = CHAT_TEMPLATE.replace("{{ message['content'] }}", parts)
                make_tokenizer(folder, template, tuple(sight.tokens.values()), **sight.named)
                for name, settings in sight.files.items():
                    (folder / f"{name}.json").write_text(json.dumps(settings))
            _make_weights(self, folder)
            mark.touch()
        return folder

    def make_adapter(self) -> Path:
        """The folder of a LoRA adapter for its queries and outputs of attention, made anew."""
        model = self.make()
        return make_adapter(model, model / ADAPTER, _ADAPTED, scale=0.2)


_ALL = (
    Family("Llama-3", "llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 512}}),
    Family("Qwen2.5", "qwen2"),
    Family("Qwen3", "qwen3"),
    Family("Qwen3-MoE", "qwen3_moe", {**_MOE, "num_experts": 8}),
    Family("Mixtral", "mixtral", _FEW),
    Family("Mistral-v0.1", "mistral", {"sliding_window": WINDOW}),
    Family("Gemma-2", "gemma2", _GEMMA),
    Family("Gemma-3-text", "gemma3_text", {**_WINDOWS, **_GEMMA}),
    Family("GPT-OSS", "gpt_oss", {**_FEW, "sliding_window": WINDOW, "head_dim": 64}, 12,
           ("--tool-call-parser", "openai")),
    Family("DeepSeek-V2", "deepseek_v2", {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1}, 24,
           _F32_MLA),
    Family("DeepSeek-V3", "deepseek_v3", _V3, 24, _F32_MLA),
    Family("DeepSeek-V3.2", "deepseek_v32", {
        **_V3, "index_n_heads": 4, "index_head_dim": 128, "index_topk": 512}, 24, _F32_MLA),
    Family("Phi-3", "phi3", {"original_max_position_embeddings": 4096}),
    Family("OLMo-2", "olmo2"),
    Family("OLMo-3", "olmo3", _WINDOWS),
    Family("GLM-4", "glm4"),
    Family("GLM-4-MoE", "glm4_moe", _SHARED),
    Family("Granite-3", "granite"),
    Family("Granite-3-MoE", "granitemoe", _FEW),
    Family("Llama-4", "llama4_text", {
        "attention_chunk_size": WINDOW, "num_local_experts": 4, "intermediate_size_mlp": 256,
        "no_rope_layers": [1, 1, 1, 0], "interleave_moe_layer_step": 2}),
    Family("Cohere2", "cohere2", {**_WINDOWS, "tie_word_embeddings": True, "logit_scale": 1.0}),
    Family("EXAONE-4", "exaone4", {**_WINDOWS, "sliding_window_pattern": "LLLG"}),
    Family("Qwen3-Next", "qwen3_next", {
        **_MOE, **_GDN, "num_experts": 8, "shared_expert_intermediate_size": 64}, 32, _BF16),
    Family("Falcon-H1", "falcon_h1", {**_MAMBA, "mamba_d_ssm": 256}, 32, _UNCACHED),
    Family("Granite-4-hybrid", "granitemoehybrid", {
        **_FEW, **_MAMBA, "shared_intermediate_size": 128,
        "layer_types": ["mamba", "attention", "mamba", "attention"]}, 32, _UNCACHED),
    Family("Nemotron-H", "nemotron_h", {
        "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 1,
        "hybrid_override_pattern": "M*M-"}, 32, _UNCACHED),
    Family("LFM2", "lfm2", {
        "layer_types": ["conv", _F, "conv", _F], "conv_dim": 128, "block_dim": 128,
        "block_auto_adjust_ff_dim": False}, 32, _ROTARY),
    Family("PaddleOCR-VL", "paddleocr_vl", _mrope(4, 6, 6), sight=Sight(
        {**_TOWER, "image_size": 112},
        {"preprocessor_config": {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "processor_class": "PaddleOCRVLProcessor",
            "size": {"shortest_edge": 784, "longest_edge": 75264}}},
        {**_QWEN_TOKENS, "image_token_id": "<|IMAGE_PLACEHOLDER|>"},
        "<|vision_start|><|IMAGE_PLACEHOLDER|><|vision_end|>",
        {"image_token": "<|IMAGE_PLACEHOLDER|>"})),
    Family("Gemma-3", "gemma3", {**_WINDOWS, **_GEMMA}, sight=Sight(
        {**_TOWER, "image_size": 56},
        {"preprocessor_config": {
            "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 4,
            "size": {"height": 56, "width": 56}},
         "processor_config": {"image_seq_length": 4, "processor_class": "Gemma3Processor"}},
        {**{f"{name}_index": token for name, token in _GEMMA_TOKENS.items()},
         **{f"lines_{n}": n * "\n" for n in range(1, 5)}},
        "<start_of_image>", _GEMMA_TOKENS, {"mm_tokens_per_image": 4})),
    Family("Qwen3-VL", "qwen3_vl", _mrope(4, 6, 6, mrope_interleaved=True),
           sight=_qwen_sight(deepstack_visual_indexes=[0, 1])),
    Family("Qwen3.5", "qwen3_5", {
        **_GDN, **_mrope(2, 3, 3, mrope_interleaved=True, partial_rotary_factor=0.5)},
        32, _BF16, _qwen_sight()),
)  # fmt: skip
FAMILIES = {each.name: each for each in _ALL}


def _make_weights(family: Family, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings, kind = {**_SMALL, **family.more}, AutoModelForCausalLM
    is_tied = settings["tie_word_embeddings"]  # then little shall say the last token again
    if sight := family.sight:
        settings["vocab_size"] += len(sight.tokens)
        settings = {"text_config": settings, "vision_config": sight.vision, "dtype": "float32",
                    "tie_word_embeddings": is_tied, **sight.more,
                    **{name: VOCAB + at for at, name in enumerate(sight.tokens)}}  # fmt: skip
        kind = AutoModelForImageTextToText
    config = AutoConfig.for_model(family.kind, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = kind.from_config(config).to(torch.float32)
        for name, weights in model.named_parameters():
            if weights.ndim > 1:  # large enough for a token to depend on the whole prompt
                weights.data.normal_(0, 0.1 if is_tied and "embed" in name else 0.3)
            elif "norm" in name:
                large = is_tied and "layers" not in name
                weights.data.add_(torch.randn_like(weights), alpha=3 if large else 0.5)
    model.save_pretrained(folder)
    if family.kind == "gemma3":  # as Google's checkpoints call it
        weights = load_file(folder / "model.safetensors")
        names = {
            name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in weights
        }
        save_file(
            {names[name]: each for name, each in weights.items()}, folder / "model.safetensors"
        )
    (folder / "generation_config.json").write_text(json.dumps(_SPECIAL))


if __name__ == "__main__":
    for each in FAMILIES.values():
        print(each.make())
