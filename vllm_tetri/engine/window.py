"""The model's window, as far as it is known before the model is loaded.

Only what was given on the command line or lies in a local `config.json` is read;
what needs vLLM's own resolving (a model hub, scaled positions) is left to the
engine, which checks again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from vllm_tetri.config import TetriConfig, option_of
from vllm_tetri.errors import ConfigError
from vllm_tetri.types import Role

# Keys of config.json that make the window another one than its positions.
_SCALED = ("rope_scaling", "rope_parameters")


def require_fitting_chunk(namespace: argparse.Namespace, config: TetriConfig) -> None:
    """Refuse a chunk that no step could hold.

    Raises:
        ConfigError: It is larger than the window, or on a prefill instance than
            the `--max-num-batched-tokens` that the user gave.
    """
    if config.chunk_size == "auto":
        return
    most, why = _most(namespace, config.role)
    if config.chunk_size > most:
        raise ConfigError(
            f"{option_of('chunk_size')} {config.chunk_size}: must be auto or between 1 and "
            f"{most}, {why}"
        )


def most_chunk_tokens(namespace: argparse.Namespace) -> float:
    """The largest chunk that `require_fitting_chunk` lets through; infinite if unknown."""
    return _most(namespace, Role.PREFILL)[0]


def _most(namespace: argparse.Namespace, role: Role) -> tuple[float, str]:
    limits: list[tuple[float, str]] = [(math.inf, "")]
    if (window := _window(namespace)) is not None:
        limits.append((window, "the model's window"))
    batched = getattr(namespace, "max_num_batched_tokens", None)
    if batched is not None and role is Role.PREFILL:
        limits.append((batched, "the given --max-num-batched-tokens"))
    return min(limits)


def _window(namespace: argparse.Namespace) -> int | None:
    given = getattr(namespace, "max_model_len", None)
    if given is not None and given > 0:  # -1 is vLLM's "auto"
        return int(given)
    if getattr(namespace, "hf_overrides", None):
        return None
    folder = getattr(namespace, "hf_config_path", None) or (
        getattr(namespace, "model_tag", None) or getattr(namespace, "model", None)
    )
    return _positions(Path(str(folder)) / "config.json") if folder else None


def _positions(file: Path) -> int | None:
    try:
        config: Any = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or any(_is_scaled(config.get(key)) for key in _SCALED):
        return None
    positions = config.get("max_position_embeddings")
    return positions if isinstance(positions, int) and positions > 0 else None


def _is_scaled(rope: object) -> bool:
    """Whether rotary positions are stretched; some models say so per kind of layer."""
    if not isinstance(rope, dict):
        return False
    if any(map(_is_scaled, rope.values())):
        return True
    return rope.get("rope_type", rope.get("type", "default")) != "default"
