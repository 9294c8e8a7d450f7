"""A tiny PaddleOCR-VL with random weights: images in prompts, and positions in three dimensions
(M-RoPE). It has the tokenizer of the tiny Llama and a few tokens more.

``python -m tests.tiny_vision FOLDER`` makes one by hand.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

from tests.tiny_model import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MAX_TOKENS,
    SEED,
    VOCAB,
    make_tokenizer,
    save_random_weights,
)

PATCH = 14
TOKEN_PIXELS = (2 * PATCH) ** 2  # of an image make one token
MOST_TOKENS = 96  # of an image
_SPECIAL = ("<|IMAGE_PLACEHOLDER|>", "<|VIDEO_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>")
_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>{% endif %}{% endfor %}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_DEFAULT = Path(__file__).parent.parent / ".cache" / "models" / "tiny-vision"
_MARK = "complete-1"


def tiny_vision(folder: Path = _DEFAULT) -> Path:
    """The model's folder, made when it is not there yet (about two seconds)."""
    if not (folder / _MARK).exists():
        make_tokenizer(folder, _TEMPLATE, _SPECIAL, image_token=_SPECIAL[0])
        _make_weights(folder)
        edges = {"shortest_edge": TOKEN_PIXELS, "longest_edge": MOST_TOKENS * TOKEN_PIXELS}
        settings = {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "processor_class": "PaddleOCRVLProcessor",
            "size": edges,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        (folder / _MARK).touch()
    return folder


def _make_weights(folder: Path) -> None:
    from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

    head = HIDDEN // HEADS
    text = {
        "vocab_size": VOCAB + len(_SPECIAL),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": 0.3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16],
        },
        "tie_word_embeddings": False,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8 * PATCH,
        "patch_size": PATCH,
        "initializer_range": 0.3,
    }
    names = ("image", "video", "vision_start", "vision_end")
    ids = {f"{name}_token_id": VOCAB + at for at, name in enumerate(names)}
    config = PaddleOCRVLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, dtype="float32", **ids
    )
    save_random_weights(PaddleOCRVLForConditionalGeneration, config, folder, SEED)


def png(seed: int, columns: int = 4, rows: int = 3) -> bytes:
    """An image of coloured squares, each of which becomes one token."""
    from PIL import Image

    colours = random.Random(seed).randbytes(3 * columns * rows)
    squares = Image.frombytes("RGB", (columns, rows), colours)
    size, file = (2 * PATCH * columns, 2 * PATCH * rows), io.BytesIO()
    squares.resize(size, Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def picture(seed: int, columns: int = 4, rows: int = 3) -> dict[str, Any]:
    """A part of a chat message: an image as a data URL."""
    data = base64.b64encode(png(seed, columns, rows)).decode()
    return linked(f"data:image/png;base64,{data}")


def linked(url: str) -> dict[str, Any]:
    """A part of a chat message: the image at an address."""
    return {"type": "image_url", "image_url": {"url": url}}


if __name__ == "__main__":
    print(tiny_vision(Path(sys.argv[1]) if len(sys.argv) > 1 else _DEFAULT))
