"""A private Hugging Face cache in which the models that other people's tests name are SmolLM2.

Their tests ask for models by hub id and no hub is reachable: every id is a link to one small model.
What they check is HTTP, not what a model knows, and stock vLLM is run with the same links.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from examples.smollm2 import prepare
from tests.tiny_model import make_adapter

REVISION = "0" * 40
# Their tests count the token with which this model begins every prompt.
WITH_BOS = "facebook/opt-125m"
MODELS = (
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolVLM-256M-Instruct",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    WITH_BOS,
    "google/translategemma-4b-it",
    "hmellor/tiny-random-LlamaForCausalLM",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "openai-community/gpt2",
)
ADAPTERS = ("charent/self_cognition_Alice", "typeof/zephyr-7b-beta-lora")
# Reasoning and tool parsers look for these in the vocabulary; SmolLM2 never uses the ones on the
# left, which its tokenizer reserves for source code.
TOKENS = {
    "<gh_stars>": "<think>",
    "<issue_start>": "</think>",
    "<issue_comment>": "<tool_call>",
    "<issue_closed>": "</tool_call>",
}
WINDOW = 18432  # tests ask for up to 18192 tokens; what is said there does not matter


def make_hub(folder: Path) -> Path:
    """The cache's folder, made when it is not there yet (half a minute)."""
    done, recipe = folder / "complete", Path(__file__).read_text()
    if done.exists() and done.read_text() == recipe:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    model = folder / "model"
    shutil.copytree(prepare("float32"), model)
    for path in (model / "tokenizer.json", model / "tokenizer_config.json"):
        text = path.read_text()
        for reserved, wanted in TOKENS.items():
            text = text.replace(reserved, wanted)
        path.write_text(text)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = WINDOW
    (model / "config.json").write_text(json.dumps(config))
    adapter = make_adapter(model, folder / "adapter", ["q_proj"], scale=0.01)
    begins = folder / "begins"
    shutil.copytree(model, begins, copy_function=os.link)
    _begin_with_bos(begins / "tokenizer.json")
    for names, target in ((MODELS, model), (ADAPTERS, adapter)):
        for name in names:
            _link(
                folder / f"models--{name.replace('/', '--')}",
                begins if name == WITH_BOS else target,
            )
    done.write_text(recipe)
    return folder


def _begin_with_bos(path: Path) -> None:
    tokenizer = json.loads(path.read_text())
    bos = next(each for each in tokenizer["added_tokens"] if each["id"] == 1)["content"]
    post = tokenizer["post_processor"]
    post["single"].insert(0, {"SpecialToken": {"id": bos, "type_id": 0}})
    post["special_tokens"][bos] = {"id": bos, "ids": [1], "tokens": [bos]}
    path.unlink()  # it is a link to the other model's
    path.write_text(json.dumps(tokenizer))


def _link(entry: Path, target: Path) -> None:
    """One model of the cache, with the layout of huggingface_hub."""
    snapshot = entry / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(REVISION)
    for path in target.iterdir():
        (snapshot / path.name).symlink_to(path.resolve())
